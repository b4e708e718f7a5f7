"""Reasoning before the answer: `<think>...</think>` at its start, or opened by the prompt."""

from octavo.sampling.params import MAX_INT32
from octavo.sampling.shown import shown
from octavo.serve.answer_parser import AnswerParser
from octavo.serve.answer_reader import Waiting
from octavo.serve.detokenize import TextDecoder
from octavo.serve.errors import invalid, unsupported
from octavo.serve.thinking import Thinking

OPEN, CLOSE = "<think>", "</think>"
# Enough to hold the tag and the space around it; a token is a character at least.
TAIL_TOKENS = 16
MAX_BUDGET = MAX_INT32
_BLANKS = ("\n", "\n\n", " ")


class ThinkParser(AnswerParser):
    """Splits an answer into reasoning and content; only a block at its start is reasoning.

    Attributes:
        reasoning: the text now read is reasoning.
    """

    markers = (OPEN, CLOSE)

    def __init__(self, *, opened: bool) -> None:
        """`opened`: the prompt has opened the block, so the answer begins inside it."""
        super().__init__()
        self.reasoning = opened

    def _parse(self) -> Waiting[None]:
        if not self.reasoning:
            yield from self._attempt(self._opening(), 0)
        if self.reasoning:
            yield from self._stream_reasoning(CLOSE)
            self.reasoning = False
        yield from self._reader.until(())

    def _opening(self) -> Waiting[None]:
        yield from self._reader.spaces()
        yield from self._reader.expect(OPEN)
        self.reasoning = True


def ends_in_reasoning(prompt_end: str, prefill: str = "") -> bool:
    """Whether generation starts inside a block, which the prompt or a prefill has opened."""
    opened = prefill.rpartition(OPEN)
    return (bool(opened[1]) and CLOSE not in opened[2]) or prompt_end.rstrip().endswith(OPEN)


def thinking_bound(tokenizer: TextDecoder, budget: int, *, opened: bool, field: str) -> Thinking:
    """The bound of a sample's reasoning; ApiError 400 where tags are not one token each.

    `field` of the request asks for it.
    """
    if not 0 <= budget <= MAX_BUDGET:
        raise invalid(f"{field} must be 0 .. {MAX_BUDGET}, not {shown(budget)}", field)
    open_, close = _one_token(tokenizer, OPEN), _one_token(tokenizer, CLOSE)
    if open_ is None or close is None:
        raise unsupported(field, f"{OPEN} and {CLOSE} are not one token each in this model")
    blanks = (_one_token(tokenizer, blank) for blank in _BLANKS)
    return Thinking(budget, open_, close, opened, tuple(i for i in blanks if i is not None))


def _one_token(tokenizer: TextDecoder, text: str) -> int | None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    return ids[0] if len(ids) == 1 else None
