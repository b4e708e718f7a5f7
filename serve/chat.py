"""The terminal conversation: streaming, history, and a few slash commands."""

import contextlib
import sys
import time
from typing import Any, TextIO

from octavo.llm import LLM
from octavo.serve.config import EngineConfig

HELP = """/reset          forget the conversation
/system TEXT    start over with this system message (none without TEXT)
/stats          tokens, speed, cache
/help           this list
/exit           leave (also Ctrl-D); Ctrl-C stops the answer only"""


class Chat:
    """A conversation with a model on a pair of streams."""

    def __init__(
        self,
        config: EngineConfig,
        system: str | None,
        sampling: dict[str, Any],
        *,
        out: TextIO | None = None,
    ) -> None:
        self.llm = LLM(config=config)
        if self.llm.tokenizer is None or not self.llm.tokenizer.chat_template:
            raise ValueError(f"{config.model} has no chat template: use octavo generate")
        self._tokenizer = self.llm.tokenizer
        self.params = self.llm.default_params(**{"max_tokens": None, **sampling})
        if self.params.n != 1:
            raise ValueError(f"n must be 1 in a chat, not {self.params.n}")
        self._out = out or sys.stdout
        self._last = "no answer yet"
        self.reset(system)

    def reset(self, system: str | None = None) -> None:
        """Forget the conversation, keep or set the system message."""
        self.messages: list[dict[str, str]] = []
        if system:
            self.messages.append({"role": "system", "content": system})

    def ask(self, text: str) -> int:
        """Stream the answer to one message; returns an exit code."""
        self.messages.append({"role": "user", "content": text})
        ids = self._tokenizer.encode_chat(self.messages)
        start = time.perf_counter()
        first, tokens, parts, error = None, 0, [], None
        stream = self.llm.stream(ids, self.params)
        try:
            for item in stream:
                first = first or time.perf_counter()
                tokens += len(item.token_ids)
                parts.append(item.text)
                error = item.error or error
                print(item.text, end="", flush=True, file=self._out)
        except KeyboardInterrupt:
            print(" [stopped]", end="", file=self._out)
        finally:
            stream.close()
        self.messages.append({"role": "assistant", "content": "".join(parts)})
        self._report(len(ids), tokens, start, first or time.perf_counter())
        if error:
            print(f"octavo chat: {error}", file=sys.stderr)
        return 1 if error else 0

    def _report(self, prompt: int, tokens: int, start: float, first: float) -> None:
        end = time.perf_counter()
        rate = (tokens - 1) / (end - first) if tokens > 1 and end > first else 0.0
        self._last = (
            f"{prompt} prompt tokens, first token after {first - start:.2f} s, "
            f"{tokens} tokens at {rate:.1f} tokens/s"
        )
        print(f"\n[{self._last}]", file=self._out)

    def repl(self) -> int:
        """Read messages until end of input."""
        print(f"{self.llm.config.model}: /help lists commands", file=self._out)
        if sys.stdin.isatty():
            _edit_lines()
        while True:
            try:
                line = input("> ").strip()
            except EOFError:
                print(file=self._out)
                return 0
            except KeyboardInterrupt:
                print(file=self._out)
                continue
            if line in ("/exit", "/quit"):
                return 0
            if line.startswith("/"):
                self._command(line)
            elif line:
                self._ask_safely(line)

    def _ask_safely(self, line: str) -> None:
        try:
            self.ask(line)
        except (ValueError, RuntimeError) as error:  # the conversation outgrew the context, say
            self.messages.pop()
            print(f"{error}; /reset starts over", file=self._out)

    def _command(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        if name == "/reset":
            system = self.messages[0]["content"] if self._has_system() else None
            self.reset(system)
        elif name == "/system":
            self.reset(rest.strip() or None)
        elif name == "/stats":
            stats = self.llm.engine.stats()
            print(self._last, file=self._out)
            print(
                f"pages {stats.pages_used}/{stats.pages_total}, prompt tokens "
                f"{stats.prompt_tokens} ({stats.cached_tokens} cached), "
                f"generated {stats.generated_tokens}",
                file=self._out,
            )
        else:
            print(HELP, file=self._out)

    def _has_system(self) -> bool:
        return bool(self.messages) and self.messages[0]["role"] == "system"


def _edit_lines() -> None:
    """Arrow keys, history and editing for `input`, where the library for it is there."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (importing it is all it takes)
