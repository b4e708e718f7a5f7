"""What the routes share: settings, the engine client, the tokenizer, keys, metrics, traces."""

import asyncio
import hashlib
import os
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from fastapi import Request, Response

import octavo.serve
from octavo.sampling.shown import shown
from octavo.serve import errors
from octavo.serve.auth import KeyRing
from octavo.serve.chat_formats import ChatFormats, chat_formats
from octavo.serve.client import EngineClient
from octavo.serve.config import EngineConfig, ServerConfig
from octavo.serve.detokenize import TokenTable
from octavo.serve.errors import ApiError
from octavo.serve.metrics import Recorder, ServerCollector
from octavo.serve.objects import Identity
from octavo.serve.prompts import PromptEncoder, Tokenizer
from octavo.serve.timing import Visit
from octavo.serve.tracing import Tracing, tracing_to
from octavo.serve.wire import Ready

TOKENIZER_THREADS = 2
HEAVY_THREADS = 2
HEAVY_BYTES = 64 << 10
"""Requests from this size on are read, rendered and tokenised in threads of their own."""


@dataclass
class ServerContext:
    """State of one API process.

    Attributes:
        names: model names clients may use; the first is the one answers carry.
        encoder, table, formats: set by `attach_tokenizer` once the tokenizer is loaded.
        draining: no new requests are taken.
        environment: where a key may be.
        keys: API keys and their use.
        tracing: where spans go; None without otlp_endpoint.
        total: sums what all API processes have recorded.
    """

    engine_config: EngineConfig
    config: ServerConfig
    client: EngineClient
    recorder: Recorder = field(default_factory=Recorder)
    draining: bool = False
    tokenizer_ready: bool = False
    table: TokenTable | None = None
    formats: ChatFormats = field(default_factory=ChatFormats)
    created: int = field(default_factory=lambda: int(time.time()))
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)

    def __post_init__(self) -> None:
        self.version = octavo.__version__
        self.names = tuple(self.config.served_model_name) or (self.engine_config.model,)
        digest = hashlib.sha256(repr(self.engine_config).encode()).hexdigest()
        self.config_hash = digest[:12]
        self.executor = ThreadPoolExecutor(TOKENIZER_THREADS, thread_name_prefix="tokenizer")
        self.heavy = ThreadPoolExecutor(HEAVY_THREADS, thread_name_prefix="heavy")
        self.encoder = PromptEncoder(None, self.threads_for)
        self.keys = KeyRing(self.config, self.environment)
        self.collector = ServerCollector(self.names[0])
        self.total: Callable[[], Awaitable[Recorder]] = self._own_total
        endpoint = self.config.otlp_endpoint
        self.tracing: Tracing | None = tracing_to(endpoint) if endpoint else None

    def attach_tokenizer(self, tokenizer: Tokenizer | None) -> None:
        """Take the loaded tokenizer, or None for a model without one."""
        self.encoder = PromptEncoder(tokenizer, self.threads_for)
        self.table = TokenTable(tokenizer) if tokenizer else None
        if tokenizer is not None and self.table is not None:
            self.formats = chat_formats(self.config, tokenizer, self.table)
        self.tokenizer_ready = True

    def threads_for(self, size: int) -> ThreadPoolExecutor:
        """The threads for work on so many bytes: nobody's small request waits for a large one."""
        return self.executor if size < HEAVY_BYTES else self.heavy

    async def off_loop[T](self, size: int, work: Callable[[], T]) -> T:
        """What `work` on so many bytes returns; if they are many, not on the event loop."""
        if size < HEAVY_BYTES:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self.heavy, work)

    @property
    def fingerprint(self) -> str:
        """Version, settings and weights of what answers now."""
        return self.identity("").under(self.client.state.weights_epoch).fingerprint

    def measured(self) -> Recorder:
        """What this process has recorded until now."""
        self.recorder.note_keys(self.keys)
        return self.recorder

    async def _own_total(self) -> Recorder:
        return self.measured()

    @property
    def status(self) -> str:
        """ "loading", "ready", "paused", "draining", "stuck", "restarting" or "failed"."""
        client = self.client
        if client.news is not None and client.news.phase == "failed":
            return "failed"
        if client.ready is None or not self.tokenizer_ready:
            return "loading"
        if not client.up:
            return "restarting"
        if client.stuck_for() > self.config.watchdog_seconds:
            return "stuck"
        if self.draining:
            return "draining"
        return "paused" if client.state.paused else "ready"

    def require_ready(self) -> Ready:
        """The loaded model; ApiError 503 while loading, draining or without an engine."""
        status, client = self.status, self.client
        if status == "failed":
            raise errors.unavailable(f"the engine is down: {client.failure}", client.retry_after)
        if status == "restarting":
            raise errors.unavailable("the engine is restarting", client.retry_after)
        if status == "stuck":
            raise errors.unavailable("the engine does not answer", client.retry_after)
        if status == "loading":
            raise errors.unavailable("the model is loading")
        if self.draining:
            raise errors.unavailable("the server is shutting down")
        assert client.ready is not None
        return client.ready

    def identity(self, prefix: str, own: str | None = None) -> Identity:
        """What a new answer says of itself, but for its weights.

        Its id is `prefix` and the client's `own`, or else one that no other answer has.
        """
        name = f"{prefix}{own or uuid.uuid4().hex}"
        software = f"octavo-{self.version}-{self.config_hash}"
        return Identity(name, int(time.time()), self.names[0], software)

    def respond(self, error: ApiError, path: str) -> Response:
        """The answer to a request to `path` that failed, counted."""
        self.recorder.responses[error.status] += 1
        body, headers = error.body_for(path), error.headers()
        return Response(body, error.status, headers=headers, media_type="application/json")

    def close(self) -> None:
        """Stop the threads, send the last spans."""
        self.executor.shutdown(wait=False, cancel_futures=True)
        self.heavy.shutdown(wait=False, cancel_futures=True)
        if self.tracing is not None:
            self.tracing.close()

    def check_model(self, name: str | None) -> None:
        """ApiError 404 for a model that isn't served; none means the one that is."""
        if name is not None and name not in self.names:
            raise errors.unknown_model(name, self.names)


def context_of(request: Request) -> ServerContext:
    """The context of the app that handles `request`."""
    return request.app.state.context


def visit_of(request: Request) -> Visit:
    """The visit that the gate began for `request`."""
    return request.state.visit


async def read_body(request: Request, config: ServerConfig) -> bytes:
    """The request body.

    Raises:
        ApiError: 415 if it is compressed, 413 as soon as it is known to be over max_body_bytes,
            408 when it takes longer than receive_seconds to arrive.
    """
    try:
        async with asyncio.timeout(config.receive_seconds):
            return await _read_body(request, config.max_body_bytes)
    except TimeoutError:
        raise errors.body_too_slow(config.receive_seconds) from None


async def _read_body(request: Request, limit: int) -> bytes:
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.strip().lower() not in ("", "identity"):
        raise errors.body_encoded(encoding)
    declared = request.headers.get("content-length", "0")
    # Any number of zeros may lead it, and int() refuses thousands of digits.
    if declared.isdigit() and int(declared.lstrip("0") or "0") > limit:
        raise errors.body_too_large(limit)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise errors.body_too_large(limit)
    return bytes(body)


def check_vocabulary(ids: Sequence[int], name: str, vocab_size: int) -> None:
    """ApiError 400 unless the ids in the field `name`, at least one, are the model's own."""
    low, high = min(ids), max(ids)
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        limit = f"token ids are 0 .. {vocab_size - 1}, not {shown(wrong)}"
        raise errors.invalid(f"{name} holds an id outside the vocabulary: {limit}", name)


def check_length(
    prompt_tokens: int,
    max_tokens: int | None,
    default: int,
    limit: int,
    name: str = "max_tokens",
) -> int:
    """The tokens to generate; ApiError 400 when prompt and answer don't fit the context.

    `name` is the field that asks for `max_tokens`; None asks for `default`, shortened to what is
    left, at least 1.
    """
    if prompt_tokens == 0:
        raise errors.invalid("prompt must hold at least one token", "prompt")
    if max_tokens is not None and max_tokens < 0:
        raise errors.invalid(f"{name} must be at least 0, not {shown(max_tokens)}", name)
    wanted = max(1, min(default, limit - prompt_tokens)) if max_tokens is None else max_tokens
    if prompt_tokens + wanted > limit:
        raise ApiError(
            400,
            f"the prompt has {prompt_tokens} tokens and {name} is {wanted}: together "
            f"{prompt_tokens + wanted}, but the context holds {limit}",
            param=name if prompt_tokens < limit else "prompt",
            code="context_length_exceeded",
        )
    return wanted
