"""One generating HTTP request: its samples, from engine events to answer objects or SSE bytes."""

import time
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from octavo.serve import errors, objects
from octavo.serve.call import Call
from octavo.serve.choice import Choice, Wanted
from octavo.serve.client import EngineClient
from octavo.serve.detokenize import TokenTable
from octavo.serve.echo import echo_tokens
from octavo.serve.errors import ApiError
from octavo.serve.http_answers import DirectWriter
from octavo.serve.metrics import Recorder
from octavo.serve.output import Delta, SampleOutput, TokenText
from octavo.serve.prompts import Prompt
from octavo.serve.structured import failure
from octavo.serve.timing import Visit
from octavo.serve.types import FINISH_ERROR, FINISH_LENGTH, Request, TokenEvent


class Generation:
    """Runs the choices of one request through the engine.

    Every way out of `collect` and `stream` leaves nothing running in the engine.
    """

    def __init__(
        self,
        client: EngineClient,
        recorder: Recorder,
        table: TokenTable | None,
        identity: objects.Identity,
        wanted: Wanted,
        visit: Visit | None = None,
    ) -> None:
        self._client = client
        self._recorder = recorder
        self._table = table
        self._unsaid = identity
        self._wanted = wanted
        self._visit = visit or Visit()
        self._running: dict[str, Choice] = {}
        self._writers: list[objects.ChunkWriter] = []
        self._greeted: set[int] = set()
        self.choices: list[Choice] = []
        self.call: Call | None = None

    @property
    def _identity(self) -> objects.Identity:
        """What the answer says of itself, once its weights are known: after the first news."""
        return self._unsaid.under(self.call.epoch if self.call is not None else 0)

    @property
    def client(self) -> str:
        """Who asks."""
        return self._visit.client

    def add(self, prompt: Prompt, request: Request) -> None:
        """One more sample; index is the order of adding."""
        times = self._visit.sample(request)
        sample = self._sample(request)
        choice = Choice(len(self.choices), prompt, request, sample, times)
        self.choices.append(choice)

    def _sample(self, request: Request) -> SampleOutput:
        return SampleOutput(
            request.params,
            self._table,
            track=self._wanted.logprobs is not None or self._wanted.token_ids,
            eos_ids=request.eos_ids,
            shown=self._wanted.shown,
        )

    def start(self, *, whole: bool = False) -> Call:
        """Submit. Samples that want no token and no prompt log-probabilities end here.

        A whole answer, one that `collect` makes, may be begun anew by another engine.
        """
        for choice in self.choices:
            params = choice.request.params
            if params.max_tokens == 0 and params.prompt_logprobs is None:
                self._settle(choice, FINISH_LENGTH)
            else:
                self._running[choice.request.request_id] = choice
        requests = [choice.request for choice in self._running.values()]
        self.call = self._client.submit(requests, self._start_over if whole else None)
        return self.call

    def _start_over(self, request_ids: Collection[str]) -> None:
        for choice in self._running.values():
            if choice.request.request_id in request_ids:
                self._forget(choice)

    def _forget(self, choice: Choice) -> None:
        """Be as before the first news of a choice."""
        choice.start_over(self._sample(choice.request))

    async def collect(self) -> None:
        """Run to the end, filling the choices; ApiError when a sample fails."""
        assert self.call is not None
        with self._accounted():
            while self._running:
                for event in await self.call.next():
                    if self._refused(event):
                        raise failure(event, self._wanted.structured)
                    for choice, delta in self._advance(event):
                        self._keep(choice, delta)
                    if event.finish_reason == FINISH_ERROR:
                        raise failure(event, self._wanted.structured)

    def _refused(self, event: TokenEvent) -> bool:
        """Whether the engine refuses what a sample asks for: it never began, so it has no end."""
        choice = self._running.get(event.request_id)
        return event.invalid and choice is not None and not choice.sample.completion_tokens

    @contextmanager
    def _accounted(self) -> Iterator[None]:
        """Whatever happens inside, nothing runs on after it, and how samples ended is counted."""
        assert self.call is not None
        try:
            yield
        except BaseException as error:
            reason = errors.finish_of(error)
            for choice in self._running.values() if reason else ():
                self._settle(choice, reason or "")
            self._running.clear()
            self.call.close()
            raise

    def _settle(self, choice: Choice, reason: str) -> None:
        choice.finish_reason = choice.times.finish_reason = reason
        choice.times.completion_tokens = choice.sample.completion_tokens
        self._recorder.ended(self._visit, choice.times)

    def _keep(self, choice: Choice, delta: Delta) -> None:
        choice.parts.append(delta.text)
        choice.tokens.extend(delta.tokens)

    async def first_events(self) -> list[TokenEvent]:
        """Wait for news, so that a refusal still gets an HTTP status of its own."""
        assert self.call is not None
        if not self._running:
            return []
        with self._accounted():
            events = await self.call.next()
            failed = [event for event in events if event.finish_reason == FINISH_ERROR]
            if failed and not any(event.token_ids for event in events):
                raise failure(failed[0], self._wanted.structured)
        return events

    async def stream(
        self, events: list[TokenEvent], writer: DirectWriter | None = None
    ) -> AsyncIterator[bytes]:
        """SSE bytes, starting with `events`; what is ready together is yielded together.

        With a writer, what the samples gain while this waits for news goes straight there.
        """
        assert self.call is not None
        if opening := self._opening():
            yield opening
        taker = None if writer is None else partial(self._write_at_once, writer)
        with self._accounted():
            while self._running:
                body, error = self._render_all(events)
                if body:
                    yield body
                if error is not None:
                    raise error
                if self._running:
                    events = await self.call.next(taker)
        yield self._closing()

    def _write_at_once(
        self, writer: DirectWriter, events: list[TokenEvent]
    ) -> list[TokenEvent] | None:
        """As `client.Taker`; an end, or a client that is behind, is left to `stream`."""
        if not writer.ready or any(event.finish_reason is not None for event in events):
            return events
        body, _ = self._render_all(events)
        if body:
            writer.write(body)
        return None if self._running else []

    def _opening(self) -> bytes:
        """What a stream says before the first news: of choices that want no token, all."""
        self._writers = [self._writer_of(choice) for choice in self.choices]
        done = [c for c in self.choices if c.finish_reason is not None]
        return b"".join(self._greet(c) + self._last(c, Delta(), c.finish_reason) for c in done)

    def _writer_of(self, choice: Choice) -> objects.ChunkWriter:
        identity, chat = self._identity, self._wanted.chat
        if not self._wanted.counting:
            with_usage = self._wanted.usage
            return objects.ChunkWriter(identity, choice.index, chat=chat, with_usage=with_usage)

        def used() -> dict[str, Any]:
            sample, read = choice.sample, len(choice.prompt.ids)
            return objects.usage(read, sample.completion_tokens, sample.cached_tokens)

        return objects.CountingWriter(identity, choice.index, chat=chat, used=used)

    def _closing(self) -> bytes:
        return (self._usage_event() if self._wanted.usage else b"") + objects.SSE_DONE

    def failed(self, error: ApiError) -> bytes:
        """What ends a stream that `error` cuts short."""
        return objects.sse({"error": error.fields()}) + objects.SSE_DONE

    def _advance(self, event: TokenEvent) -> list[tuple[Choice, Delta]]:
        """Deltas of one event, with timings recorded and the engine told of stop strings."""
        choice = self._running.get(event.request_id)
        if choice is None:
            return []
        self._time(choice, event)
        deltas = choice.sample.push(event)
        reason = choice.sample.finish_reason
        if reason is not None:
            del self._running[event.request_id]
            assert self.call is not None
            if choice.sample.ended_early:
                self.call.finish(event.request_id)
            choice.stop_reason = deltas[-1].stop_reason
            self._settle(choice, reason)
        return [(choice, delta) for delta in deltas]

    def _time(self, choice: Choice, event: TokenEvent) -> None:
        now = time.monotonic()
        since = choice.times.note(event, now)
        count, made = len(event.token_ids), choice.sample.completion_tokens
        if made + count <= choice.times.measured:  # no token, or one that is made anew
            return
        choice.times.measured = made + count
        if made:
            self._recorder.inter_token.observe(since / count, count)
        else:
            self._recorder.time_to_first_token.observe(now - self._visit.arrived)

    def _render_all(self, events: list[TokenEvent]) -> tuple[bytes, ApiError | None]:
        """Bytes of the events up to the first that failed its sample, and that failure."""
        parts = []
        for event in events:
            if event.finish_reason == FINISH_ERROR:
                self._advance(event)
                return b"".join(parts), failure(event, self._wanted.structured)
            parts.append(self._render(event))
        return b"".join(parts), None

    def _render(self, event: TokenEvent) -> bytes:
        body = b""
        for choice, delta in self._advance(event):
            if choice.index not in self._greeted:
                body += self._greet(choice)
            if delta.finish_reason is not None:
                body += self._last(choice, delta, delta.finish_reason)
            elif delta.tokens:
                body += self._writers[choice.index].full(delta.text, **self._detail(choice, delta))
            elif delta.text:
                body += self._writers[choice.index].text(delta.text)
        return body

    def _greet(self, choice: Choice) -> bytes:
        """A choice's first event: the role in chat, the prompt when it is echoed."""
        self._greeted.add(choice.index)
        writer = self._writers[choice.index]
        ids = {"prompt_token_ids": choice.prompt.ids} if self._wanted.token_ids else {}
        if self._wanted.chat:
            return writer.role(ids)
        if not self._wanted.echo:
            return writer.full("", extra=ids) if ids else b""
        text, tokens = self.prompt_text(choice)
        logprobs = self._logprobs(choice, tokens, 0) if self._wanted.logprobs is not None else None
        return writer.full(text, logprobs=logprobs, extra=ids)

    def _last(self, choice: Choice, delta: Delta, reason: str | None) -> bytes:
        return self._writers[choice.index].full(
            delta.text,
            finish_reason=reason,
            stop_reason=delta.stop_reason,
            **self._detail(choice, delta),
        )

    def _detail(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        detail: dict[str, Any] = {}
        if self._wanted.logprobs is not None and delta.tokens:
            detail["logprobs"] = self._logprobs(choice, delta.tokens, self._echo_chars(choice))
        if self._wanted.token_ids:
            detail["extra"] = {"token_ids": [t.token_id for t in delta.tokens]}
        return detail

    def _logprobs(self, choice: Choice, tokens: Sequence[TokenText], offset: int) -> Any:
        top_n = self._wanted.logprobs or 0
        assert self._table is not None
        names = objects.TokenNames(self._table, as_ids=self._wanted.tokens_as_ids)
        if self._wanted.chat:
            return objects.chat_logprobs(tokens, top_n, names)
        return objects.completion_logprobs(tokens, top_n, names, offset)

    def _echo_chars(self, choice: Choice) -> int:
        return len(self.prompt_text(choice)[0]) if self._wanted.echo else 0

    def prompt_text(self, choice: Choice) -> tuple[str, list[TokenText]]:
        """The echoed prompt and its tokens, with log-probabilities if the engine sent them."""
        if choice.echoed is None:
            assert self._table is not None
            skip = choice.request.params.skip_special_tokens
            entries = choice.sample.prompt_logprobs
            choice.echoed = echo_tokens(choice.prompt, self._table, skip, entries)
        return choice.echoed

    def usage(self) -> dict[str, Any]:
        """Tokens of the whole request: each prompt once, every sample's output."""
        firsts = {id(c.prompt): c for c in reversed(self.choices)}.values()
        cached = sum(c.sample.cached_tokens for c in firsts)
        read = sum(len(c.prompt.ids) for c in firsts)
        written = sum(c.sample.completion_tokens for c in self.choices)
        return objects.usage(read, written, cached) | self.timing(cached)

    def timing(self, cached_tokens: int) -> dict[str, Any]:
        """What usage says of time, where that is asked for."""
        return {"timing": self._visit.report(cached_tokens)} if self._wanted.timing else {}

    def _usage_event(self) -> bytes:
        kind = "chat.completion.chunk" if self._wanted.chat else "text_completion"
        return objects.sse({**self._identity.fields(kind), "choices": [], "usage": self.usage()})

    def answer(self) -> bytes:
        """The whole answer once `collect` is done."""
        kind = "chat.completion" if self._wanted.chat else "text_completion"
        one = self._chat_choice if self._wanted.chat else self._text_choice
        body = self._identity.fields(kind)
        body["choices"] = [one(choice) for choice in self.choices]
        body["usage"] = self.usage()
        if self._wanted.chat:
            body.update(self._prompt_extras(self.choices[0]))
        return objects.to_json(body)

    def _chat_choice(self, choice: Choice) -> dict[str, Any]:
        out: dict[str, Any] = {
            "index": choice.index,
            "message": {"role": "assistant", "content": "".join(choice.parts), "refusal": None},
            "logprobs": None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self._wanted.logprobs is not None:
            out["logprobs"] = self._logprobs(choice, choice.tokens, 0)
        if self._wanted.token_ids:
            out["token_ids"] = [t.token_id for t in choice.tokens]
        return out

    def _text_choice(self, choice: Choice) -> dict[str, Any]:
        text, tokens = "".join(choice.parts), choice.tokens
        if self._wanted.echo:
            echoed, prompt_tokens = self.prompt_text(choice)
            for token in tokens:
                token.start += len(echoed)
            text, tokens = echoed + text, prompt_tokens + tokens
        out: dict[str, Any] = {
            "index": choice.index,
            "text": text,
            "logprobs": None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self._wanted.logprobs is not None:
            out["logprobs"] = self._logprobs(choice, tokens, 0)
        if self._wanted.token_ids:
            out["token_ids"] = [t.token_id for t in choice.tokens]
        return out | self._prompt_extras(choice)

    def _prompt_extras(self, choice: Choice) -> dict[str, Any]:
        extras: dict[str, Any] = {}
        if self._wanted.token_ids:
            extras["prompt_token_ids"] = choice.prompt.ids
        if self._wanted.prompt_logprobs is not None:
            extras["prompt_logprobs"] = objects.prompt_logprobs_by_id(
                choice.prompt.ids,
                choice.sample.prompt_logprobs or (),
                self._wanted.prompt_logprobs,
                self._table,
            )
        return extras
