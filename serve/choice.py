"""What a generating request wants, and the choices of its answer."""

from dataclasses import dataclass, field

from octavo.serve.output import SampleOutput, TokenText
from octavo.serve.prompts import Prompt
from octavo.serve.structured import Structured
from octavo.serve.thinking import Thinking
from octavo.serve.timing import SampleTimes
from octavo.serve.types import Request


@dataclass(frozen=True, slots=True)
class Wanted:
    """What an answer reports.

    Attributes:
        chat: chat format; else completions format.
        logprobs: alternatives a token, None for no log-probabilities.
        prompt_logprobs: alternatives a prompt token in the extension field, None for none.
        echo: completions repeat the prompt before the text.
        token_ids: report token ids beside the text.
        tokens_as_ids: log-probabilities name tokens by their ids, not by their texts.
        usage: a stream ends with a usage event.
        counting: and each event says what was used until then.
        timing: usage says where the time went.
        shown: special tokens that are spelled out whatever skip_special_tokens says.
        structured: what the text must be, if anything.
        thinking: a bound for its reasoning, if any.
    """

    chat: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    echo: bool = False
    token_ids: bool = False
    tokens_as_ids: bool = False
    usage: bool = False
    counting: bool = False
    timing: bool = False
    shown: frozenset[int] = frozenset()
    structured: Structured | None = None
    thinking: Thinking | None = None


@dataclass(slots=True)
class Choice:
    """One sample of one prompt."""

    index: int
    prompt: Prompt
    request: Request
    sample: SampleOutput
    times: SampleTimes
    parts: list[str] = field(default_factory=list)
    tokens: list[TokenText] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    echoed: tuple[str, list[TokenText]] | None = None

    def start_over(self, sample: SampleOutput) -> None:
        """Forget what it has gained, for it begins anew."""
        self.sample = sample
        self.times.start_over()
        self.parts.clear()
        self.tokens.clear()
