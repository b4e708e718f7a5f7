"""The ASGI application: routes, and every failure as an OpenAI error object."""

import logging

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from octavo.serve import errors, routes_openai, routes_ops
from octavo.serve.context import ServerContext, context_of
from octavo.serve.errors import ApiError, ClientGone

# No client sees this; it is what proxies log for a client that hung up.
CLIENT_CLOSED_REQUEST = 499

log = logging.getLogger("octavo.server")


def create_app(context: ServerContext) -> FastAPI:
    """The application around one engine client."""
    app = FastAPI(title="Octavo", version=context.version, redirect_slashes=False)
    app.state.context = context
    app.include_router(routes_openai.router)
    app.include_router(routes_ops.router)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientGone, _client_gone)
    app.add_exception_handler(ClientDisconnect, _client_gone)
    app.add_exception_handler(Exception, _bug)
    return app


def _respond(request: Request, error: ApiError) -> Response:
    context_of(request).recorder.responses[error.status] += 1
    return Response(
        error.body(), error.status, headers=error.headers(), media_type="application/json"
    )


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _respond(request, error)


async def _http_error(request: Request, error: Exception) -> Response:
    """Starlette's own refusals: unknown route, wrong method."""
    assert isinstance(error, HTTPException)
    kind = "not_found_error" if error.status_code == 404 else "invalid_request_error"
    message = f"{request.method} {request.url.path}: {error.detail}"
    response = _respond(request, ApiError(error.status_code, message, kind=kind))
    response.headers.update(error.headers or {})
    return response


async def _client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _bug(request: Request, error: Exception) -> Response:
    """A failure of ours; the traceback goes to the log, its kind to the client."""
    return _respond(request, errors.internal(f"internal error: {type(error).__name__}"))
