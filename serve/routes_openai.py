"""/v1/completions and /v1/chat/completions."""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator

from fastapi import APIRouter, Request, Response
from starlette.types import Receive, Scope, Send

from octavo.sampling.params import SamplingParams
from octavo.serve import errors, responses
from octavo.serve import types as engine
from octavo.serve.chat_formats import AnswerPlan
from octavo.serve.chat_plan import plan_chat
from octavo.serve.client import Call
from octavo.serve.context import (
    ServerContext,
    check_length,
    context_of,
    read_body,
    visit_of,
)
from octavo.serve.errors import ApiError, ClientGone
from octavo.serve.generation import Generation, Wanted
from octavo.serve.openapi import request_schema
from octavo.serve.prompts import Prompt
from octavo.serve.protocol import (
    ChatBody,
    CompletionBody,
    check_combinations,
    parse_body,
    sampling_params,
)
from octavo.serve.split_generation import SplitGeneration
from octavo.serve.structured import Structured, structured_output
from octavo.serve.wire import Ready

COMPLETION_DEFAULT_TOKENS = 16
MAX_CHOICES = 4096

log = logging.getLogger("octavo.server")
router = APIRouter()


@router.post("/v1/completions", openapi_extra=request_schema(CompletionBody), response_model=None)
async def completions(request: Request) -> Response:
    """Continue one or more prompts."""
    context = context_of(request)
    ready = context.require_ready()
    body = parse_body(CompletionBody, await read_body(request, context.config))
    context.check_model(body.model)
    check_combinations(body)
    wanted = Wanted(
        logprobs=body.logprobs,
        prompt_logprobs=body.prompt_logprobs,
        echo=bool(body.echo),
        token_ids=bool(body.return_token_ids),
        usage=body.include_usage,
        timing=bool(body.return_timing),
        structured=structured_output(body),
    )
    _need_text(context, body, wanted)
    prompts = await context.encoder.completion(body)
    asked = body.max_tokens
    return await _generate(context, request, body, wanted, ready, prompts, asked)


@router.post("/v1/chat/completions", openapi_extra=request_schema(ChatBody), response_model=None)
async def chat_completions(request: Request) -> Response:
    """Answer a conversation."""
    context = context_of(request)
    ready = context.require_ready()
    body = parse_body(ChatBody, await read_body(request, context.config))
    context.check_model(body.model)
    check_combinations(body)
    structured = structured_output(body)
    prompt, plan = await plan_chat(context, body, structured)
    if plan is not None and plan.grammar is not None:
        structured = Structured(plan.grammar, "tools")
    wanted = Wanted(
        chat=True,
        logprobs=body.top_logprobs_asked,
        prompt_logprobs=body.prompt_logprobs,
        token_ids=bool(body.return_token_ids),
        usage=body.include_usage,
        timing=bool(body.return_timing),
        shown=plan.shown if plan else frozenset(),
        structured=structured,
    )
    asked = body.max_completion_tokens
    asked = body.max_tokens if asked is None else asked
    if asked == 0:
        raise errors.invalid("max_tokens must be at least 1 in a chat, not 0", "max_tokens")
    return await _generate(context, request, body, wanted, ready, [prompt], asked, plan)


def _need_text(context: ServerContext, body: CompletionBody, wanted: Wanted) -> None:
    """Without a tokenizer only ids come out, so they must be asked for and nothing else."""
    if context.encoder.tokenizer is not None:
        return
    if not wanted.token_ids:
        message = "return_token_ids must be true: this model has no tokenizer to make text with"
        raise errors.invalid(message, "return_token_ids")
    for name in ("echo", "stop", "logprobs"):
        if getattr(body, name) not in (None, False, [], ""):
            raise errors.invalid(f"{name}: this model has no tokenizer", name)


async def _generate(
    context: ServerContext,
    request: Request,
    body: CompletionBody | ChatBody,
    wanted: Wanted,
    ready: Ready,
    prompts: list[Prompt],
    max_tokens: int | None,
    plan: AnswerPlan | None = None,
) -> Response:
    """Run the samples and answer, as one JSON object or as a stream."""
    kind = "chatcmpl" if wanted.chat else "cmpl"
    identity = responses.Identity(
        f"{kind}-{uuid.uuid4().hex}", int(time.time()), context.names[0], context.fingerprint
    )
    visit = visit_of(request)
    parts = (context.client, context.recorder, context.table, identity, wanted, visit)
    job = SplitGeneration(*parts, plan) if plan else Generation(*parts)
    add_samples(job, body, wanted, ready, prompts, max_tokens, identity.id)
    call = job.start()
    guard = Guard(request, call, context)
    try:
        if body.stream:
            first = await job.first_events()
            return EventStream(job.stream(first), guard)
        await job.collect()
    except BaseException:
        call.close()
        guard.end()
        raise
    guard.end()
    return Response(job.answer(), media_type="application/json")


def add_samples(
    job: Generation,
    body: CompletionBody | ChatBody,
    wanted: Wanted,
    ready: Ready,
    prompts: list[Prompt],
    max_tokens: int | None,
    base_id: str,
) -> None:
    """Every sample of every prompt as an engine request; ApiError 400 before any is submitted."""
    default = ready.max_model_len if wanted.chat else COMPLETION_DEFAULT_TOKENS
    for prompt in prompts:
        prompt = _truncate(prompt, body.truncate_prompt_tokens, ready.max_model_len)
        count = check_length(len(prompt.ids), max_tokens, default, ready.max_model_len)
        if not 0 <= min(prompt.ids) <= max(prompt.ids) < ready.vocab_size:
            limit = f"token ids are 0 .. {ready.vocab_size - 1}"
            raise errors.invalid(f"prompt holds an id outside the vocabulary: {limit}", "prompt")
        params = _params(body, wanted, ready, count)
        if params.n * len(prompts) > MAX_CHOICES:
            limit = f"at most {MAX_CHOICES} choices, not {params.n * len(prompts)}"
            raise errors.invalid(f"n: prompts times n may be {limit}", "n")
        for sample in range(params.n):
            request = engine.Request(
                request_id=f"{base_id}-{len(job.choices)}",
                prompt=prompt.ids,
                params=params,
                eos_ids=ready.eos_ids,
                sample_index=sample,
                priority=body.priority or 0,
                cache_salt=body.cache_salt or "",
                grammar=wanted.structured.grammar if wanted.structured else None,
            )
            job.add(prompt, request)


def _truncate(prompt: Prompt, keep: int | None, limit: int) -> Prompt:
    """The last `keep` tokens; -1 keeps what the context holds. The dropped text isn't echoed."""
    if keep is None:
        return prompt
    if keep < -1 or keep == 0:
        message = f"truncate_prompt_tokens must be -1 or at least 1, not {keep}"
        raise errors.invalid(message, "truncate_prompt_tokens")
    keep = limit if keep == -1 else keep
    return prompt if len(prompt.ids) <= keep else Prompt(prompt.ids[-keep:])


def _params(
    body: CompletionBody | ChatBody, wanted: Wanted, ready: Ready, max_tokens: int
) -> SamplingParams:
    for_prompt = [body.prompt_logprobs, wanted.logprobs if wanted.echo else None]
    asked = [count for count in for_prompt if count is not None]
    return sampling_params(
        body,
        max_tokens=max_tokens,
        prompt_logprobs=max(asked, default=None),
        vocab_size=ready.vocab_size,
        defaults=ready.generation,
    )


class Guard:
    """Ends a call when its client hangs up or its time is over."""

    def __init__(self, request: Request, call: Call, context: ServerContext) -> None:
        self._call = call
        self._context = context
        self._watch = asyncio.create_task(self._hung_up(request))
        seconds = context.config.request_timeout
        self._timer: asyncio.TimerHandle | None = None
        if seconds:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(seconds, call.fail, errors.timed_out(seconds))

    async def _hung_up(self, request: Request) -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        self._context.recorder.disconnects += 1
        self._call.fail(ClientGone())

    def end(self) -> None:
        """The request is over."""
        self._watch.cancel()
        if self._timer is not None:
            self._timer.cancel()


class EventStream(Response):
    """Server-sent events. A failure after the headers becomes an error event."""

    def __init__(self, chunks: AsyncIterator[bytes], guard: Guard) -> None:
        self._chunks = chunks
        self._guard = guard
        self.status_code = 200
        self.background = None
        self.raw_headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        try:
            async for body in self._chunks:
                await send({"type": "http.response.body", "body": body, "more_body": True})
        except ApiError as error:
            await self._report(send, error)
        except ClientGone:
            return
        except Exception as error:
            log.exception("stream failed")
            await self._report(send, errors.internal(f"{type(error).__name__}: {error}"))
        finally:
            self._guard.end()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _report(self, send: Send, error: ApiError) -> None:
        body = self.error_event(error)
        await send({"type": "http.response.body", "body": body, "more_body": True})

    def error_event(self, error: ApiError) -> bytes:
        """What ends a stream that failed."""
        return responses.sse({"error": error.fields()}) + responses.SSE_DONE
