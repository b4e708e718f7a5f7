"""Reasoning before the answer: `<think>...</think>` at its start, or opened by the prompt."""

from octavo.serve.answer_parser import AnswerParser
from octavo.serve.answer_reader import Waiting

OPEN, CLOSE = "<think>", "</think>"
# Enough to hold the tag and the space around it; a token is a character at least.
TAIL_TOKENS = 16


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
