"""Failures as OpenAI's API words them, {"error": {message, type, param, code}}, and Anthropic's."""

import asyncio
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import ceil
from typing import Any

import msgspec

from octavo.sampling.shown import cut, shown
from octavo.serve.types import FINISH_ABORT, FINISH_ERROR

CORE_DEAD = "the engine process has ended"


ANTHROPIC_PATHS = "/v1/messages"
_ANTHROPIC_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class ApiError(Exception):
    """A failure with an HTTP status and an OpenAI error object.

    Attributes:
        status: HTTP status.
        message: what went wrong, with the value and what is accepted.
        param: request field at fault, if one is.
        kind: OpenAI's error type. code: OpenAI's error code, if it has one.
        retry_after: seconds for the Retry-After header.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        kind: str = "invalid_request_error",
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.kind = kind
        self.code = code
        self.retry_after = retry_after

    def body(self) -> bytes:
        """The JSON error object."""
        return msgspec.json.encode({"error": self.fields()})

    def fields(self) -> dict[str, Any]:
        """The inside of the error object."""
        return {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.code,
        }

    def anthropic_fields(self) -> dict[str, Any]:
        """The inside of Anthropic's error object."""
        other = "invalid_request_error" if self.status < 500 else "api_error"
        return {"type": _ANTHROPIC_KINDS.get(self.status, other), "message": self.message}

    def body_for(self, path: str) -> bytes:
        """The JSON error object as the clients of a path expect it."""
        if not path.startswith(ANTHROPIC_PATHS):
            return self.body()
        return msgspec.json.encode({"type": "error", "error": self.anthropic_fields()})

    def headers(self) -> dict[str, str]:
        """Headers that go with the status."""
        headers: dict[str, str] = {}
        if self.retry_after is not None:
            headers["retry-after"] = str(self.retry_after)
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        if self.status in (408, 413):
            headers["connection"] = "close"
        return headers


@contextmanager
def in_words(words: Mapping[str, str]) -> Iterator[None]:
    """Refusals of a request made of the caller's name the caller's fields.

    `words` are patterns of the made request's names, and what stands for each.
    """
    try:
        yield
    except ApiError as error:
        for pattern, name in words.items():
            error.message = re.sub(pattern, name, error.message)
            error.param = error.param and re.sub(pattern, name, error.param)
        raise


class ClientGone(Exception):
    """The client hung up; there is nobody to answer."""


def invalid(message: str, param: str | None = None) -> ApiError:
    """400: the request can't be served as it is."""
    return ApiError(400, message, param=param)


def unsupported(param: str, reason: str) -> ApiError:
    """400: the parameter is known and not offered."""
    message = f"{param} is not supported: {reason}"
    return ApiError(400, message, param=param, code="unsupported_parameter")


def not_offered(method: str, path: str, reason: str) -> ApiError:
    """404: other servers have this endpoint."""
    message = f"{method} {cut(path)} is not offered: {reason}"
    return ApiError(404, message, kind="not_found_error", code="unsupported_endpoint")


def unauthorized() -> ApiError:
    """401: no API key, or a wrong one."""
    message = "a valid API key is required: send it as 'Authorization: Bearer KEY'"
    return ApiError(401, message, kind="authentication_error", code="invalid_api_key")


def forbidden(message: str) -> ApiError:
    """403: nobody may do that here."""
    return ApiError(403, message, kind="permission_error")


def conflict(message: str) -> ApiError:
    """409: not in the present state."""
    return ApiError(409, message, kind="conflict_error")


def unknown_model(name: str, served: tuple[str, ...]) -> ApiError:
    """404: this server doesn't serve that model."""
    names = f"served under the names {', '.join(served)}: one model, without adapters"
    message = f"model {shown(name)} does not exist here; {names}"
    return ApiError(404, message, param="model", kind="not_found_error", code="model_not_found")


def body_too_large(limit: int) -> ApiError:
    """413: the request body is over the limit."""
    return ApiError(413, f"the request body is larger than {limit} bytes", code="body_too_large")


def body_encoded(encoding: str) -> ApiError:
    """415: the request body is compressed, or encoded in another way."""
    return ApiError(415, f"Content-Encoding must be identity, not {shown(encoding)}")


def head_too_large(limit: int) -> ApiError:
    """431: the request's head does not end."""
    return ApiError(431, f"the request's head is longer than {limit} bytes")


def head_too_slow(seconds: float) -> ApiError:
    """408: the request's head did not arrive in time."""
    text = f"the request's head did not arrive within {seconds:g} s"
    return ApiError(408, text, kind="timeout_error")


def body_too_slow(seconds: float) -> ApiError:
    """408: the request body did not arrive in time."""
    text = f"the request body did not arrive within {seconds:g} s"
    return ApiError(408, text, kind="timeout_error")


def overloaded(message: str, retry_after: float) -> ApiError:
    """429: the queue, or what the caller's key may use, is full for `retry_after` seconds."""
    return ApiError(
        429,
        f"the server is at its limit: {message}",
        kind="rate_limit_error",
        code="rate_limit_exceeded",
        retry_after=max(1, ceil(retry_after)),
    )


def timed_out(seconds: float) -> ApiError:
    """408: the request took longer than the server allows."""
    return ApiError(408, f"the request took longer than {seconds:g} s", kind="timeout_error")


def reads_too_slowly(tokens: int) -> ApiError:
    """408: the client let more of its answer wait than the server keeps."""
    return ApiError(408, f"the answer was not read: {tokens} tokens wait", kind="timeout_error")


def unavailable(message: str, retry_after: int = 5) -> ApiError:
    """503: loading, draining, or without an engine."""
    return ApiError(
        503,
        message,
        kind="service_unavailable_error",
        code="service_unavailable",
        retry_after=retry_after,
    )


def aborted() -> ApiError:
    """503: an operator's order has ended the request, where its answer can't say so by itself."""
    return unavailable("the request was ended by an operator's order")


def internal(message: str) -> ApiError:
    """500: our fault."""
    return ApiError(500, message, kind="server_error", code="internal_error")


def finish_of(error: BaseException) -> str | None:
    """How samples ended that still ran at `error`; None if the engine had not taken them."""
    if isinstance(error, ApiError) and error.status != 408:
        return FINISH_ERROR if error.status >= 500 else None
    expected = ApiError | ClientGone | asyncio.CancelledError | GeneratorExit
    return FINISH_ABORT if isinstance(error, expected) else FINISH_ERROR
