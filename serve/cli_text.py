"""`octavo generate`, `chat` and `score`: the model in this process, text in and text out.

What they are given is checked before a model is loaded.
"""

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from absl import flags

from octavo.sampling.params import SamplingParams
from octavo.serve.configfile import LoadedConfig
from octavo.serve.flags import UsageError, reason_of

if TYPE_CHECKING:
    from octavo.llm import LLM

COMPILING = "octavo: compiling programs, some seconds each; later runs find them compiled"


def _define_sampling(values: flags.FlagValues) -> None:
    """Sampling flags of generate and chat."""
    flags.DEFINE_integer("max_tokens", None, "tokens to generate", flag_values=values)
    flags.DEFINE_float("temperature", None, "0 is greedy", flag_values=values)
    flags.DEFINE_float("top_p", None, "nucleus mass", flag_values=values)
    flags.DEFINE_integer("top_k", None, "keep the k likeliest", flag_values=values)
    flags.DEFINE_integer("sampling_seed", None, "seed of the draws", flag_values=values)


_SAMPLING_HELP = """
  --temperature          0 is greedy; default: what the model says, else 1
  --top_p, --top_k       draw from the likeliest tokens only
  --sampling_seed        seed of the draws"""


def _sampling_fields(values: flags.FlagValues) -> dict[str, Any]:
    """The sampling flags that were given; UsageError for one out of range."""
    wanted = ("max_tokens", "temperature", "top_p", "top_k", "n", "sampling_seed")
    given = (name for name in wanted if name in values and values[name].present)
    return _checked({{"sampling_seed": "seed"}.get(n, n): values[n].value for n in given})


def _checked(fields: dict[str, Any]) -> dict[str, Any]:
    """Fields of SamplingParams; UsageError if they can't be."""
    try:
        SamplingParams(**fields)
    except (ValueError, TypeError) as error:
        raise UsageError(f"sampling: {error}") from None
    return fields


def _loaded(config: LoadedConfig) -> "LLM":
    from octavo.llm import LLM

    llm = LLM(config=config.engine)
    _announce_compiles(llm)
    return llm


def _announce_compiles(llm: "LLM") -> None:
    """Say why nothing happens for a while, once: when the first program is compiled."""
    pending = [COMPILING]
    llm.engine.on_compile(lambda: print(pending.pop(), file=sys.stderr) if pending else None)


def define_generate(values: flags.FlagValues) -> None:
    """Flags of generate."""
    _define_sampling(values)
    flags.DEFINE_integer("n", None, "samples of each prompt", flag_values=values)


GENERATE_HELP = f"""[TEXT ...] [--flags]

Completes each TEXT, or what standard input holds; a JSON line a sample. A config file may hold
`prompts`, and `sampling`: each is run with every prompt.

  --max_tokens=64        tokens to generate
  --n                    samples of each prompt{_SAMPLING_HELP}"""


def generate(config: LoadedConfig, values: flags.FlagValues, prompts: list[str]) -> int:
    """Complete each prompt (arguments, the config file's, or stdin) under each sampling."""
    given = _sampling_fields(values)
    samplings = [dict(one) for one in config.extra.get("sampling", ())] or [{}]
    wanted = [_checked({"max_tokens": 64, **fields, **given}) for fields in samplings]
    texts = prompts or list(config.extra.get("prompts", ()))
    if not texts:
        if sys.stdin.isatty():
            raise UsageError("no prompt: give one as an argument, or on standard input")
        texts = [_standard_input()]
    llm = _loaded(config)
    for fields, one in zip(samplings, wanted, strict=True):
        for output in llm.generate(texts, llm.default_params(**one)):
            for sample in output.outputs:
                told = {**fields, **given, "prompt": output.prompt}
                print(json.dumps(told | dataclasses.asdict(sample)))
    return 0


def _standard_input() -> str:
    """The prompt there, without the line break that echo adds."""
    try:
        text = sys.stdin.read().removesuffix("\n")
        text.encode()  # what was no UTF-8 may have become lone surrogates
    except UnicodeError:
        raise ValueError("standard input is not UTF-8 text") from None
    if not text:
        raise UsageError("no prompt: standard input is empty")
    return text


def define_chat(values: flags.FlagValues) -> None:
    """Flags of chat."""
    _define_sampling(values)
    flags.DEFINE_string("system", None, "system message", flag_values=values)


CHAT_HELP = f"""[TEXT ...] [--flags]

A conversation in the terminal, or the answer to TEXT.

  --system               system message
  --max_tokens           tokens of an answer; default: what the context holds{_SAMPLING_HELP}"""


def chat(config: LoadedConfig, values: flags.FlagValues, words: list[str]) -> int:
    """The REPL, or one answer when a question is given."""
    sampling = _sampling_fields(values)
    from octavo.serve.chat import Chat

    talk = Chat(config.engine, values["system"].value, sampling)
    _announce_compiles(talk.llm)
    if words:
        return talk.ask(" ".join(words))
    return talk.repl()


SCORE_HELP = """FILE ... [--flags]

Mean negative log-likelihood and perplexity of each text FILE under the model; a JSON line each."""


def score(config: LoadedConfig, values: flags.FlagValues, paths: list[str]) -> int:
    """Mean negative log-likelihood and perplexity of each text file."""
    if not paths:
        raise UsageError("score needs at least one text file")
    texts = {path: _text(path) for path in paths}
    import numpy as np

    llm = _loaded(config)
    if llm.tokenizer is None:
        raise ValueError(f"{config.engine.model} has no tokenizer: score reads text")
    for path, text in texts.items():
        ids = llm.tokenizer.encode(text)
        if len(ids) < 2:
            raise ValueError(f"{path} holds {len(ids)} tokens; score needs at least 2")
        logits = llm.score(ids).astype(np.float64)[:-1]
        top = logits.max(axis=1)
        totals = top + np.log(np.exp(logits - top[:, None]).sum(axis=1))
        loss = float((totals - logits[np.arange(len(ids) - 1), ids[1:]]).mean())
        report = {"file": path, "tokens": len(ids), "nll": loss, "perplexity": float(np.exp(loss))}
        print(json.dumps(report))
    return 0


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"FILE {reason_of(error)}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from None
