"""What the generating endpoints share: samples to the engine, then one answer or a stream."""

import asyncio
import logging
from collections.abc import AsyncIterator

from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

from octavo.sampling.params import SamplingParams
from octavo.sampling.shown import shown
from octavo.serve import errors
from octavo.serve import types as engine
from octavo.serve.call import Call
from octavo.serve.choice import Wanted
from octavo.serve.context import ServerContext, check_length, check_vocabulary
from octavo.serve.errors import ApiError, ClientGone
from octavo.serve.generation import Generation
from octavo.serve.prompts import Prompt
from octavo.serve.protocol import ChatBody, CompletionBody, sampling_params
from octavo.serve.wire import Ready

COMPLETION_DEFAULT_TOKENS = 16
MAX_CHOICES = 4096
MAX_PROMPT_LOGPROBS = 1 << 22
"""Of an answer, alternatives included: each takes a hundred bytes, in the engine and here."""

log = logging.getLogger("octavo.server")


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
    own = ready.generation.get("max_tokens", ready.max_model_len)
    default = own if wanted.chat else COMPLETION_DEFAULT_TOKENS
    reported = 0
    for prompt in prompts:
        room = ready.max_model_len - (1 if max_tokens is None else max_tokens)
        prompt = _truncate(prompt, body.truncate_prompt_tokens, room)
        sizes = (len(prompt.ids), max_tokens, default, ready.max_model_len)
        count = check_length(*sizes, body.length_field)
        check_vocabulary(prompt.ids, "prompt", ready.vocab_size)
        params = _params(body, wanted, ready, count)
        if params.n * len(prompts) > MAX_CHOICES:
            limit = f"at most {MAX_CHOICES} choices, not {params.n * len(prompts)}"
            raise errors.invalid(f"n: prompts times n may be {limit}", "n")
        if params.prompt_logprobs is not None:
            reported += len(prompt.ids) * params.n * (params.prompt_logprobs + 1)
            _check_reported(reported, body)
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
                thinking=wanted.thinking,
                client=job.client,
            )
            job.add(prompt, request)


def _check_reported(count: int, body: CompletionBody | ChatBody) -> None:
    if count > MAX_PROMPT_LOGPROBS:
        name = "logprobs" if body.prompt_logprobs is None else "prompt_logprobs"
        what = f"asks for {count} log-probabilities of prompt tokens or more (tokens x samples x"
        limit = f"alternatives + 1), at most {MAX_PROMPT_LOGPROBS}: send fewer prompts at a time"
        raise errors.invalid(f"{name} {what} {limit}", name)


def _truncate(prompt: Prompt, keep: int | None, room: int) -> Prompt:
    """The last `keep` tokens, or for -1 `room`, where there is any. The dropped isn't echoed."""
    if keep is None:
        return prompt
    if keep < -1 or keep == 0:
        message = f"truncate_prompt_tokens must be -1 or at least 1, not {shown(keep)}"
        raise errors.invalid(message, "truncate_prompt_tokens")
    keep = room if keep == -1 else keep
    return Prompt(prompt.ids[-keep:]) if 0 < keep < len(prompt.ids) else prompt


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


async def answer(
    job: Generation, context: ServerContext, request: Request, *, stream: bool
) -> Response:
    """Run the samples of `job` and answer, as one JSON object or as a stream."""
    call = job.start(whole=not stream)
    guard = Guard(request, call, context)
    try:
        if stream:
            writer = getattr(request.state, "writer", None)
            first = await job.first_events()
            return EventStream(job.stream(first, writer), job, guard)
        await job.collect()
    except BaseException:
        guard.end()
        raise
    guard.end()
    return Response(job.answer(), media_type="application/json")


class Guard:
    """Ends a call when its client hangs up, its time is over, or nobody waits for it any more."""

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
        """The request is over: whatever it came to, nothing of it runs on."""
        self._watch.cancel()
        if self._timer is not None:
            self._timer.cancel()
        self._call.close()


class EventStream(Response):
    """Server-sent events. A failure after the headers becomes an error event."""

    def __init__(self, chunks: AsyncIterator[bytes], job: Generation, guard: Guard) -> None:
        self._chunks = chunks
        self._job = job
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
        try:
            await send(start)
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
        body = self._job.failed(error)
        await send({"type": "http.response.body", "body": body, "more_body": True})
