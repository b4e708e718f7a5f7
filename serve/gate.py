"""What every HTTP request passes first: it gets an id, its API key is checked and counted.

Plain ASGI, so that a stream's chunks pass through untouched.
"""

import logging
import re
import uuid

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.serve.context import ServerContext
from octavo.serve.errors import ApiError
from octavo.serve.key_limits import Leave
from octavo.serve.timing import Visit

OPEN_PATHS = frozenset(
    {
        "/",
        "/docs",
        "/health",
        "/health/live",
        "/health/ready",
        "/metrics",
        "/openapi.json",
        "/redoc",
        "/version",
    }
)
"""Paths that need no key: they show no model's output."""

REQUEST_ID = b"x-request-id"
_OWN_ID = re.compile(rb"[!-~]{1,128}")

log = logging.getLogger("octavo.server")


class Gate:
    """ASGI middleware around the application."""

    def __init__(self, app: ASGIApp, context: ServerContext) -> None:
        self._app = app
        self._context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["method"] == "HEAD":  # a GET whose answer is sent without its body
            scope = {**scope, "method": "GET"}
        address, _ = scope.get("client") or ("", 0)
        visit = Visit(request_id=_id_of(scope), client=address)
        scope.setdefault("state", {})["visit"] = visit
        send = _with_id(send, visit.request_id.encode())
        try:
            leave = await self._enter(scope, visit)
        except ApiError as error:
            log.info("%s %s: %s", scope["method"], scope["path"], error.message)
            await self._context.respond(error, scope["path"])(scope, receive, send)
            return
        try:
            await self._handle(scope, visit, receive, send)
        finally:
            if leave is not None:
                leave()

    async def _enter(self, scope: Scope, visit: Visit) -> Leave | None:
        """What to call when a request with a key is over; None where none is needed. ApiError."""
        keys = self._context.keys
        if not keys.required or scope["method"] == "OPTIONS" or scope["path"] in OPEN_PATHS:
            return None
        visit.key, leave = await keys.enter(_key_of(scope))
        visit.client = visit.key
        return leave

    async def _handle(self, scope: Scope, visit: Visit, receive: Receive, send: Send) -> None:
        tracing = self._context.tracing
        if tracing is None or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        status = 500

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watched)
        finally:
            tracing.record(scope, visit, status, self._context.names[0])


def _id_of(scope: Scope) -> str:
    """The id that a client or proxy has given the request; else, or if it is unfit, a new one."""
    own = next((value for name, value in scope["headers"] if name == REQUEST_ID), b"")
    return own.decode() if _OWN_ID.fullmatch(own) else uuid.uuid4().hex


def _with_id(send: Send, request_id: bytes) -> Send:
    """`send`, with the id among the headers."""

    async def named(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = [*message.get("headers", ()), (REQUEST_ID, request_id)]
            message = {**message, "headers": headers}
        await send(message)

    return named


def _key_of(scope: Scope) -> bytes:
    """The key a request brings, as a bearer token or as Anthropic's clients send it."""
    for name, value in scope["headers"]:
        if name == b"authorization":
            scheme, _, key = value.partition(b" ")
            if scheme.lower() == b"bearer":
                return key.strip()
        elif name == b"x-api-key":
            return value.strip()
    return b""
