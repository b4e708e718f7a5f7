"""`octavo batch`: a file of requests through the server's own endpoints, without a socket.

Every line is answered by the application that `octavo serve` runs, so bodies, checks and answers
are the same. Results are appended as they come; a run that is killed goes on where it was.
"""

import asyncio
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import msgspec
from fastapi import FastAPI
from tqdm import tqdm

from octavo.serve import batchfile
from octavo.serve.api import Parts
from octavo.serve.app import create_app
from octavo.serve.batchfile import RESULT_ID, Line
from octavo.serve.client import EngineClient
from octavo.serve.config import EngineConfig, ServerConfig
from octavo.serve.context import ServerContext
from octavo.serve.core import resolve
from octavo.serve.supervisor import CoreSupervisor

BUSY = (429, 503)
"""Statuses of a request that was not taken: it is sent again."""
RETRY_SECONDS = 0.2
TERMINAL_SECONDS, LOG_SECONDS = 0.1, 10.0
"""Between two looks of the progress bar, where somebody watches and where a file grows."""


def engine(config: EngineConfig) -> Any:
    """An engine for throughput: nobody waits for a first token."""
    from octavo.serve.launch import build_engine

    return build_engine(config, serving=False)


OFFLINE = Parts(engine="octavo.serve.offline:engine")


class _Usage(msgspec.Struct):
    """Tokens of an answer; the Responses API has words of its own for them."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0


class _Answer(msgspec.Struct):
    usage: _Usage = msgspec.field(default_factory=_Usage)


@dataclass
class Report:
    """What a run did.

    Attributes:
        skipped: lines that had a result before, of which `skipped_failed` are failures.
    """

    succeeded: int = 0
    failed: int = 0
    skipped: int = 0
    skipped_failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    started: float = field(default_factory=time.monotonic)

    def fields(self) -> dict[str, Any]:
        """The summary line."""
        seconds = time.monotonic() - self.started
        return {
            "succeeded": self.succeeded,
            "failed": self.failed,
            "skipped": self.skipped,
            "skipped_failed": self.skipped_failed,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "seconds": round(seconds, 3),
            "output_tok_s": round(self.completion_tokens / max(seconds, 1e-9), 1),
        }


class Batch:
    """One run over an input file, with its results appended to `out`."""

    def __init__(self, app: FastAPI, client: EngineClient, out: IO[bytes], bar: tqdm) -> None:
        self._app, self._client, self._out, self._bar = app, client, out, bar
        self.report = Report()

    async def run(self, lines: Iterator[Line], done: dict[str | int, bool], at_once: int) -> None:
        """Send what is not done, at most `at_once` at a time; ValueError if the engine ends."""

        async def lane() -> None:
            for line in lines:
                if line.key in done:
                    self.report.skipped += 1
                    self.report.skipped_failed += done[line.key]
                    self._bar.update()
                else:
                    await self._answer(line)

        async with asyncio.TaskGroup() as group:
            for _ in range(at_once):
                group.create_task(lane())

    async def _answer(self, line: Line) -> None:
        name = f"{RESULT_ID}{uuid.uuid4().hex}"
        if line.problem:
            self.report.failed += 1
            self._write(batchfile.refusal(line, name))
            return
        status, body = await post(self._app, line.url, line.body)
        while status in BUSY and self._client.failure is None:
            await asyncio.sleep(RETRY_SECONDS)
            status, body = await post(self._app, line.url, line.body)
        if self._client.failure is not None:
            # No record: the lines in flight are run again by the next start.
            raise ValueError(f"the engine ended, run again to go on: {self._client.failure}")
        if status == 200:
            usage = msgspec.json.decode(body, type=_Answer).usage
            self.report.succeeded += 1
            self.report.prompt_tokens += usage.prompt_tokens + usage.input_tokens
            self.report.completion_tokens += usage.completion_tokens + usage.output_tokens
        else:
            self.report.failed += 1
        self._write(batchfile.result(line, name, status, body))

    def _write(self, record: bytes) -> None:
        self._out.write(record)
        self._out.flush()
        self._bar.set_postfix_str(f"{self.report.fields()['output_tok_s']} tok/s", refresh=False)
        self._bar.update()


async def post(app: FastAPI, path: str, body: bytes) -> tuple[int, bytes]:
    """Status and body of one POST to an ASGI application."""
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json")],
        "client": None,
        "server": None,
    }
    incoming = [{"type": "http.request", "body": body, "more_body": False}]
    status, parts = 500, []

    async def receive() -> dict[str, Any]:
        if incoming:
            return incoming.pop()
        return await asyncio.get_running_loop().create_future()  # the caller never hangs up

    async def send(message: Any) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            parts.append(message.get("body", b""))

    try:
        await app(scope, receive, send)
    except Exception:  # the application has answered 500 and logged it
        status = 500
    return status, b"".join(parts)


async def run_batch(
    config: EngineConfig,
    source: Path,
    target: Path,
    *,
    names: tuple[str, ...] = (),
    at_once: int = 512,
    parts: Parts = OFFLINE,
) -> Report:
    """Answer every line of `source` that `target` has no result of; what was done.

    Raises ValueError if the engine can't be started or ends, or `target` is no file of results.
    """
    done = batchfile.resume(target)
    with source.open("rb") as file:
        total = sum(1 for raw in file if raw.strip())
    target.open("ab").close()  # whether it can be written is known before a model is loaded
    # The engine's end ends the run: its lines are left to the next one.
    settings = ServerConfig(served_model_name=names, max_engine_restarts=0, log_level="warning")
    client = EngineClient(b"batch")
    # No environment: its key is for those who come by HTTP.
    context = ServerContext(config, settings, client, environment={})
    supervisor = CoreSupervisor(parts.engine, config, settings, client.on_news)
    supervisor.start()
    try:
        await _load(supervisor, context, parts)
        often = TERMINAL_SECONDS if sys.stderr.isatty() else LOG_SECONDS
        bar = tqdm(total=total, unit="request", desc=target.name, mininterval=often)
        with target.open("ab") as out, bar:
            batch = Batch(create_app(context), client, out, bar)
            try:
                await batch.run(batchfile.read_lines(source), done, at_once)
            except ExceptionGroup as group:
                raise group.exceptions[0] from None
            return batch.report
    finally:
        client.disconnect()
        await supervisor.stop()
        context.close()


async def _load(supervisor: CoreSupervisor, context: ServerContext, parts: Parts) -> None:
    loop = asyncio.get_running_loop()
    make = resolve(parts.tokenizer)
    tokenizer = await loop.run_in_executor(context.executor, make, context.engine_config)
    if not await supervisor.started():
        raise ValueError(f"the engine did not start: {supervisor.news.reason}")
    context.attach_tokenizer(tokenizer)
