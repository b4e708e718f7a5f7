"""Requests to send: seeded lengths with prompts by formula, or requests written in a file.

`workload.json` holds 1,000 prompt and output lengths and the gaps of a Poisson process of rate 1,
drawn once from its seed. A `.jsonl` workload has one request a line: `prompt` (text or token ids)
or `messages`, and `max_tokens`.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo.serve.flags import reason_of

DEFAULT = Path(__file__).parent / "workload.json"
_COMMON = (
    "the of and to in that was with for on as his they at be this from have or by one had not but "
    "what all were when we there can an your which their said if do will each about how up out "
    "them then she many some so these would other into has more her two like him see time could"
)
WORDS = _COMMON.split()


@dataclass(frozen=True, slots=True)
class Asked:
    """One request: what it generates from (`prompt` or `messages`) and how much."""

    index: int
    source: dict[str, Any]
    max_tokens: int
    prompt_tokens: int | None


@dataclass(frozen=True)
class Workload:
    """Requests in order, and the gaps in seconds of their arrivals at one a second."""

    name: str
    seed: int
    prompt_lens: list[int] = field(default_factory=list)
    output_lens: list[int] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    written: list[Asked] | None = None

    def __len__(self) -> int:
        return len(self.output_lens)

    def requests(self, count: int, *, vocab: int, text: bool) -> list[Asked]:
        """The first `count` requests, with token-id prompts or, with `text`, as many words."""
        if self.written is not None:
            return self.written[:count]
        out = []
        for i, (tokens, most) in enumerate(zip(self.prompt_lens[:count], self.output_lens)):
            prompt = words(i, tokens) if text else prompt_ids(i, tokens, vocab)
            out.append(Asked(i, {"prompt": prompt}, most, None if text else tokens))
        return out

    def arrivals(self, count: int, rate: float) -> list[float]:
        """Seconds from the start at which the first `count` requests are due."""
        at, out = 0.0, []
        for gap in self.gaps[:count]:
            at += gap / rate
            out.append(at)
        return out


def load(path: str | Path = DEFAULT, seed: int | None = None) -> Workload:
    """The workload in a file; another `seed` than the file's draws other arrivals.

    Raises ValueError for a file that is no workload.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"workload {reason_of(error)}") from None
    if path.suffix == ".jsonl":
        asked = [_written(i, line, path) for i, line in enumerate(text.splitlines()) if line]
        lens = [one.max_tokens for one in asked]
        gaps = poisson_gaps(len(asked), seed or 0)
        return Workload(path.name, seed or 0, [], lens, gaps, asked)
    try:
        data = json.loads(text)
        prompts, outputs, gaps = data["prompt_lens"], data["output_lens"], data["gaps"]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} is no workload: it needs prompt_lens, output_lens and gaps ({error})"
        ) from None
    if seed is not None and seed != data["seed"]:
        gaps = poisson_gaps(len(prompts), seed)
    return Workload(path.name, data["seed"] if seed is None else seed, prompts, outputs, gaps)


def _written(index: int, line: str, path: Path) -> Asked:
    try:
        fields = json.loads(line)
        source = {name: fields[name] for name in ("prompt", "messages") if name in fields}
        if len(source) != 1:
            raise ValueError("it needs either prompt or messages")
        prompt = source.get("prompt")
        return Asked(
            index,
            source,
            int(fields["max_tokens"]),
            len(prompt) if isinstance(prompt, list) else None,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}, line {index + 1}: {error}") from None


def poisson_gaps(count: int, seed: int) -> list[float]:
    """Gaps in seconds of a Poisson process of rate 1."""
    draw = random.Random(seed)
    return [draw.expovariate(1.0) for _ in range(count)]


def token(i: int, j: int, vocab: int) -> int:
    """Token j of prompt i; prompts differ from the first token on, so they share no prefix."""
    low = min(1000, vocab // 8)
    span = min(120_000, vocab - low)
    return low + (i * 1000003 + j * 7919 + (i * j) % 104729 * 31) % span


def prompt_ids(i: int, count: int, vocab: int) -> list[int]:
    """The ids of prompt i."""
    return [token(i, j, vocab) for j in range(count)]


def words(i: int, count: int) -> str:
    """A text of `count` common words, about as many tokens, that starts with the number i."""
    return " ".join([str(i), *(WORDS[token(i, j, 1 << 17) % len(WORDS)] for j in range(1, count))])


def random_prompts(count: int, tokens: int, vocab: int, seed: int) -> Sequence[list[int]]:
    """`count` prompts of uniformly drawn ids."""
    draw = random.Random(seed)
    return [[draw.randrange(vocab // 8, vocab) for _ in range(tokens)] for _ in range(count)]
