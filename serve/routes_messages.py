"""Anthropic's /v1/messages and /v1/messages/count_tokens."""

import time
import uuid
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any

from fastapi import APIRouter, Request, Response

from octavo.serve import errors, responses
from octavo.serve.chat_formats import PLAIN
from octavo.serve.chat_plan import plan_chat
from octavo.serve.context import context_of, read_body, visit_of
from octavo.serve.errors import ApiError
from octavo.serve.generation import Wanted
from octavo.serve.messages_generation import MessagesGeneration, event
from octavo.serve.messages_protocol import MessagesBody, chat_body
from octavo.serve.openapi import request_schema
from octavo.serve.protocol import parse_body
from octavo.serve.routes_openai import EventStream, Guard, add_samples
from octavo.serve.structured import Structured

_KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}

router = APIRouter()

type Handler = Callable[[Request], Awaitable[Response]]


def _fields(error: ApiError) -> dict[str, Any]:
    kind = _KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": kind, "message": error.message}


def _anthropic(handler: Handler) -> Handler:
    """Failures as Anthropic's error objects."""

    @wraps(handler)
    async def handle(request: Request) -> Response:
        try:
            return await handler(request)
        except ApiError as error:
            response = context_of(request).respond(error)
            response.body = responses.to_json({"type": "error", "error": _fields(error)})
            response.headers["content-length"] = str(len(response.body))
            return response

    return handle


@router.post("/v1/messages", openapi_extra=request_schema(MessagesBody), response_model=None)
@_anthropic
async def messages(request: Request) -> Response:
    """Answer a conversation."""
    context = context_of(request)
    ready = context.require_ready()
    raw = await read_body(request, context.config)
    body = parse_body(MessagesBody, raw)
    context.check_model(body.model)
    if body.max_tokens is None or body.max_tokens < 1:
        message = f"max_tokens: an integer of at least 1 is required, not {body.max_tokens}"
        raise errors.invalid(message, "max_tokens")
    chat = chat_body(body)
    prompt, plan = await plan_chat(context, chat, None)
    plan = plan or PLAIN
    structured = Structured(plan.grammar, "tools") if plan.grammar else None
    wanted = Wanted(chat=True, shown=plan.shown, structured=structured)
    identity = responses.Identity(
        f"msg_{uuid.uuid4().hex}", int(time.time()), context.names[0], context.fingerprint
    )
    parts = (context.client, context.recorder, context.table, identity, wanted, visit_of(request))
    job = MessagesGeneration(*parts, plan)
    add_samples(job, chat, wanted, ready, [prompt], body.max_tokens, identity.id)
    call = job.start()
    guard = Guard(request, call, context)
    try:
        if body.stream:
            return MessageStream(job.stream(await job.first_events()), guard)
        await job.collect()
    except BaseException:
        call.close()
        guard.end()
        raise
    guard.end()
    return Response(job.answer(), media_type="application/json")


@router.post(
    "/v1/messages/count_tokens", openapi_extra=request_schema(MessagesBody), response_model=None
)
@_anthropic
async def count_tokens(request: Request) -> Response:
    """Tokens of the prompt that a conversation makes."""
    context = context_of(request)
    context.require_ready()
    raw = await read_body(request, context.config)
    body = parse_body(MessagesBody, raw)
    context.check_model(body.model)
    prompt, _ = await plan_chat(context, chat_body(body), None)
    return Response(
        responses.to_json({"input_tokens": len(prompt.ids)}), media_type="application/json"
    )


class MessageStream(EventStream):
    """A stream whose failures are Anthropic's error events."""

    def error_event(self, error: ApiError) -> bytes:
        """The event that ends a stream with `error`."""
        return event("error", {"error": _fields(error)})
