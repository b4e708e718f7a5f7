"""The base of everything that takes an answer apart: content, reasoning and tool calls.

A parser is fed text as it is generated and emits events. A format is one generator, `_parse`, over
a `Reader`; the events of all pushes joined are the same however the text was cut.

Text is in one of three modes. CONTENT and STREAMED (arguments, reasoning) go out as soon as they
are read. HELD text might be a call: once it is known to be one it is consumed, and if it isn't it
is content after all, so nothing is lost. White space next to a call or a reasoning block separates
and is dropped.
"""

import enum
import uuid
from collections.abc import Callable, Collection, Generator
from dataclasses import dataclass

from octavo.serve.answer_reader import Malformed, Reader, Waiting


@dataclass(slots=True)
class ContentDelta:
    """Text of the answer proper; `start` is where the answer has it, in characters."""

    text: str
    start: int = 0


@dataclass(slots=True)
class ReasoningDelta:
    """Text of the reasoning before the answer."""

    text: str


@dataclass(slots=True)
class CallStart:
    """A tool call begins. `index` counts the calls of an answer from 0."""

    index: int
    id: str
    name: str


@dataclass(slots=True)
class CallArguments:
    """A piece of a call's arguments; all pieces joined are its JSON text."""

    index: int
    text: str


type AnswerEvent = ContentDelta | ReasoningDelta | CallStart | CallArguments


def new_call_id() -> str:
    """An id in OpenAI's form."""
    return f"call_{uuid.uuid4().hex[:24]}"


def short_call_id() -> str:
    """Nine letters and digits: Mistral's templates take no other id."""
    return uuid.uuid4().hex[:9]


class _Mode(enum.Enum):
    CONTENT = enum.auto()
    STREAMED = enum.auto()
    HELD = enum.auto()


class _Enough(Exception):
    """As many calls as were allowed have been read."""


class AnswerParser:
    """One answer being taken apart.

    Attributes:
        done: nothing that follows counts, so the sample may be ended.
        calls: calls begun.
    """

    markers: tuple[str, ...] = ()
    """Special tokens that the format needs to see in the text."""

    def __init__(self, names: Collection[str] = (), *, max_calls: int | None = None) -> None:
        """`names` are the tools that may be called: anything else is content."""
        self._names = names
        self._max_calls = max_calls
        self._reader = Reader()
        self._events: list[AnswerEvent] = []
        self._mode = _Mode.CONTENT
        self._emit: Callable[[str], None] = self._content
        self._sent = self._dropped = 0
        self._at_seam = False
        self._task: Generator[None, None, None] = self._guarded()
        self.done = False
        self.calls = 0

    def push(self, text: str) -> list[AnswerEvent]:
        """Events that are certain once `text` is known."""
        if not text or self.done:
            return []
        self._reader.text += text
        return self._resume()

    def finish(self) -> list[AnswerEvent]:
        """The rest, when the answer has ended."""
        self._reader.ended = True
        return [] if self.done else self._resume()

    def _resume(self) -> list[AnswerEvent]:
        next(self._task, None)
        self._flush()
        events, self._events = self._events, []
        return events

    def _guarded(self) -> Generator[None, None, None]:
        try:
            yield from self._parse()
        except _Enough:
            self.done = True

    def _parse(self) -> Waiting[None]:
        """Read the whole answer; a format overrides this."""
        raise NotImplementedError

    def _new_id(self) -> str:
        return new_call_id()

    # What a format's generators call ------------------------------------------------------------

    def _attempt(self, read: Waiting[None], skip: int) -> Waiting[bool]:
        """Run `read` on held text; whether it found a call.

        Where it raises Malformed, what no call has used is content again, and reading goes on
        `skip` characters behind the start, or behind the last call.
        """
        self._flush()
        start, before = self._reader.at, self.calls
        self._mode = _Mode.HELD
        try:
            yield from read
            self._consume()
        except Malformed:
            self._reader.at = start + skip if self.calls == before else self._sent
        self._mode, self._emit = _Mode.CONTENT, self._content
        return self.calls > before

    def _open_call(self, name: str) -> None:
        """Begin a call; the text before it that is still held is consumed."""
        self._events.append(CallStart(self.calls, self._new_id(), name))
        self.calls += 1
        self._consume()

    def _whole_arguments(self, text: str) -> None:
        """The call's arguments in one piece; the text read for them is consumed."""
        self._arguments(text)
        self._consume()
        self._count_calls()

    def _stream_arguments(self, read: Waiting[object], closers: tuple[str, ...]) -> Waiting[None]:
        """What `read` consumes goes out as arguments at once.

        Where it isn't JSON any more it is arguments still, up to one of `closers` or the end: the
        caller must see what the model wrote.
        """
        self._mode, self._emit = _Mode.STREAMED, self._arguments
        try:
            yield from read
        except Malformed:
            yield from self._reader.until(closers)
        self._flush()
        self._mode = _Mode.HELD
        self._count_calls()

    def _stream_reasoning(self, closer: str) -> Waiting[None]:
        """What comes before `closer` is reasoning; `closer` is consumed."""
        self._consume()
        self._mode, self._emit = _Mode.STREAMED, self._reasoning
        yield from self._reader.until((closer,))
        self._flush()
        yield from self._reader.literal(closer)
        self._consume()
        self._mode, self._emit = _Mode.CONTENT, self._content

    def _count_calls(self) -> None:
        if self.calls == self._max_calls:
            raise _Enough

    def _consume(self) -> None:
        """Everything up to here is used; white space around it separates."""
        self._sent = self._reader.at
        self._at_seam = True

    # Sending ------------------------------------------------------------------------------------

    def _flush(self) -> None:
        """Send what was read in this mode."""
        reader = self._reader
        if self._mode is _Mode.HELD:
            return
        self._emit(reader.text[self._sent : reader.at])
        # Only here is nothing known by its position.
        reader.drop(self._sent)
        self._dropped += self._sent
        self._sent = 0

    def _arguments(self, text: str) -> None:
        self._sent += len(text)
        if text:
            self._events.append(CallArguments(self.calls - 1, text))

    def _content(self, text: str) -> None:
        if text := self._trimmed(text):
            self._events.append(ContentDelta(text, self._dropped + self._sent - len(text)))

    def _reasoning(self, text: str) -> None:
        if text := self._trimmed(text):
            self._events.append(ReasoningDelta(text))

    def _trimmed(self, text: str) -> str:
        """`text` without white space at a seam; what trails may be at one, so it waits."""
        if self._at_seam:
            kept = text.lstrip()
            self._sent += len(text) - len(kept)
            text = kept
        if not (self._reader.ended and self._reader.at == len(self._reader.text)):
            text = text.rstrip()
        if text:
            self._at_seam = False
        self._sent += len(text)
        return text
