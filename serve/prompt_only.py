"""Requests that generate nothing: their prompts checked, run to the end, one event each."""

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from fastapi import Request
from pydantic import BaseModel, ConfigDict

from octavo.serve import errors, objects
from octavo.serve import types as engine
from octavo.serve.answering import Guard
from octavo.serve.bodies import parse_body, take
from octavo.serve.context import ServerContext, check_vocabulary, context_of, visit_of
from octavo.serve.errors import ApiError
from octavo.serve.protocol import check_scheduling
from octavo.serve.timing import SampleTimes, Visit
from octavo.serve.types import FINISH_ABORT, FINISH_ERROR, TokenEvent
from octavo.serve.wire import Ready


class PromptBody(BaseModel):
    """Fields of every endpoint that reads prompts and generates nothing."""

    model_config = ConfigDict(strict=True, extra="ignore")

    model: str | None = None
    add_special_tokens: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None


def schema(kind: type[PromptBody]) -> dict[str, object]:
    """The body's JSON schema for the OpenAPI document."""
    content = {"application/json": {"schema": kind.model_json_schema()}}
    return {"requestBody": {"required": True, "content": content}}


async def enter[Body: PromptBody](
    request: Request, kind: type[Body]
) -> tuple[ServerContext, Ready, Body]:
    """The server's state and the validated body of a request that may come in."""
    context = context_of(request)
    ready = context.require_ready()
    body = await take(request, partial(parse_body, kind))
    context.check_model(body.model)
    check_scheduling(body.priority, body.cache_salt)
    return context, ready, body


def check_ids(ids: Sequence[int], name: str, ready: Ready, what: str = "") -> None:
    """ApiError 400 unless the engine can read these ids; `what` they are, if not the field."""
    if not ids:
        raise errors.invalid(f"{name} must hold at least one token", name)
    if len(ids) > ready.max_model_len:
        message = f"{what or name}: {len(ids)} tokens, but the context holds {ready.max_model_len}"
        raise ApiError(400, message, param=name, code="context_length_exceeded")
    check_vocabulary(ids, name, ready.vocab_size)


async def run_prompts(
    context: ServerContext, request: Request, requests: Sequence[engine.Request]
) -> tuple[list[TokenEvent], int]:
    """The last event of each engine request, in order, and the epoch of the weights.

    ApiError if one fails.

    Nothing is left running in the engine, also when the client hangs up.
    """
    visit = visit_of(request)
    times = {one.request_id: visit.sample(one) for one in requests}
    call = context.client.submit(requests, start_over=lambda _: None)  # ends alone count
    guard = Guard(request, call, context)
    ends: dict[str, TokenEvent] = {}
    try:
        while len(ends) < len(requests):
            for event in await call.next():
                if event.finish_reason is None:
                    continue
                ends[event.request_id] = event
                times[event.request_id].note(event, time.monotonic())
                _settle(context, visit, times[event.request_id], event.finish_reason)
                if event.finish_reason == FINISH_ERROR:
                    raise errors.internal(event.error or "the request failed")
                if event.finish_reason == FINISH_ABORT:
                    raise errors.aborted()
    except BaseException as error:
        reason = errors.finish_of(error)
        for sample in times.values():
            if reason is not None and sample.finish_reason is None:
                _settle(context, visit, sample, reason)
        raise
    finally:
        guard.end()
    return [ends[one.request_id] for one in requests], call.epoch


def _settle(context: ServerContext, visit: Visit, sample: SampleTimes, reason: str) -> None:
    sample.finish_reason = reason
    context.recorder.ended(visit, sample)


def prompt_usage(requests: Sequence[engine.Request], ends: Sequence[TokenEvent]) -> dict[str, Any]:
    """Tokens read, and how many of them the prefix cache had."""
    read = sum(len(one.prompt) for one in requests)
    return objects.usage(read, 0, sum(end.cached_tokens for end in ends))
