"""Answers that must be nothing but tool calls.

A grammar holds the text to calls, so what is no call yet when max_tokens cuts it is part of one
that was never announced, and no content. And a small model that may always make one more call often
never stops: a call that says word for word what an earlier one of the answer said ends the answer
and is left out. To know that before anything of it is sent, a call is held back for as long as it
repeats an earlier one.
"""

from octavo.serve.answer_parser import (
    AnswerEvent,
    AnswerParser,
    CallArguments,
    CallStart,
    ContentDelta,
)


class RequiredCalls:
    """The calls that `parser` reads, without content and without a repeated one at the end.

    Attributes:
        done: nothing that follows counts.
        calls: calls begun and reported.
    """

    def __init__(self, parser: AnswerParser) -> None:
        self._parser = parser
        self._texts: list[tuple[str, str]] = []
        self._held: list[AnswerEvent] = []
        self._repeated = False

    @property
    def done(self) -> bool:
        """Nothing that follows counts."""
        return self._repeated or self._parser.done

    @property
    def calls(self) -> int:
        """Calls begun and reported."""
        return len(self._texts) - bool(self._held)

    def push(self, text: str) -> list[AnswerEvent]:
        """Events that are certain once `text` is known."""
        return self._passed([] if self._repeated else self._parser.push(text))

    def finish(self) -> list[AnswerEvent]:
        """The rest, when the answer has ended; a held call that was cut short is shown."""
        events = self._passed([] if self._repeated else self._parser.finish())
        return events if self._repeated else events + self._released()

    def _passed(self, events: list[AnswerEvent]) -> list[AnswerEvent]:
        out: list[AnswerEvent] = []
        for event in events:
            match event:
                case ContentDelta():
                    continue
                case CallStart(_, _, name):
                    self._texts.append((name, ""))
                case CallArguments(_, text):
                    name, before = self._texts[-1]
                    self._texts[-1] = (name, before + text)
            self._held.append(event)
            if not self._may_repeat():
                out += self._released()
            elif self._texts[-1] in self._texts[:-1]:
                self._repeated = True
                return out
        return out

    def _may_repeat(self) -> bool:
        """Whether the last call is, so far, the beginning of an earlier one.

        Arguments are one JSON object, no proper beginning of which is a JSON object too.
        """
        name, text = self._texts[-1]
        return any(name == old and whole.startswith(text) for old, whole in self._texts[:-1])

    def _released(self) -> list[AnswerEvent]:
        events, self._held = self._held, []
        return events
