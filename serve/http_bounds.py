"""uvicorn's HTTP/1.1 with bounds on a request's head and on how long an answer may lie unread.

And with answers that are owed given before a connection is closed.
"""

import asyncio
import socket
import struct
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from octavo.serve import errors
from octavo.serve.errors import ApiError
from octavo.serve.http_answers import Answer, DirectWriter

HEAD_BYTES = 64 << 10
"""Bytes of a head that has not ended; one that comes whole may be as long as one read, 256 KiB."""

MAX_PIPELINED = 16
"""Requests behind the one that is being answered; beyond them nothing is read."""


class BoundedHttp(HttpToolsProtocol):
    """One connection. Answers 431 to a head over HEAD_BYTES, 408 to one over `head_seconds`.

    Time counts from a connection's or a request's first byte; a new connection has as long for that
    byte, an idle one ends by keep-alive's own timeout. A client that doesn't take what waits for
    it within `send_seconds` is cut off, which ends its request as a hang-up does. Both times are
    set by `bounded_http`. The rest of a body that is answered already is read and dropped, for
    `head_seconds`.

    Requests that are whole are answered before a refusal of what follows them.
    """

    head_seconds: float
    send_seconds: float

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._heads = 0
        self._in_request = False
        self._head_bytes = 0
        self._active: RequestResponseCycle | None = None
        self._answer: Answer | None = None
        self._refusal = b""
        self._deadline: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first byte."""
        super().connection_made(transport)
        self._deadline = self.loop.call_later(self.head_seconds, transport.close)

    def data_received(self, data: bytes) -> None:
        """Feed the parser; refuse a head that is still open and too long."""
        if self._refusal:
            return
        self._unset_keepalive_if_required()
        in_head, heads = not self._in_request, self._heads
        if in_head and not self._head_bytes and not self._owes():
            self._forget_head()
            self._deadline = self.loop.call_later(self.head_seconds, self._too_slow)
        self._parse(data)
        if in_head and heads == self._heads:
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES:
                self._refuse(errors.head_too_large(HEAD_BYTES))

    def on_headers_complete(self) -> None:
        """The head has ended."""
        if self._asks_for_another_protocol():
            return
        self._check_host()
        self._heads += 1
        self._forget_head()
        super().on_headers_complete()
        self._in_request = True
        if self.cycle is not None and self.cycle.scope is self.scope:
            self.scope.setdefault("state", {})["writer"] = DirectWriter(self.cycle)
        if len(self.pipeline) < MAX_PIPELINED:  # only who is read from is seen to hang up
            self.flow.resume_reading()

    def on_message_complete(self) -> None:
        """The request has ended."""
        if self._asks_for_another_protocol():
            return
        self._in_request = False
        super().on_message_complete()
        if self.cycle.response_complete:
            self._forget_head()
            if self._answer is not None and self._answer.lingers:
                self.transport.close()

    def on_response_complete(self) -> None:
        """An answer is out: on with the next, or with what had to wait for it."""
        early = self._in_request and self._active is self.cycle
        super().on_response_complete()
        if early:
            self._forget_head()
            self._deadline = self.loop.call_later(self.head_seconds, self.transport.close)
        self._refuse_at_last()

    def pause_writing(self) -> None:
        """The client doesn't read, and what waits for it fills the buffer."""
        super().pause_writing()
        self._unread = self.loop.call_later(self.send_seconds, self._cut_off)

    def resume_writing(self) -> None:
        """It has read."""
        super().resume_writing()
        self._forget_unread()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection has ended, and with it the request that is being answered."""
        self._forget_head()
        self._forget_unread()
        if self._owes() and self._active is not None:  # not always the last one that came
            self._disconnect(self._active)
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """What isn't HTTP gets an error object too."""
        self._refuse(errors.invalid(f"malformed HTTP: {msg}"))

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._active, self._answer = cycle, Answer(app, cycle)
        super()._start_asgi_task(cycle, self._answer)  # pyright: ignore[reportArgumentType]

    def _parse(self, data: bytes) -> None:
        """Feed the parser, which stops behind the head of a request to change protocols.

        The offer is declined by going on as if it had not been made: Java's client makes it with
        every request, of which only the head would be seen.
        """
        while data:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserError:
                self.send_400_response("Invalid HTTP request received.")
            except httptools.HttpParserUpgrade as upgrade:
                if self._asks_for_another_protocol():
                    data = self._head_without_upgrade() + data[upgrade.args[0] :]
                    # Not the same: behind a head that said "close" it would read no more.
                    self.parser = httptools.HttpRequestParser(self)
                    self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
                    continue
            return

    def _check_host(self) -> None:
        """A request names one host (RFC 9112, 3.2); else it is refused and the parser stopped.

        Proxies that each go by another of two hosts could be led apart.
        """
        hosts = sum(name == b"host" for name, _ in self.headers)
        if hosts > 1 or (not hosts and self.parser.get_http_version() == "1.1"):
            self._refuse(errors.invalid(f"malformed HTTP: one Host header is wanted, not {hosts}"))
            raise ValueError("Host")  # reaches `_parse` as an HttpParserError

    def _asks_for_another_protocol(self) -> bool:
        return self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"

    def _head_without_upgrade(self) -> bytes:
        """The head that the parser has just stopped behind, less the offer."""
        first = (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        lines = [b"%b %b HTTP/%b" % first]
        for name, value in self.headers:
            if name == b"connection":
                kept = [word for word in value.split(b",") if word.strip().lower() != b"upgrade"]
                value = b",".join(kept)
            if name != b"upgrade":
                lines.append(b"%b: %b" % (name, value))
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def _owes(self) -> bool:
        """Whether some request has yet to be answered."""
        active = self._active
        return active is not None and not active.response_complete and not active.disconnected

    def _cut_off(self) -> None:
        """Drop the connection, with the megabytes that the kernel would go on offering."""
        raw = self.transport.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def _disconnect(self, cycle: RequestResponseCycle) -> None:
        cycle.disconnected = True
        cycle.message_event.set()

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
        self._refuse(errors.head_too_slow(self.head_seconds))

    def _refuse(self, error: ApiError) -> None:
        """Answer what is no request, in its turn, and close."""
        self._forget_head()
        if self._refusal:
            return
        body = error.body()
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        self._refusal = STATUS_LINE[error.status] + head % len(body) + body
        if self._in_request:  # the fault is in the body of the last request
            self._drop_last()
        self._refuse_at_last()

    def _drop_last(self) -> None:
        """Answer the last request by the refusal, or if its answer has begun by nothing."""
        last = self.cycle
        if last.response_started:
            self.transport.close()
        self._disconnect(last)
        if self.pipeline and self.pipeline[0][0] is last:
            self.pipeline.popleft()

    def _refuse_at_last(self) -> None:
        if self._refusal and not self._owes() and not self.transport.is_closing():
            self.transport.write(self._refusal)
            self.transport.close()


def bounded_http(head_seconds: float, send_seconds: float) -> type[BoundedHttp]:
    """The protocol with a time in which a head must arrive, and one in which answers are read."""
    times = {"head_seconds": head_seconds, "send_seconds": send_seconds}
    return type("BoundedHttp", (BoundedHttp,), times)
