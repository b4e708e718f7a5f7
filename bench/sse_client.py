"""A small HTTP/1.1 client for streamed answers: standard library alone, cheap per event.

`ResponseParser` and `EventSplitter` take bytes in any portions; `Connection` ties them to a socket
and notes when each event came.
"""

import asyncio
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import cast

COMPLETION_TOKENS = re.compile(rb'"completion_tokens"\s*:\s*(\d+)')
PROMPT_TOKENS = re.compile(rb'"prompt_tokens"\s*:\s*(\d+)')
NO_CHOICES = re.compile(rb'"choices"\s*:\s*\[\s*\]')
ROLE_ONLY = re.compile(rb'"role"\s*:\s*"assistant".*"content"\s*:\s*""')
ERROR_CHARS = 300


class ProtocolError(Exception):
    """The answer is not HTTP/1.1 as it is known here."""


class ResponseParser:
    """One response, fed in portions; afterwards `done`, and ready for the next after `reset`."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Expect a new response."""
        self._buffer = bytearray()
        self._left: int | None = None
        self._chunked = False
        self._read = self._read_head
        self.status = 0
        self.keep_alive = True
        self.until_close = False
        self.done = False

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Portions of the body that `data` completes."""
        self._buffer += data
        while not self.done:
            before = (len(self._buffer), self._read)
            body = self._read()
            if body:
                yield body
            if (len(self._buffer), self._read) == before:
                return

    def _take(self, count: int) -> bytes:
        taken = bytes(self._buffer[:count])
        del self._buffer[:count]
        return taken

    def _line(self) -> bytes | None:
        end = self._buffer.find(b"\r\n")
        return None if end < 0 else self._take(end + 2)[:-2]

    def _read_head(self) -> bytes:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return b""
        first, *lines = self._take(end + 4)[:-4].split(b"\r\n")
        match first.split(b" ", 2):
            case [version, status, *_] if version.startswith(b"HTTP/1.") and status.isdigit():
                self.status = int(status)
            case _:
                raise ProtocolError(f"not an HTTP answer: {first[:80]!r}")
        if self.status == 100:
            return b""
        pairs = (line.partition(b":") for line in lines)
        headers = {name.strip().lower(): value.strip().lower() for name, _, value in pairs}
        self.keep_alive = headers.get(b"connection") != b"close"
        self._chunked = headers.get(b"transfer-encoding") == b"chunked"
        if self._chunked:
            self._read = self._read_size
            return b""
        length = headers.get(b"content-length")
        self.until_close = length is None
        self._left = None if length is None else int(length)
        self._read = self._read_plain
        return self._read_plain()

    def _read_plain(self) -> bytes:
        if self._left is None:
            return self._take(len(self._buffer))
        body = self._take(min(self._left, len(self._buffer)))
        self._left -= len(body)
        self.done = self._left == 0
        return body

    def _read_size(self) -> bytes:
        line = self._line()
        if line is None:
            return b""
        try:
            self._left = int(line.split(b";", 1)[0], 16)
        except ValueError:
            raise ProtocolError(f"bad chunk size {line[:20]!r}") from None
        self._read = self._read_chunk if self._left else self._read_trailer
        return b""

    def _read_chunk(self) -> bytes:
        assert self._left is not None
        if len(self._buffer) < self._left + 2:
            return b""
        body = self._take(self._left)
        self._take(2)
        self._read = self._read_size
        return body

    def _read_trailer(self) -> bytes:
        line = self._line()
        self.done = line == b""
        return b""


class EventSplitter:
    """Server-sent events, fed in portions."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The `data` of each event that is now complete."""
        text = self._rest + data
        *events, self._rest = text.replace(b"\r\n", b"\n").split(b"\n\n")
        lines = (line for event in events for line in event.split(b"\n"))
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]


@dataclass(slots=True)
class Exchange:
    """One request and what came back. Times are seconds of the monotonic clock.

    Attributes:
        index, asked: place in the workload and its max_tokens.
        due: when it should have been sent; latencies count from here.
        sent, first, last, end: sending, first and last event with a token, end of the answer.
        gaps: between events that hold tokens.
        tokens, prompt_tokens: by the usage the server reports; 0 if it reports none.
    """

    index: int
    asked: int
    due: float = 0.0
    sent: float = 0.0
    first: float = 0.0
    last: float = 0.0
    end: float = 0.0
    gaps: list[float] = field(default_factory=list)
    tokens: int = 0
    prompt_tokens: int = 0
    events: int = 0
    finished: bool = False
    error: str = ""

    @property
    def ok(self) -> bool:
        """Whether the whole answer came."""
        return self.finished and not self.error

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.first - self.due

    @property
    def tpot(self) -> float | None:
        """Seconds a token after the first; None of a single token."""
        return (self.last - self.first) / (self.tokens - 1) if self.tokens > 1 else None

    def take(self, data: bytes, now: float) -> None:
        """One event."""
        if data == b"[DONE]":
            self.finished = True
            return
        if b'"error"' in data[:200] and b'"choices"' not in data:
            self.error = self.error or data[:ERROR_CHARS].decode("utf-8", "replace")
            return
        usage = COMPLETION_TOKENS.search(data) if b'"completion_tokens"' in data else None
        if usage:
            self.tokens = int(usage[1])
            prompt = PROMPT_TOKENS.search(data)
            self.prompt_tokens = int(prompt[1]) if prompt else 0
        empty = (usage and self.tokens == 0) or NO_CHOICES.search(data)
        if empty or (b'"role"' in data and ROLE_ONLY.search(data)):
            return
        if self.events:
            self.gaps.append(now - self.last)
        else:
            self.first = now
        self.events += 1
        self.last = now


class Connection(asyncio.Protocol):
    """A kept connection that carries one exchange at a time."""

    def __init__(self) -> None:
        self._parser = ResponseParser()
        self._splitter = EventSplitter()
        self._exchange: Exchange | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._refusal = bytearray()
        self.transport: asyncio.Transport | None = None
        self.usable = True
        self.answered = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The socket is open."""
        self.transport = cast(asyncio.Transport, transport)

    async def run(self, payload: bytes, exchange: Exchange) -> None:
        """Send and wait for the whole answer; failures are noted in the exchange."""
        assert self.transport is not None
        self._parser.reset()
        self._splitter = EventSplitter()
        self._refusal.clear()
        self._exchange, self.answered = exchange, False
        self._waiter = asyncio.get_running_loop().create_future()
        self.transport.write(payload)
        try:
            await self._waiter
        finally:
            self._exchange = self._waiter = None

    def data_received(self, data: bytes) -> None:
        """Bytes came: note their events at this moment."""
        now = time.monotonic()
        exchange = self._exchange
        if exchange is None:
            self.close()
            return
        self.answered = True
        try:
            for body in self._parser.feed(data):
                self._body(exchange, body, now)
        except ProtocolError as error:
            exchange.error = str(error)
            self.close()
            return
        if self._parser.done:
            self.usable = self._parser.keep_alive
            self._finish()

    def _body(self, exchange: Exchange, body: bytes, now: float) -> None:
        if self._parser.status != 200:
            self._refusal += body[:ERROR_CHARS]
            return
        for event in self._splitter.feed(body):
            exchange.take(event, now)

    def connection_lost(self, exc: Exception | None) -> None:
        """The server closed the connection."""
        self.usable = False
        exchange = self._exchange
        if exchange is not None and not self._parser.until_close:
            exchange.error = exchange.error or f"connection lost: {exc or 'closed by the server'}"
        self._finish()

    def close(self) -> None:
        """Give the connection up."""
        self.usable = False
        if self.transport is not None:
            self.transport.abort()

    def _finish(self) -> None:
        exchange = self._exchange
        if exchange is None or self._waiter is None or self._waiter.done():
            return
        exchange.end = time.monotonic()
        if self._parser.status not in (0, 200):
            text = bytes(self._refusal[:ERROR_CHARS]).decode("utf-8", "replace")
            exchange.error = f"HTTP {self._parser.status}: {text}"
        elif not exchange.finished:
            exchange.error = exchange.error or "the stream ended without [DONE]"
        elif not exchange.events:
            exchange.error = exchange.error or "no token came"
        self._waiter.set_result(None)
