"""Token ids to text, one token at a time: never half a character, never a piece of a stop string.

A token's text is looked up in a table that is filled as tokens occur, so the usual cost is one
dictionary access. Only tokens that hold part of a UTF-8 character wait for their neighbours: they
are decoded together behind a fixed anchor token, which keeps the rules for the start of a text
(SentencePiece drops a leading space there) from applying in its middle.
"""

import functools
from collections.abc import Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"

# A UTF-8 character has at most four bytes, so at most three can be waiting for the last. A
# byte-fallback decoder shows each of them as one replacement character.
MAX_PENDING_CHARS = 3
WINDOW_LIMIT = 16
WINDOW_KEPT = 8


class TextDecoder(Protocol):
    """What detokenising needs of a tokenizer."""

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids left out of the text by skip_special_tokens."""
        ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`."""
        ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`."""
        ...

    def id_to_token(self, token_id: int) -> str | None:
        """The vocabulary's own spelling of a token."""
        ...


class TokenTable:
    """Texts of one tokenizer's tokens, shared by all requests; at most one entry a token."""

    def __init__(self, tokenizer: TextDecoder) -> None:
        self._tokenizer = tokenizer
        self._alone: dict[int, str | None] = {}
        self.special_ids = frozenset(tokenizer.special_ids)
        self._anchor = tokenizer.encode("a", add_special_tokens=False)[-1:]
        self._anchor_chars = len(tokenizer.decode(self._anchor, skip_special_tokens=False))

    def following(self, ids: Sequence[int]) -> str:
        """Text that `ids` add behind other text; specials are spelled out."""
        whole = self._tokenizer.decode([*self._anchor, *ids], skip_special_tokens=False)
        return whole[self._anchor_chars :]

    def starting(self, ids: Sequence[int]) -> str:
        """Text of `ids` at the very start of a text; specials are spelled out."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def alone(self, token_id: int) -> str | None:
        """Text the token adds whatever surrounds it; None when its neighbours decide that."""
        try:
            return self._alone[token_id]
        except KeyError:
            text = self.following((token_id,))
            clean = None if text.endswith(REPLACEMENT) or text.startswith(REPLACEMENT) else text
            self._alone[token_id] = clean
            return clean

    def label(self, token_id: int) -> str:
        """A token's text for lists of alternatives; may hold U+FFFD for part of a character."""
        text = self.alone(token_id)
        return self.following((token_id,)) if text is None else text

    def raw_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for, also when they are only part of a character."""
        text = self.alone(token_id)
        if text is not None:
            return text.encode()
        piece = piece_bytes(self._tokenizer.id_to_token(token_id) or "")
        return self.label(token_id).encode() if piece is None else piece


@functools.cache
def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable spelling of the 256 bytes: printable ones stand for themselves."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


def piece_bytes(piece: str) -> bytes | None:
    """Bytes of a byte-fallback (`<0x0A>`) or byte-level vocabulary piece; else None."""
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return bytes.fromhex(piece[3:5])
    alphabet = _byte_alphabet()
    if piece and all(char in alphabet for char in piece):
        return bytes(alphabet[char] for char in piece)
    return None


class Detokenizer:
    """Text of one growing sequence. The pieces joined are the decoding of the whole.

    `continues` says that other text precedes (a completion follows its prompt): a leading space
    of the first token is then kept. Special tokens in `shown` are never skipped.
    """

    __slots__ = ("_at_start", "_emitted", "_pending", "_skip", "_table")

    def __init__(
        self,
        table: TokenTable,
        *,
        skip_special_tokens: bool = True,
        continues: bool = True,
        shown: frozenset[int] = frozenset(),
    ) -> None:
        self._table = table
        self._skip: frozenset[int] = table.special_ids if skip_special_tokens else frozenset()
        if shown:
            self._skip -= shown
        self._at_start = not continues
        self._pending: list[int] = []
        self._emitted = 0

    def push(self, token_id: int) -> str:
        """Text that is certain once `token_id` is known; "" while a character is incomplete."""
        if token_id in self._skip:
            return ""
        if not self._at_start:
            text = self._table.alone(token_id)
            if text == "" or (text is not None and not self._pending):
                return text
        self._pending.append(token_id)
        text = self._window()
        unsure = min(_trailing_replacements(text), MAX_PENDING_CHARS)
        ready = text[self._emitted : len(text) - unsure]
        if not unsure:
            self._reset()
        else:
            self._emitted += len(ready)
            self._shorten()
        return ready

    def flush(self) -> str:
        """What is left when the sequence ends: U+FFFD for a character that never completed."""
        if not self._pending:
            return ""
        rest = self._window()[self._emitted :]
        self._reset()
        return rest

    def _window(self) -> str:
        table = self._table
        return table.starting(self._pending) if self._at_start else table.following(self._pending)

    def _reset(self) -> None:
        self._pending.clear()
        self._emitted = 0
        self._at_start = False

    def _shorten(self) -> None:
        # Only bytes that form no character reach this; UTF-8 resynchronises within three bytes,
        # so the tail alone decodes to the same end.
        if len(self._pending) > WINDOW_LIMIT:
            self._at_start = False
            del self._pending[:-WINDOW_KEPT]
            text = self._window()
            self._emitted = len(text) - min(_trailing_replacements(text), MAX_PENDING_CHARS)


def _trailing_replacements(text: str) -> int:
    return len(text) - len(text.rstrip(REPLACEMENT))


@functools.lru_cache(maxsize=256)
def _failure_table(stop: str) -> tuple[int, ...]:
    """Knuth-Morris-Pratt: for each prefix of `stop`, its longest proper prefix that is a suffix."""
    table = [0] * len(stop)
    length = 0
    for i in range(1, len(stop)):
        while length and stop[i] != stop[length]:
            length = table[length - 1]
        if stop[i] == stop[length]:
            length += 1
        table[i] = length
    return tuple(table)


class StopMatcher:
    """Finds the first stop string to be completed in text that arrives in pieces.

    The result doesn't depend on how the text is cut. Of several stops that end at the same
    character the longest counts. `held` characters at the end may yet become a stop string.
    """

    __slots__ = ("_matched", "_position", "_stops", "held")

    def __init__(self, stops: Sequence[str], position: int = 0) -> None:
        self._stops = [(stop, _failure_table(stop)) for stop in stops]
        self._matched = [0] * len(self._stops)
        self._position = position
        self.held = 0

    def feed(self, text: str) -> tuple[int, int, str] | None:
        """Start, end and string of the first match, counted over all text fed; else None."""
        for char in text:
            self._position += 1
            found = self._advance(char)
            if found:
                return self._position - len(found), self._position, found
        self.held = max(self._matched, default=0)
        return None

    def _advance(self, char: str) -> str:
        found = ""
        for i, (stop, failure) in enumerate(self._stops):
            length = self._matched[i]
            while length and stop[length] != char:
                length = failure[length - 1]
            if stop[length] == char:
                length += 1
            if length == len(stop):
                found = max(found, stop, key=len)
                length = failure[length - 1]
            self._matched[i] = length
        return found
