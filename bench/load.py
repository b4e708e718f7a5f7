"""Sends a workload to a server from several processes, so that the client is not the bottleneck."""

import asyncio
import json
import multiprocessing
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection as Pipe
from typing import Any
from urllib.parse import urlsplit

from octavo.bench.sse_client import Connection, Exchange
from octavo.bench.workload import Asked
from octavo.serve.event_loop import loop_factory
from octavo.serve.flags import UsageError

LEAD_SECONDS = 0.3
"""Between the order to start and the first request, so that every process is ready."""


@dataclass(frozen=True)
class Target:
    """Where requests go and what each of them says beside its prompt.

    `path` is the completions endpoint; requests with messages go to its chat sibling.
    """

    url: str
    model: str = ""
    path: str = "/v1/completions"
    api_key: str = ""
    extra: dict[str, Any] = field(default_factory=dict)
    timeout: float = 300.0

    @property
    def address(self) -> tuple[str, int]:
        """Host and port; UsageError unless the URL is http://host[:port]."""
        parts = urlsplit(self.url)
        if parts.scheme != "http" or not parts.hostname:
            raise UsageError(f"url must be http://host:port, not {self.url!r}")
        return parts.hostname, parts.port or 80

    def payload(self, asked: Asked) -> bytes:
        """The HTTP request: greedy, streamed, to the full max_tokens."""
        body: dict[str, Any] = {
            **({"model": self.model} if self.model else {}),
            **asked.source,
            "max_tokens": asked.max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.extra,
        }
        data = json.dumps(body).encode()
        path = urlsplit(self.url).path.rstrip("/") + self.path
        if "messages" in asked.source:
            path = path.replace("/completions", "/chat/completions")
        host, port = self.address
        key = f"Authorization: Bearer {self.api_key}\r\n" if self.api_key else ""
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
            f"Accept: text/event-stream\r\n{key}Content-Length: {len(data)}\r\n\r\n"
        )
        return head.encode() + data


class Sender:
    """One process's connections to the target."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._idle: list[Connection] = []

    async def send(self, payload: bytes, exchange: Exchange) -> None:
        """Run one exchange; its failure is noted in it, never raised."""
        exchange.sent = time.monotonic()
        exchange.due = exchange.due or exchange.sent
        try:
            async with asyncio.timeout(self._target.timeout):
                await self._exchange(payload, exchange)
        except TimeoutError:
            exchange.error = f"no answer within {self._target.timeout:g} s"
        except OSError as error:
            exchange.error = f"can't connect: {error}"

    async def _exchange(self, payload: bytes, exchange: Exchange) -> None:
        while self._idle:
            connection = self._idle.pop()
            if not connection.usable:
                continue
            await self._run(connection, payload, exchange)
            if connection.answered:
                return
            # The server closed a kept connection just as it was taken up: not an answer.
            exchange.error = ""
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(Connection, *self._target.address)
        await self._run(connection, payload, exchange)

    async def _run(self, connection: Connection, payload: bytes, exchange: Exchange) -> None:
        try:
            await connection.run(payload, exchange)
        except BaseException:
            connection.close()
            raise
        if connection.usable:
            self._idle.append(connection)

    def close(self) -> None:
        """Drop the kept connections."""
        for connection in self._idle:
            connection.close()


@dataclass(frozen=True)
class Share:
    """What one process sends: requests with the second each is due, or `at_once` in flight."""

    target: Target
    asked: list[Asked]
    due: list[float]
    at_once: int


async def _send_share(share: Share, pipe: Pipe) -> list[Exchange]:
    payloads = [share.target.payload(asked) for asked in share.asked]
    exchanges = [Exchange(asked.index, asked.max_tokens) for asked in share.asked]
    sender = Sender(share.target)
    pipe.send("ready")
    start = pipe.recv()
    await _until(start)
    if share.at_once:
        todo = iter(zip(payloads, exchanges))

        async def lane() -> None:
            for payload, exchange in todo:
                await sender.send(payload, exchange)

        await asyncio.gather(*[lane() for _ in range(share.at_once)])
    else:

        async def one(payload: bytes, exchange: Exchange, due: float) -> None:
            exchange.due = start + due
            await _until(exchange.due)
            await sender.send(payload, exchange)

        await asyncio.gather(*map(one, payloads, exchanges, share.due))
    sender.close()
    return exchanges


async def _until(moment: float) -> None:
    await asyncio.sleep(max(0.0, moment - time.monotonic()))


def _process(share: Share, pipe: Pipe) -> None:
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        pipe.send(runner.run(_send_share(share, pipe)))
    pipe.close()


@dataclass(frozen=True)
class Outcome:
    """Every exchange of a run, when it started, and how many were in flight at most (0: open)."""

    start: float
    exchanges: list[Exchange]
    processes: int
    at_once: int


def run_load(
    target: Target,
    asked: Sequence[Asked],
    *,
    due: Sequence[float] | None,
    at_once: int = 0,
    processes: int = 8,
) -> Outcome:
    """Send every request, at its `due` second or `at_once` at a time; wait for the last answer."""
    processes = max(1, min(processes, len(asked), at_once or len(asked)))
    context = multiprocessing.get_context("spawn")
    pipes, workers = [], []
    for k in range(processes):
        mine, theirs = context.Pipe()
        lanes = (at_once + processes - 1 - k) // processes
        share = Share(
            target, list(asked[k::processes]), list(due[k::processes] if due else []), lanes
        )
        worker = context.Process(target=_process, args=(share, theirs), daemon=True)
        worker.start()
        theirs.close()
        pipes.append(mine)
        workers.append(worker)
    try:
        for pipe in pipes:
            pipe.recv()
        start = time.monotonic() + LEAD_SECONDS
        for pipe in pipes:
            pipe.send(start)
        exchanges = [exchange for pipe in pipes for exchange in pipe.recv()]
    except EOFError:
        raise RuntimeError("a client process ended early") from None
    finally:
        for worker in workers:
            worker.join(1)
            worker.kill()
    return Outcome(start, exchanges, processes, at_once)
