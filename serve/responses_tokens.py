"""Which of an answer's tokens the text of its messages is made of."""

from collections import deque
from collections.abc import Iterable

from octavo.serve.output import TokenText


class SpelledTokens:
    """Tokens of one answer, matched by place with the stretches of it that are message text.

    Those of tags, reasoning and calls belong to none, nor does one without text at the very end (of
    a stop or end-of-sequence id). A token that only reaches into a stretch belongs to it.
    """

    def __init__(self) -> None:
        self._waiting: deque[TokenText] = deque()
        self._start = self._end = 0

    def feed(self, tokens: Iterable[TokenText]) -> None:
        """Take tokens, in order, whose text is settled."""
        self._waiting.extend(tokens)

    def spell(self, text: str, start: int) -> list[TokenText]:
        """Tokens known by now of the stretch that `text` is, `start` characters into the answer."""
        self._start, self._end = start, start + len(text)
        return self.late()

    def late(self) -> list[TokenText]:
        """Further tokens of the last stretch: a stop string may hold them back for longer."""
        out: list[TokenText] = []
        while self._waiting and self._waiting[0].start < self._end:
            token = self._waiting.popleft()
            if max(token.start, token.start + len(token.text) - 1) >= self._start:
                out.append(token)
        return out
