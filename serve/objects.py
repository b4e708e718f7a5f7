"""The API's answer objects as JSON and server-sent events, written straight to bytes.

A stream's events differ only in a few places, so a `ChunkWriter` prepares everything else once a
choice and a token costs one string concatenation. Strings in events are escaped to ASCII: some
clients split lines at U+2028 and its kin.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from json.encoder import encode_basestring_ascii as quote
from typing import Any, Self

import msgspec

from octavo.serve.detokenize import TokenTable
from octavo.serve.output import TokenText
from octavo.serve.types import TokenLogprob

SSE_DONE = b"data: [DONE]\n\n"
# JSON has no -inf; this is what OpenAI sends for an impossible token.
LOWEST_LOGPROB = -9999.0


@dataclass(frozen=True, slots=True)
class Identity:
    """What every object of one answer repeats."""

    id: str
    created: int
    model: str
    fingerprint: str

    def under(self, epoch: int) -> Self:
        """The same answer by the weights of `epoch`."""
        return replace(self, fingerprint=f"{self.fingerprint}-w{epoch}")

    def fields(self, kind: str) -> dict[str, Any]:
        """The leading fields of an answer of `object` type `kind`."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


def to_json(value: Any) -> bytes:
    """Compact JSON."""
    return msgspec.json.encode(value)


def sse(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + _ascii_json(value) + b"\n\n"


def _ascii_json(value: Any) -> bytes:
    """Compact JSON in ASCII: by the fast encoder, which cannot escape, where nothing has to be."""
    fast = msgspec.json.encode(value)
    return fast if fast.isascii() else json.dumps(value, separators=(",", ":")).encode()


def event(kind: str, fields: dict[str, Any]) -> bytes:
    """One server-sent event with a name, which its data repeats as `type`."""
    body = json.dumps({"type": kind, **fields}, separators=(",", ":"))
    return f"event: {kind}\ndata: {body}\n\n".encode()


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """OpenAI's usage object."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def by_id(token_id: int) -> str:
    """A token's name where its text would not tell it from others."""
    return f"token_id:{token_id}"


@dataclass(frozen=True, slots=True)
class TokenNames:
    """What log-probabilities call tokens: by their text, or all of them by their ids."""

    table: TokenTable
    as_ids: bool = False

    def drawn(self, token: TokenText) -> str:
        """The name of a token of the text."""
        return by_id(token.token_id) if self.as_ids else token.text

    def of(self, token_id: int) -> str:
        """The name of a token that might have been there."""
        return by_id(token_id) if self.as_ids else self.table.label(token_id)


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)


def completion_logprobs(
    tokens: Iterable[TokenText], top_n: int, names: TokenNames, offset: int = 0
) -> dict[str, list[Any]]:
    """/v1/completions' logprobs: parallel lists; `offset` is where the text starts.

    A token without a log-probability (the first of a prompt) has null in both lists.
    """
    out: dict[str, list[Any]] = {
        "tokens": [],
        "token_logprobs": [],
        "top_logprobs": [],
        "text_offset": [],
    }
    for token in tokens:
        entry = token.logprob
        out["tokens"].append(names.drawn(token))
        out["text_offset"].append(offset + token.start)
        out["token_logprobs"].append(None if entry is None else _finite(entry.logprob))
        out["top_logprobs"].append(None if entry is None else _top_by_name(token, top_n, names))
    return out


def _top_by_name(token: TokenText, top_n: int, names: TokenNames) -> dict[str, float]:
    """Name to log-probability of the likeliest tokens and the sampled one.

    Two tokens may read the same (parts of characters do): the later is then named by its id.
    """
    assert token.logprob is not None
    ranked = dict(token.logprob.top[:top_n])
    ranked.setdefault(token.token_id, token.logprob.logprob)
    out: dict[str, float] = {names.drawn(token): _finite(ranked[token.token_id])}
    for token_id, logprob in ranked.items():
        if token_id != token.token_id:
            name = names.of(token_id)
            out[by_id(token_id) if name in out else name] = _finite(logprob)
    return out


def chat_logprobs(
    tokens: Iterable[TokenText], top_n: int, names: TokenNames
) -> dict[str, list[dict[str, Any]] | None]:
    """/v1/chat/completions' logprobs: one object a token."""
    items: list[dict[str, Any]] = []
    table = names.table
    for token in tokens:
        entry = token.logprob
        if entry is None:
            continue
        whole = table.alone(token.token_id) is not None
        raw = token.text.encode() if whole else table.raw_bytes(token.token_id)
        drawn = names.drawn(token)
        item = _chat_token(drawn, entry.logprob, raw)
        item["top_logprobs"] = [
            _chat_token(drawn, logprob, raw)
            if token_id == token.token_id
            else _chat_token(names.of(token_id), logprob, table.raw_bytes(token_id))
            for token_id, logprob in entry.top[:top_n]
        ]
        items.append(item)
    return {"content": items, "refusal": None}


def _chat_token(text: str, logprob: float, raw: bytes) -> dict[str, Any]:
    return {"token": text, "logprob": _finite(logprob), "bytes": list(raw)}


def prompt_logprobs_by_id(
    ids: Sequence[int],
    entries: Sequence[TokenLogprob | None],
    top_n: int,
    table: TokenTable | None,
) -> list[dict[str, Any] | None]:
    """The `prompt_logprobs` extension: for each prompt token its alternatives by id."""
    out: list[dict[str, Any] | None] = []
    for token_id, entry in zip(ids, entries):
        if entry is None:
            out.append(None)
            continue
        found = {
            top_id: (logprob, rank + 1) for rank, (top_id, logprob) in enumerate(entry.top[:top_n])
        }
        found[token_id] = (entry.logprob, entry.rank)
        out.append(
            {
                str(i): {
                    "logprob": _finite(logprob),
                    "rank": rank,
                    "decoded_token": table.label(i) if table else None,
                }
                for i, (logprob, rank) in found.items()
            }
        )
    return out


class ChunkWriter:
    """Events of one choice of a stream."""

    def __init__(self, identity: Identity, index: int, *, chat: bool, with_usage: bool) -> None:
        kind = "chat.completion.chunk" if chat else "text_completion"
        head = _ascii_json(identity.fields(kind)).decode()
        self._chat = chat
        self._start = f'data: {head[:-1]},"choices":[{{"index":{index},'
        self._open = self._start + ('"delta":{"content":' if chat else '"text":')
        self._close = "}" if chat else ""
        self._end = ("]" + (',"usage":null' if with_usage else "") + "}\n\n").encode()
        self._plain = (self._close + ',"logprobs":null,"finish_reason":null}').encode() + self._end

    def text(self, text: str) -> bytes:
        """The usual event: text and nothing else."""
        return (self._open + quote(text)).encode() + self._plain

    def role(self, extra: dict[str, Any]) -> bytes:
        """A chat choice's first event."""
        delta = '"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null'
        return (self._start + delta + _members(extra) + "}").encode() + self._end

    def full(
        self,
        text: str,
        *,
        logprobs: Any = None,
        finish_reason: str | None = None,
        stop_reason: str | int | None = None,
        extra: dict[str, Any] | None = None,
    ) -> bytes:
        """An event with everything spelled out."""
        if self._chat and not text and finish_reason is not None:
            head = self._start + '"delta":{}'
        else:
            head = self._open + quote(text) + self._close
        return self._finished(head, logprobs, finish_reason, stop_reason, extra)

    def delta(
        self,
        fields: dict[str, Any],
        *,
        logprobs: Any = None,
        finish_reason: str | None = None,
        stop_reason: str | int | None = None,
        extra: dict[str, Any] | None = None,
    ) -> bytes:
        """A chat event whose delta has other fields than content."""
        head = self._start + '"delta":' + json.dumps(fields, separators=(",", ":"))
        return self._finished(head, logprobs, finish_reason, stop_reason, extra)

    def _finished(
        self,
        head: str,
        logprobs: Any,
        finish_reason: str | None,
        stop_reason: str | int | None,
        extra: dict[str, Any] | None,
    ) -> bytes:
        rest: dict[str, Any] = {"logprobs": logprobs, "finish_reason": finish_reason}
        if finish_reason is not None:
            rest["stop_reason"] = stop_reason
        rest.update(extra or {})
        return (head + _members(rest) + "}").encode() + self._end


class CountingWriter(ChunkWriter):
    """Events of one choice of a stream, each with what the choice has `used` until then."""

    def __init__(
        self, identity: Identity, index: int, *, chat: bool, used: Callable[[], dict[str, Any]]
    ) -> None:
        super().__init__(identity, index, chat=chat, with_usage=True)
        self._used = used

    def text(self, text: str) -> bytes:
        """As above."""
        return self._counted(super().text(text))

    def role(self, extra: dict[str, Any]) -> bytes:
        """As above."""
        return self._counted(super().role(extra))

    def full(self, text: str, **fields: Any) -> bytes:
        """As above."""
        return self._counted(super().full(text, **fields))

    def delta(self, fields: dict[str, Any], **others: Any) -> bytes:
        """As above."""
        return self._counted(super().delta(fields, **others))

    def _counted(self, event: bytes) -> bytes:
        return event.removesuffix(b"null}\n\n") + to_json(self._used()) + b"}\n\n"


def _members(fields: dict[str, Any]) -> str:
    """Further members of an object that is already open."""
    return "," + _ascii_json(fields)[1:-1].decode() if fields else ""
