"""The ways models write tool calls as JSON: Hermes, Llama 3 and Mistral, and a call that is forced.

A call must name one of the request's tools and have an object for arguments; what only looks like a
call stays content. Arguments go out as they come, in the model's own spelling.
"""

import json
import re
from collections.abc import Callable, Collection

from octavo.serve.answer_parser import AnswerParser, CallStart, new_call_id, short_call_id
from octavo.serve.answer_reader import (
    Malformed,
    Waiting,
    json_colon,
    json_more,
    json_object,
    json_string,
    json_value,
)
from octavo.serve.strict_json import strict_json

_ARGUMENTS = ("arguments", "parameters")
_BARE_KEYS = frozenset({"name", "type", "id", *_ARGUMENTS})
_NAME_CHARS = re.compile(r"[-\w]*", re.ASCII)


class JsonCallParser(AnswerParser):
    """Reads `{"name": ..., "arguments": {...}}`; `parameters` will do for `arguments`."""

    def _call(self, *, bare: bool = False, closers: tuple[str, ...] = ()) -> Waiting[None]:
        """One call. A bare one, which no tag announces, must have arguments and no foreign keys."""
        reader, before = self._reader, self.calls
        name = arguments = None
        yield from reader.expect("{")
        yield from reader.spaces()
        more = True
        while more:
            key = yield from self._string()
            yield from json_colon(reader)
            if key == "name" and name is None:
                name = yield from self._name()
                if arguments is not None:
                    self._open_call(name)
                    self._whole_arguments(arguments)
            elif key in _ARGUMENTS and arguments is None and self.calls == before:
                if name is None or (yield from reader.char()) != "{":
                    arguments = yield from self._held_arguments()
                if name is not None:
                    self._open_call(name)
                    yield from self._either(arguments, closers)
            elif key == "name" or key in _ARGUMENTS or (bare and key not in _BARE_KEYS):
                raise Malformed
            else:
                yield from json_value(reader)
            more = yield from json_more(reader, "}")
        if self.calls == before:
            if name is None or bare:
                raise Malformed
            self._open_call(name)
            self._whole_arguments("{}")

    def _either(self, held: str | None, closers: tuple[str, ...]) -> Waiting[None]:
        if held is None:
            yield from self._stream_arguments(json_object(self._reader), closers)
        else:
            self._whole_arguments(held)

    def _name(self) -> Waiting[str]:
        name = yield from self._string()
        if name not in self._names:
            raise Malformed
        return name

    def _string(self) -> Waiting[str]:
        """A JSON string's value. Only for held text: the slice must stay where it is."""
        start = self._reader.at
        yield from json_string(self._reader)
        return json.loads(self._reader.text[start : self._reader.at])

    def _held_arguments(self) -> Waiting[str]:
        """Arguments read whole: an object, its text in a string, or null for none."""
        reader, start = self._reader, self._reader.at
        char = yield from reader.char()
        if char == '"':
            return _object_in((yield from self._string()))
        if char == "n":
            yield from reader.expect("null")
            return "{}"
        yield from json_object(reader)
        return reader.text[start : reader.at]


def _object_in(text: str) -> str:
    try:
        text.encode()
        value = strict_json(text)
    except (ValueError, RecursionError):
        raise Malformed from None
    if not isinstance(value, dict):
        raise Malformed
    return text


class HermesParser(JsonCallParser):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Hermes and Qwen write it."""

    OPEN, CLOSE = "<tool_call>", "</tool_call>"
    markers = (OPEN, CLOSE)

    def _parse(self) -> Waiting[None]:
        reader = self._reader
        unclosed = False
        while tag := (yield from reader.until(self.markers if unclosed else (self.OPEN,))):
            if tag == self.OPEN:
                accepted = yield from self._attempt(self._tagged(), len(tag))
                unclosed = accepted or unclosed
            else:
                self._flush()
                reader.at += len(tag)
                self._consume()
                unclosed = False

    def _tagged(self) -> Waiting[None]:
        yield from self._reader.expect(self.OPEN)
        yield from self._reader.spaces()
        yield from self._call(closers=(self.CLOSE,))
        yield from self._reader.spaces()


class LineStartParser(JsonCallParser):
    """Formats without a tag of their own: a call may begin where a line does, or behind another.

    Elsewhere in a line it is taken for text that speaks about calls.
    """

    opener: str
    """How a call begins."""

    def _parse(self) -> Waiting[None]:
        stops = ("\n", *self.markers)
        stop = None
        while True:
            if stop in (None, "\n"):
                yield from self._reader.spaces()
            if stop in self.markers or (yield from self._reader.char()) == self.opener:
                accepted = yield from self._attempt(self._first(), 1)
                while accepted:
                    accepted = yield from self._attempt(self._next(), 0)
            if (stop := (yield from self._reader.until(stops))) is None:
                return

    def _first(self) -> Waiting[None]:
        """A call, or a list of them."""
        raise NotImplementedError

    def _next(self) -> Waiting[None]:
        """Another one behind the last."""
        raise NotImplementedError


class LlamaJsonParser(LineStartParser):
    """`{"name": ..., "parameters": {...}}` as Llama 3 writes it, semicolons between them."""

    TAG = "<|python_tag|>"
    markers = (TAG,)
    opener = "{"

    def _first(self) -> Waiting[None]:
        yield from self._reader.literal(self.TAG)
        yield from self._reader.spaces()
        yield from self._call(bare=True)

    def _next(self) -> Waiting[None]:
        yield from self._reader.spaces()
        yield from self._reader.literal(";")
        yield from self._first()


class MistralParser(JsonCallParser):
    """`[TOOL_CALLS] [{"name": ..., "arguments": {...}}]` and `[TOOL_CALLS]name[ARGS]{...}`.

    `announced` says that the marker is taken as read: the text begins with the list.
    """

    MARK, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
    markers = (MARK, ARGS, CALL_ID)

    def __init__(
        self,
        names: Collection[str] = (),
        *,
        max_calls: int | None = None,
        announced: bool = False,
    ) -> None:
        super().__init__(names, max_calls=max_calls)
        self._announced = announced

    def _new_id(self) -> str:
        return short_call_id()

    def _parse(self) -> Waiting[None]:
        if self._announced:
            yield from self._attempt(self._list(), 0)
        while (yield from self._reader.until((self.MARK,))):
            yield from self._attempt(self._marked(), len(self.MARK))

    def _marked(self) -> Waiting[None]:
        yield from self._reader.expect(self.MARK)
        yield from self._reader.spaces()
        if (yield from self._reader.char()) == "[":
            yield from self._list()
        else:
            yield from self._named()

    def _list(self) -> Waiting[None]:
        yield from self._reader.expect("[")
        yield from self._reader.spaces()
        more = True
        while more:
            yield from self._call()
            more = yield from json_more(self._reader, "]")

    def _named(self) -> Waiting[None]:
        reader = self._reader
        name = yield from reader.run(_NAME_CHARS)
        if name not in self._names:
            raise Malformed
        if (yield from reader.literal(self.CALL_ID)):
            yield from reader.run(_NAME_CHARS)
        yield from reader.literal(self.ARGS)
        yield from reader.spaces()
        if (yield from reader.char()) != "{":
            raise Malformed
        self._open_call(name)
        yield from self._stream_arguments(json_object(reader), (self.MARK,))


class ForcedCallParser(AnswerParser):
    """The whole answer is the arguments of one call."""

    def __init__(self, name: str, make_id: Callable[[], str] = new_call_id) -> None:
        super().__init__((name,))
        self._name, self._make_id = name, make_id

    def _parse(self) -> Waiting[None]:
        yield from self._reader.char()
        self._events.append(CallStart(0, self._make_id(), self._name))
        self.calls = 1
        yield from self._stream_arguments(self._reader.until(()), ())
