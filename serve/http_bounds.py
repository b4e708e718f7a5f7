"""uvicorn's HTTP/1.1 with bounds on a request's head: its length, and its time to arrive."""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_BYTES = 64 << 10
"""Bytes of a head that has not ended; one that comes whole may be as long as one read, 256 KiB."""

_REFUSAL = b"HTTP/1.1 %s\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class BoundedHttp(HttpToolsProtocol):
    """One connection. Answers 431 to a head over HEAD_BYTES, 408 to one over `head_seconds`.

    Time counts from a connection's or a request's first byte: an idle connection is another
    matter, and ends by keep-alive's own timeout. `head_seconds` is set by `bounded_http`.
    """

    head_seconds: float

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._head_bytes = 0
        self._deadline: asyncio.TimerHandle | None = None

    def data_received(self, data: bytes) -> None:
        """Feed the parser; refuse a head that is still open and too long."""
        if self._deadline is None and self._between_requests():
            self._deadline = self.loop.call_later(self.head_seconds, self._end, b"408 Timeout")
        super().data_received(data)
        if self._deadline is not None:
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES:
                self._end(b"431 Request Header Fields Too Large")

    def on_headers_complete(self) -> None:
        """The head has ended."""
        self._forget_head()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection has ended."""
        self._forget_head()
        super().connection_lost(exc)

    def _between_requests(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _forget_head(self) -> None:
        self._head_bytes = 0
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _end(self, status: bytes) -> None:
        self._forget_head()
        if not self.transport.is_closing():
            self.transport.write(_REFUSAL % status)
            self.transport.close()


def bounded_http(seconds: float) -> type[BoundedHttp]:
    """The protocol with a time in which a head must arrive."""
    return type("BoundedHttp", (BoundedHttp,), {"head_seconds": seconds})
