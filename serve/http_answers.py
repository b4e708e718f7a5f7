"""How one answer goes out over uvicorn's HTTP/1.1: what its own cycle lacks."""

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from octavo.serve import errors

TOO_SLOW = 408


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


class Answer:
    """The application for one request, with what uvicorn's cycle leaves out of its answer.

    - A client of HTTP/1.0 knows no chunks: the end of the connection ends an answer of unknown
      length.
    - A client that waits for 100 Continue and gets another answer may send the body or leave it,
      and nobody could tell that body from a next request: its connection is closed.
    - To close a connection with bytes unread resets it, and a client that still sends may never
      see its answer. So one that is to be closed before the request has ended is left open
      (`lingers`) for the protocol to close behind the request's end. A client whose body came too
      slowly is not waited for.
    - What is cancelled when the server ends, since its body never came or nobody reads it, is no
      fault of the application.
    """

    __slots__ = ("_app", "_cycle", "_unsized", "lingers")

    def __init__(self, app: ASGIApp, cycle: RequestResponseCycle) -> None:
        self._app = app
        self._cycle = cycle
        self._unsized = False
        self.lingers = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""
        try:
            await self._app(scope, receive, self._send)
        except asyncio.CancelledError:
            await self._give_up(scope["path"])

    async def _give_up(self, path: str) -> None:
        """Say why, if that may still be said and nobody has to be waited for."""
        cycle = self._cycle
        if not cycle.response_started and not cycle.flow.write_paused:
            error = errors.unavailable("the server is shutting down")
            headers = {"content-type": "application/json", "connection": "close", **error.headers()}
            raw = [(name.encode(), value.encode()) for name, value in headers.items()]
            body = error.body_for(path)
            raw.append((b"content-length", b"%d" % len(body)))
            start = {"type": "http.response.start", "status": error.status, "headers": raw}
            await cycle.send(start)  # pyright: ignore[reportArgumentType]
            await cycle.send({"type": "http.response.body", "body": body, "more_body": False})
        elif not cycle.response_complete:
            cycle.disconnected = True
            cycle.transport.abort()

    async def _send(self, message: Message) -> None:
        cycle = self._cycle
        if message["type"] != "http.response.start":
            if self._unsized:
                cycle.expected_content_length = len(message["body"])
            await cycle.send(message)  # pyright: ignore[reportArgumentType]
            return
        if cycle.waiting_for_100_continue and cycle.more_body:
            cycle.keep_alive = False
        sized = any(name == b"content-length" for name, _ in message["headers"])
        if cycle.scope["http_version"] < "1.1" and not sized:
            self._unsized, cycle.chunked_encoding = True, False
        await cycle.send(message)  # pyright: ignore[reportArgumentType]
        if cycle.more_body and not cycle.keep_alive and sized and message["status"] != TOO_SLOW:
            # Its header says "close" already; now the cycle doesn't.
            self.lingers = cycle.keep_alive = True
