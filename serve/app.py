"""The ASGI application: routes, and every failure as an OpenAI error object."""

import logging

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect

from octavo.sampling.shown import cut
from octavo.serve import (
    errors,
    routes_admin,
    routes_embeddings,
    routes_messages,
    routes_openai,
    routes_ops,
    routes_responses,
    routes_score,
)
from octavo.serve.absent import why_absent
from octavo.serve.context import ServerContext, context_of
from octavo.serve.errors import ApiError, ClientGone
from octavo.serve.gate import Gate

# No client sees this; it is what proxies log for a client that hung up.
CLIENT_CLOSED_REQUEST = 499

log = logging.getLogger("octavo.server")


def create_app(context: ServerContext) -> FastAPI:
    """The application around one engine client."""
    app = FastAPI(title="Octavo", version=context.version, redirect_slashes=False)
    app.state.context = context
    app.include_router(routes_openai.router)
    app.include_router(routes_embeddings.router)
    app.include_router(routes_score.router)
    app.include_router(routes_messages.router)
    app.include_router(routes_responses.router)
    app.include_router(routes_ops.router)
    app.include_router(routes_admin.router)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientGone, _client_gone)
    app.add_exception_handler(ClientDisconnect, _client_gone)
    app.add_exception_handler(Exception, _bug)
    app.add_middleware(Gate, context=context)
    if context.config.cors_origins:
        # Around the gate: a browser's preflight brings no key, and reads refusals too.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=context.config.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["retry-after", "x-request-id"],
        )
    return app


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return context_of(request).respond(error, request.url.path)


async def _http_error(request: Request, error: Exception) -> Response:
    """Starlette's own refusals: unknown route, wrong method. What other servers have says why."""
    assert isinstance(error, HTTPException)
    path, missing = request.url.path, error.status_code == 404
    if missing and (reason := why_absent(path)):
        refusal = errors.not_offered(request.method, path, reason)
    else:
        message = f"{request.method} {cut(path)}: {error.detail}"
        kind = "not_found_error" if missing else "invalid_request_error"
        refusal = ApiError(error.status_code, message, kind=kind)
    response = context_of(request).respond(refusal, path)
    response.headers.update(error.headers or {})
    return response


async def _client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _bug(request: Request, error: Exception) -> Response:
    """A failure of ours; the traceback goes to the log, its kind to the client."""
    failure = errors.internal(f"internal error: {type(error).__name__}")
    return context_of(request).respond(failure, request.url.path)
