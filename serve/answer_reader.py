"""Text that arrives in pieces, read by generators that yield where they must wait for more.

What a reader decides never depends on how the text was cut: it waits until any further text would
leave the decision the same, or until the text has ended.
"""

import re
from collections.abc import Generator, Sequence

MAX_JSON_DEPTH = 64

type Waiting[T] = Generator[None, None, T]
"""Yields while more text is needed, then returns a T."""

_SPACES = re.compile(r"[ \t\r\n]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_NUMBER_CHARS = re.compile(r"[-+.0-9eE]*")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_HEX = frozenset("0123456789abcdefABCDEF")


class Malformed(Exception):
    """The text is not what was being read; `Reader.at` is where it stopped being so."""


class Reader:
    """The text so far and a position in it.

    Attributes:
        text: what was fed and not dropped.
        at: position of the next character.
        ended: nothing more will come.
    """

    __slots__ = ("at", "ended", "text")

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.ended = False

    def drop(self, count: int) -> None:
        """Forget the first `count` characters; positions taken before are void."""
        self.text = self.text[count:]
        self.at -= count

    def char(self) -> Waiting[str]:
        """The next character, not consumed; "" at the end of the text."""
        while self.at == len(self.text) and not self.ended:
            yield
        return self.text[self.at : self.at + 1]

    def run(self, pattern: re.Pattern[str]) -> Waiting[str]:
        """Consume the longest stretch that `pattern`, a repeated character class, matches."""
        found = ""
        while True:
            match = pattern.match(self.text, self.at)
            assert match is not None
            found += match[0]
            self.at = match.end()
            if self.at < len(self.text) or self.ended:
                return found
            yield

    def spaces(self) -> Waiting[str]:
        """Consume JSON's white space."""
        return self.run(_SPACES)

    def literal(self, literal: str) -> Waiting[bool]:
        """Consume `literal` if it is next; else consume nothing."""
        while not self.ended and len(self.text) - self.at < len(literal):
            if not literal.startswith(self.text[self.at :]):
                return False
            yield
        if not self.text.startswith(literal, self.at):
            return False
        self.at += len(literal)
        return True

    def expect(self, literal: str) -> Waiting[None]:
        """Consume `literal`; Malformed if something else is next."""
        if not (yield from self.literal(literal)):
            raise Malformed

    def until(self, markers: Sequence[str]) -> Waiting[str | None]:
        """Go to the first of `markers` and say which it is; None when the text ends without.

        While it waits, what may be the start of a marker is not passed.
        """
        while True:
            found = [(i, m) for m in markers if (i := self.text.find(m, self.at)) >= 0]
            if found:
                self.at, marker = min(found)
                return marker
            if self.ended:
                self.at = len(self.text)
                return None
            held = max((_begun(self.text, m) for m in markers), default=0)
            self.at = max(self.at, len(self.text) - held)
            yield


def _begun(text: str, marker: str) -> int:
    """Length of the longest proper prefix of `marker` that `text` ends with."""
    longest = min(len(text), len(marker) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(marker[:n])), 0)


def json_value(reader: Reader, depth: int = 0) -> Waiting[None]:
    """Consume one JSON value, strictly; Malformed where it stops being one.

    Containers deeper than MAX_JSON_DEPTH are refused.
    """
    char = yield from reader.char()
    if char == '"':
        yield from json_string(reader)
    elif char == "{":
        yield from json_object(reader, depth)
    elif char == "[":
        yield from _array(reader, depth)
    elif char and char in "-0123456789":
        number = yield from reader.run(_NUMBER_CHARS)
        if not _NUMBER.fullmatch(number):
            raise Malformed
    else:
        word = {"t": "true", "f": "false", "n": "null"}.get(char)
        if word is None:
            raise Malformed
        yield from reader.expect(word)


def json_string(reader: Reader) -> Waiting[None]:
    """Consume a JSON string."""
    yield from reader.expect('"')
    while True:
        yield from reader.run(_PLAIN)
        char = yield from reader.char()
        if char == '"':
            reader.at += 1
            return
        if char != "\\":
            raise Malformed
        reader.at += 1
        yield from _escape(reader)


def _escape(reader: Reader) -> Waiting[None]:
    char = yield from reader.char()
    if not char or char not in '"\\/bfnrtu':
        raise Malformed
    reader.at += 1
    for _ in range(4 if char == "u" else 0):
        if (yield from reader.char()) not in _HEX:
            raise Malformed
        reader.at += 1


def json_object(reader: Reader, depth: int = 0) -> Waiting[None]:
    """Consume a JSON object."""
    yield from _open(reader, "{", depth)
    if (yield from reader.literal("}")):
        return
    while True:
        yield from json_string(reader)
        yield from json_colon(reader)
        yield from json_value(reader, depth + 1)
        if not (yield from json_more(reader, "}")):
            return


def _array(reader: Reader, depth: int) -> Waiting[None]:
    yield from _open(reader, "[", depth)
    if (yield from reader.literal("]")):
        return
    while True:
        yield from json_value(reader, depth + 1)
        if not (yield from json_more(reader, "]")):
            return


def _open(reader: Reader, bracket: str, depth: int) -> Waiting[None]:
    if depth >= MAX_JSON_DEPTH:
        raise Malformed
    yield from reader.expect(bracket)
    yield from reader.spaces()


def json_colon(reader: Reader) -> Waiting[None]:
    """Consume the colon of a member and the space around it."""
    yield from reader.spaces()
    yield from reader.expect(":")
    yield from reader.spaces()


def json_more(reader: Reader, closing: str) -> Waiting[bool]:
    """Consume a comma (True: another item follows) or the closing bracket (False)."""
    yield from reader.spaces()
    char = yield from reader.char()
    if char not in (",", closing):
        raise Malformed
    reader.at += 1
    if char == closing:
        return False
    yield from reader.spaces()
    return True
