"""The HTTP side of one process: serves the application on a socket, drains, ends."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator
from dataclasses import dataclass

import uvicorn

from octavo.model.checkpoint.resolve import ModelNotFoundError, resolve_model
from octavo.serve import errors
from octavo.serve.app import create_app
from octavo.serve.client import EngineClient
from octavo.serve.config import EngineConfig, ServerConfig
from octavo.serve.context import ServerContext
from octavo.serve.core import freeze_loaded, resolve
from octavo.serve.http_bounds import bounded_http
from octavo.serve.prompts import Tokenizer
from octavo.serve.tls import tls_options
from octavo.serve.wire import EngineNews

KEEP_ALIVE_SECONDS = 75
# Time for answers that were just told to end to reach their clients.
CLOSING_SECONDS = 2.0
POLL_SECONDS = 0.05

log = logging.getLogger("octavo.server")


@dataclass(frozen=True)
class Parts:
    """Importable factories ("module:attribute") of the engine and the tokenizer.

    Both are called with the EngineConfig, the engine's in the core process.
    """

    engine: str = "octavo.serve.launch:build_engine"
    tokenizer: str = "octavo.serve.api:tokenizer_of"


def tokenizer_of(config: EngineConfig) -> Tokenizer | None:
    """The model's tokenizer, None when it has none."""
    from octavo.serve.tokenizer_files import load_tokenizer

    return load_tokenizer(config.tokenizer or resolve_model(config.model))


class QuietServer(uvicorn.Server):
    """uvicorn without its signal handlers: ours drain first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield


class ApiServer:
    """Answers HTTP on `listener`; `identity` is its name at the engine core, unique there.

    Attributes:
        context: what the routes share.
    """

    def __init__(
        self,
        engine_config: EngineConfig,
        config: ServerConfig,
        parts: Parts,
        listener: socket.socket,
        identity: bytes,
    ) -> None:
        self._config = config
        self._parts = parts
        self._listener = listener
        self._client = EngineClient(identity)
        self._ending = asyncio.Event()
        self.context = ServerContext(engine_config, config, self._client)
        if config.api_processes > 1:
            self.context.collector.process = identity.decode()
        self._server = QuietServer(
            uvicorn.Config(
                create_app(self.context),
                http=bounded_http(config.receive_seconds, config.send_seconds),
                log_config=None,
                log_level="error",
                access_log=False,
                lifespan="off",
                ws="none",
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=int(CLOSING_SECONDS),
                **tls_options(config),
            )
        )

    async def loaded(self) -> None:
        """Load the tokenizer; RuntimeError that says what can't be found or read."""
        loop = asyncio.get_running_loop()
        try:
            tokenizer = await loop.run_in_executor(self.context.executor, self._tokenizer)
            self.context.attach_tokenizer(tokenizer)
        except ModelNotFoundError as error:
            raise RuntimeError(str(error)) from error
        except Exception as error:
            raise RuntimeError(f"the tokenizer can't be loaded: {error}") from error
        freeze_loaded()

    async def run(self) -> None:
        """Serve until `drain` or `end`, and end what still runs at the deadline.

        Raises what ends the HTTP server before.
        """
        serving = asyncio.create_task(self._server.serve(sockets=[self._listener]))
        serving.add_done_callback(lambda _: self._ending.set())  # it fails alone, never unseen
        try:
            await self._ending.wait()
            await self._drained()
            self._client.closing = True
            self._client.fail_all(errors.unavailable("the server is shutting down"))
            self._server.should_exit = True
            await serving
        finally:
            self._client.disconnect()
            self.context.close()

    def on_news(self, news: EngineNews) -> None:
        """Hear of the engine's life."""
        self._client.on_news(news)

    def drain(self) -> None:
        """Take no new requests; end when the running ones have, or at the deadline."""
        self.context.draining = True
        self._ending.set()

    def end(self) -> None:
        """End at once."""
        self._server.force_exit = True
        self._ending.set()

    def _tokenizer(self) -> Tokenizer | None:
        return resolve(self._parts.tokenizer)(self.context.engine_config)

    async def _drained(self) -> None:
        """Until every answer is out, those included that were let in and not submitted yet."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._config.drain_seconds
        while self._client.in_flight or self._server.server_state.tasks:
            if self._server.force_exit:
                return
            if loop.time() >= deadline:
                log.warning("%d samples still ran at the drain's deadline", self._client.in_flight)
                return
            await asyncio.sleep(POLL_SECONDS)
