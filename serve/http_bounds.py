"""uvicorn's HTTP/1.1 with bounds on a request's head and on how long an answer may lie unread.

And with a short way out for streams, which send a piece a token.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from octavo.serve.errors import ApiError

HEAD_BYTES = 64 << 10
"""Bytes of a head that has not ended; one that comes whole may be as long as one read, 256 KiB."""


class DirectWriter:
    """Writes pieces of one answer without a task, a message and four callers' frames a piece.

    What is written is what `send` would write. It is the request's `state.writer`.
    """

    __slots__ = ("_cycle",)

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    @property
    def ready(self) -> bool:
        """Whether `write` may be called: a chunked answer is under way and its client keeps up."""
        cycle = self._cycle
        return (
            cycle.chunked_encoding is True
            and not cycle.response_complete
            and not cycle.disconnected
            and not cycle.flow.write_paused
        )

    def write(self, body: bytes) -> None:
        """One chunk, of at least a byte."""
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(body), body))


class BoundedHttp(HttpToolsProtocol):
    """One connection. Answers 431 to a head over HEAD_BYTES, 408 to one over `head_seconds`.

    Time counts from a connection's or a request's first byte; a new connection has as long for that
    byte, an idle one ends by keep-alive's own timeout. A client that doesn't take what waits for
    it within `send_seconds` is cut off, which ends its request as a hang-up does. Both times are
    set by `bounded_http`.
    """

    head_seconds: float
    send_seconds: float

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._head_bytes = 0
        self._deadline: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first byte."""
        super().connection_made(transport)
        self._deadline = self.loop.call_later(self.head_seconds, transport.close)

    def data_received(self, data: bytes) -> None:
        """Feed the parser; refuse a head that is still open and too long."""
        if self._between_requests() and not self._head_bytes:
            self._forget_head()
            self._deadline = self.loop.call_later(self.head_seconds, self._too_slow)
        super().data_received(data)
        if self._deadline is not None:
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES:
                self._refuse(431, f"the request's head is longer than {HEAD_BYTES} bytes")

    def on_headers_complete(self) -> None:
        """The head has ended."""
        self._forget_head()
        super().on_headers_complete()
        if self.cycle is not None and self.cycle.scope is self.scope:
            self.scope.setdefault("state", {})["writer"] = DirectWriter(self.cycle)

    def pause_writing(self) -> None:
        """The client doesn't read, and what waits for it fills the buffer."""
        super().pause_writing()
        self._unread = self.loop.call_later(self.send_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        """It has read."""
        super().resume_writing()
        self._forget_unread()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection has ended."""
        self._forget_head()
        self._forget_unread()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """What isn't HTTP gets an error object too."""
        self._refuse(400, f"malformed HTTP: {msg}")

    def _between_requests(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _forget_head(self) -> None:
        self._head_bytes = 0
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _forget_unread(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _too_slow(self) -> None:
        self._refuse(408, f"the request's head did not arrive within {self.head_seconds:g} s")

    def _refuse(self, status: int, message: str) -> None:
        self._forget_head()
        if self.transport.is_closing():
            return
        body = ApiError(status, message).body()
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        self.transport.write(STATUS_LINE[status] + head % len(body) + body)
        self.transport.close()


def bounded_http(head_seconds: float, send_seconds: float) -> type[BoundedHttp]:
    """The protocol with a time in which a head must arrive, and one in which answers are read."""
    times = {"head_seconds": head_seconds, "send_seconds": send_seconds}
    return type("BoundedHttp", (BoundedHttp,), times)
