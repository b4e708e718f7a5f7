"""`octavo serve`: binds the port, keeps the engine core running, serves HTTP, drains on SIGTERM.

The socket is bound first, so a taken port is known before a model is loaded, and answers 503 until
the model is ready. With one API process everything but the engine runs in this process; with
several it only supervises (`fleet.py`). It never imports jax.
"""

import asyncio
import errno
import logging
import signal
import socket
import sys

from octavo.serve import logs
from octavo.serve.api import ApiServer, Parts
from octavo.serve.auth import KeyRing
from octavo.serve.config import EngineConfig, ServerConfig
from octavo.serve.event_loop import loop_factory
from octavo.serve.fleet import Fleet
from octavo.serve.supervisor import CoreSupervisor
from octavo.serve.tls import tls_options
from octavo.serve.wire import EngineNews

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
BACKLOG = 2048
# After the engine's end, probes get this long to see /health fail before the process ends.
GRACE_SECONDS = 5.0

log = logging.getLogger("octavo.server")


def run(engine_config: EngineConfig, config: ServerConfig, parts: Parts | None = None) -> int:
    """Serve until told to stop; the process's exit code.

    0 after SIGTERM or one SIGINT; 1 when the port is taken, the model doesn't load or the engine
    has ended for good (max_engine_restarts=0); 130 after a second SIGINT. ValueError or OSError for
    unusable certificates or keys.
    """
    tls_options(config)
    KeyRing(config)
    logs.configure(config.log_level)
    try:
        listeners = listen(config.host, config.port, config.api_processes)
    except OSError as error:
        reason = str(error)
        if error.errno == errno.EADDRINUSE:
            reason = "it is in use; choose another with --port"
        print(f"octavo: can't listen on {config.host}:{config.port}: {reason}", file=sys.stderr)
        return EXIT_FAILED

    async def serve() -> int:
        return await Server(engine_config, config, parts or Parts(), listeners).run()

    try:
        return asyncio.run(serve(), loop_factory=loop_factory())
    finally:
        for listener in listeners:
            listener.close()


def listen(host: str, port: int, count: int = 1) -> list[socket.socket]:
    """`count` listening sockets on one address, among which the kernel spreads connections.

    OSError if the address is taken or unknown.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    shared = count > 1
    if shared and port:
        # Another server's port must be refused, so the address is tried alone before it is shared.
        socket.create_server(address[:2], family=family).close()
    listeners: list[socket.socket] = []
    for _ in range(count):
        listeners.append(
            socket.create_server(address[:2], family=family, backlog=BACKLOG, reuse_port=shared)
        )
        address = listeners[0].getsockname()
    return listeners


class Server:
    """The engine's supervisor and what answers HTTP, until a signal or the engine's final end."""

    def __init__(
        self,
        engine_config: EngineConfig,
        config: ServerConfig,
        parts: Parts,
        listeners: list[socket.socket],
    ) -> None:
        scheme = "https" if config.tls_cert else "http"
        host, port = listeners[0].getsockname()[:2]
        self._address = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
        self._model = engine_config.model
        self._drain = config.drain_seconds
        self._names = ", ".join(config.served_model_name or (engine_config.model,))
        self._supervisor = CoreSupervisor(parts.engine, engine_config, config, self._publish)
        self._front: ApiServer | Fleet
        if config.api_processes == 1:
            self._front = ApiServer(engine_config, config, parts, listeners[0], b"api")
        else:
            gone = self._supervisor.forget
            self._front = Fleet(engine_config, config, parts, listeners, gone)
        self._code = EXIT_OK
        self._interrupts = 0

    async def run(self) -> int:
        """Serve; the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup's
                loop.add_signal_handler(number, self._on_signal, number)
        log.info("listening on %s, loading %s", self._address, self._model)
        self._supervisor.start()
        watching = [asyncio.create_task(self._announce()), asyncio.create_task(self._give_up())]
        try:
            await self._front.run()
        finally:
            for task in watching:
                task.cancel()
            await self._supervisor.stop()
        log.info("ended, exit code %d", self._code)
        return self._code

    def _publish(self, news: EngineNews) -> None:
        self._front.on_news(news)

    async def _announce(self) -> None:
        try:
            await self._front.loaded()
        except Exception as error:
            self._fail(str(error))
            return
        await self._supervisor.ready.wait()
        logs.write_line(logs.STDOUT, f"octavo: serving {self._names} on {self._address}")

    async def _give_up(self) -> None:
        await self._supervisor.given_up.wait()
        reason = self._supervisor.news.reason
        if not self._supervisor.ready.is_set():
            self._fail(f"the engine did not start: {reason}")
            return
        await asyncio.sleep(GRACE_SECONDS)
        self._fail(f"the engine has ended: {reason}")

    def _fail(self, message: str) -> None:
        logs.write_line(logs.STDERR, f"octavo: {message}")
        self._code = EXIT_FAILED
        self._front.drain()

    def _on_signal(self, number: signal.Signals) -> None:
        self._interrupts += number == signal.SIGINT
        if self._interrupts > 1:
            self._code = EXIT_INTERRUPTED
            self._supervisor.kill()
            self._front.end()
            log.info("%s again: ending at once", number.name)
        else:
            more = "; a second one ends at once" if number == signal.SIGINT else ""
            words = "%s: draining, requests that run have %g s to end%s"
            log.info(words, number.name, self._drain, more)
        self._front.drain()
