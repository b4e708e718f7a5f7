"""`octavo serve`: spawns the engine core, serves HTTP, drains on SIGTERM.

The socket is bound first, so a taken port is known before a model is loaded, and answers 503 until
the model is ready. This process never imports jax.
"""

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import uvicorn

from octavo.serve import errors
from octavo.serve.app import create_app
from octavo.serve.client import EngineClient
from octavo.serve.config import EngineConfig, ServerConfig
from octavo.serve.context import ServerContext
from octavo.serve.core import resolve
from octavo.serve.http_bounds import bounded_http
from octavo.serve.prompts import Tokenizer
from octavo.serve.tls import tls_options

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
BACKLOG = 2048
KEEP_ALIVE_SECONDS = 75
# Time for answers that were just told to end to reach their clients.
CLOSING_SECONDS = 2.0
# After the engine's death, probes get this long to see /health fail before the process ends.
GRACE_SECONDS = 5.0
POLL_SECONDS = 0.05

log = logging.getLogger("octavo.server")


@dataclass(frozen=True)
class Parts:
    """Importable factories ("module:attribute") of the engine and the tokenizer.

    Both are called with the EngineConfig, the engine's in the core process.
    """

    engine: str = "octavo.serve.launch:build_engine"
    tokenizer: str = "octavo.serve.server:tokenizer_of"


def tokenizer_of(config: EngineConfig) -> Tokenizer | None:
    """The model's tokenizer, None when it has none."""
    from octavo.model.checkpoint.resolve import resolve_model
    from octavo.serve.tokenizer import load_tokenizer

    return load_tokenizer(config.tokenizer or resolve_model(config.model))


def run(engine_config: EngineConfig, config: ServerConfig, parts: Parts | None = None) -> int:
    """Serve until told to stop; the process's exit code.

    0 after SIGTERM or one SIGINT; 1 when the port is taken, the model doesn't load or the engine
    dies; 130 after a second SIGINT.
    """
    level = config.log_level.upper()
    logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s")
    try:
        listener = listen(config.host, config.port)
    except OSError as error:
        print(f"octavo: can't listen on {config.host}:{config.port}: {error}", file=sys.stderr)
        return EXIT_FAILED
    with listener:
        server = ApiServer(engine_config, config, parts or Parts(), listener)
        return asyncio.run(server.run(), loop_factory=_loop_factory())


def _loop_factory() -> type[asyncio.AbstractEventLoop]:
    try:
        import uvloop
    except ImportError:
        return asyncio.SelectorEventLoop
    return uvloop.Loop


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; OSError if the address is taken or unknown."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(address[:2], family=family, backlog=BACKLOG)


class QuietServer(uvicorn.Server):
    """uvicorn without its signal handlers: ours drain first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield


class ApiServer:
    """One API process and its engine core."""

    def __init__(
        self,
        engine_config: EngineConfig,
        config: ServerConfig,
        parts: Parts,
        listener: socket.socket,
    ) -> None:
        self._config = config
        self._parts = parts
        self._listener = listener
        self._client = EngineClient(parts.engine, engine_config, config.log_level)
        self._context = ServerContext(engine_config, config, self._client)
        self._code = EXIT_OK
        self._signals = 0
        self._stop = asyncio.Event()
        self._server = QuietServer(
            uvicorn.Config(
                create_app(self._context),
                http=bounded_http(config.receive_seconds),
                log_level="warning",
                access_log=False,
                lifespan="off",
                ws="none",
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=int(CLOSING_SECONDS),
                **tls_options(config),
            )
        )

    async def run(self) -> int:
        """Serve; the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        await self._client.start()
        serving = asyncio.create_task(self._server.serve(sockets=[self._listener]))
        loading = asyncio.create_task(self._load())
        ending = asyncio.create_task(self._end())
        try:
            await ending
            self._server.should_exit = True
            await serving
        finally:
            loading.cancel()
            await self._client.stop()
            self._context.close()
        return self._code

    async def _load(self) -> None:
        """Load the tokenizer beside the model, then announce or give up."""
        context, client = self._context, self._client
        scheme = "https" if self._config.tls_cert else "http"
        address = "{}://{}:{}".format(scheme, *self._listener.getsockname()[:2])
        log.info("listening on %s, loading %s", address, context.engine_config.model)
        loop = asyncio.get_running_loop()
        try:
            tokenizer = await loop.run_in_executor(context.executor, self._tokenizer)
        except Exception as error:
            self._fail(f"the tokenizer can't be loaded: {error}")
            return
        await client.settled.wait()
        if client.failure is not None:
            self._fail(f"the engine did not start: {client.failure}")
            return
        context.attach_tokenizer(tokenizer)
        print(f"octavo: serving {', '.join(context.names)} on {address}", flush=True)
        await client.dead.wait()
        await asyncio.sleep(GRACE_SECONDS)
        self._code = EXIT_FAILED
        self._stop.set()

    def _tokenizer(self) -> Tokenizer | None:
        return resolve(self._parts.tokenizer)(self._context.engine_config)

    def _fail(self, message: str) -> None:
        print(f"octavo: {message}", file=sys.stderr, flush=True)
        self._code = EXIT_FAILED
        self._stop.set()

    def _on_signal(self, number: signal.Signals) -> None:
        self._context.draining = True
        self._signals += number == signal.SIGINT
        if self._signals > 1:
            self._code = EXIT_INTERRUPTED
            self._server.force_exit = True
            self._client.kill()
        self._stop.set()

    async def _end(self) -> None:
        """Wait for the order to stop, then for the running requests or the deadline."""
        await self._stop.wait()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._config.drain_seconds
        while self._client.in_flight and loop.time() < deadline and not self._server.force_exit:
            await asyncio.sleep(POLL_SECONDS)
        self._client.fail_all(errors.unavailable("the server is shutting down"))
