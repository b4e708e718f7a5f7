"""The soak's clients: those that read, those that read slowly, and those that go away."""

import asyncio
import random
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo.bench.soak_cases import Case
from octavo.bench.soak_judge import content, same
from octavo.bench.sse_client import ResponseParser

READ_SECONDS = 120.0
"""An answer that takes longer counts as lost."""

SLOW_BYTES, SLOW_SECONDS = 512, 0.02
MANNERS = ("reads", "reads slowly", "hangs up", "sends half")
WEIGHTS = (77, 6, 12, 5)
BAD_SHARE = 0.1


@dataclass
class Tally:
    """What became of the requests.

    Attributes:
        ends: their number by what was done with them.
        faults: answers that were lost, wrong or another request's.
    """

    ends: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


async def answer_of(case: Case, port: int, *, stream: bool = False, slowly: bool = False) -> Any:
    """Content of a case's answer; ValueError or OSError unless it comes whole, with its status."""
    reader, writer = await _connect(port, small=slowly)
    parser, body = ResponseParser(), b""
    try:
        writer.write(case.payload(port, stream=stream))
        async with asyncio.timeout(READ_SECONDS):
            while data := await reader.read(SLOW_BYTES if slowly else 1 << 16):
                body += b"".join(parser.feed(data))
                if slowly:
                    await asyncio.sleep(SLOW_SECONDS)
    finally:
        writer.close()
    if not parser.done:
        raise ValueError(f"{case.name}: the answer was cut: {body[-300:]!r}")
    if parser.status != case.status:
        raise ValueError(f"{case.name}: {parser.status} instead of {case.status}: {body[:300]!r}")
    return content(case, body, streamed=stream)


async def _connect(
    port: int, *, small: bool = False
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection; `small` takes little at a time, so that what isn't read waits at the server."""
    raw = socket.socket()
    raw.setblocking(False)
    if small:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    await asyncio.get_running_loop().sock_connect(raw, ("127.0.0.1", port))
    return await asyncio.open_connection(sock=raw, limit=SLOW_BYTES if small else 1 << 16)


async def _go_away(case: Case, port: int, rng: random.Random, *, half: bool) -> None:
    """Send a request, or part of it, read for a while, and be gone."""
    payload = case.payload(port, stream=case.streams and rng.random() < 0.7)
    reader, writer = await _connect(port)
    try:
        writer.write(payload[: rng.randrange(len(payload))] if half else payload)
        async with asyncio.timeout(rng.random() ** 2):
            for _ in range(rng.randrange(6)):
                await reader.read(rng.randrange(1, 2000))
    except TimeoutError:
        pass
    finally:
        if rng.random() < 0.5:
            writer.transport.abort()
        else:
            writer.close()


class Soak:
    """Requests drawn from a seed; their answers are compared with `expected`, by case name.

    Attributes:
        tally: what became of them.
        done: how many have been answered or given up.
    """

    def __init__(
        self, port: int, good: Sequence[Case], bad: Sequence[Case], expected: dict[str, Any]
    ) -> None:
        self._port = port
        self._good, self._bad = good, bad
        self._expected = expected
        self.tally = Tally()
        self.done = 0

    async def run(self, count: int, at_once: int, seed: int) -> None:
        """Send `count` more, `at_once` at a time, and wait for what was asked."""
        todo = iter(range(self.done, self.done + count))

        async def lane() -> None:
            for serial in todo:
                await self._one(random.Random(f"{seed} {serial}"))
                self.done += 1

        await asyncio.gather(*[lane() for _ in range(at_once)])

    async def _one(self, rng: random.Random) -> None:
        case = rng.choice(self._bad if rng.random() < BAD_SHARE else self._good)
        (manner,) = rng.choices(MANNERS, WEIGHTS)
        stream = case.streams and rng.random() < 0.5
        try:
            if manner in ("hangs up", "sends half"):
                await _go_away(case, self._port, rng, half=manner == "sends half")
                self.tally.ends[manner] += 1
                return
            slowly = manner == "reads slowly"
            found = await answer_of(case, self._port, stream=stream, slowly=slowly)
        except (OSError, ValueError, KeyError) as error:
            self.tally.faults.append(f"{case.name}: {type(error).__name__}: {error}")
            return
        self._judge(case, found, "refused" if case.status != 200 else manner)

    def _judge(self, case: Case, found: Any, end: str) -> None:
        wanted = self._expected[case.name]
        if same(found, wanted):
            self.tally.ends[end] += 1
            return
        others = [name for name, one in self._expected.items() if same(found, one)]
        whose = f" (that is the answer to {others})" if others else ""
        self.tally.faults.append(f"{case.name}: {found} instead of {wanted}{whose}")
