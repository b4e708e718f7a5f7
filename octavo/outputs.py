"""What `LLM.generate` returns. Field names follow vLLM's, so that scripts port."""

from dataclasses import dataclass, field

from octavo.serve.types import TokenLogprob


@dataclass(frozen=True)
class CompletionOutput:
    """One sample of one prompt.

    Attributes:
        index: sample index, 0 .. n-1.
        text: generated text; "" without a tokenizer.
        token_ids: generated ids, a final stop id included.
        logprobs: one entry a token when asked for, else None.
        finish_reason: "stop", "length", "abort" or "error"; None in a stream that goes on.
        stop_reason: the stop string or stop id that ended it; None for end-of-sequence.
        error: message when finish_reason is "error".
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str | None = None


@dataclass(frozen=True)
class RequestOutput:
    """All samples of one prompt.

    Attributes:
        prompt: text of the prompt, when it was given as text.
        prompt_token_ids: ids of the prompt.
        prompt_logprobs: one entry a prompt token (the first None) when asked for, else None.
        outputs: n samples in order.
        cached_tokens: prompt tokens that came from the prefix cache.
    """

    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: list[CompletionOutput] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    cached_tokens: int = 0
