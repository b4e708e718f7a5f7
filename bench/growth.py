"""How memory grows with the requests that have been answered, and what of it is a leak."""

import asyncio
import statistics
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from octavo.bench.report import rounded
from octavo.bench.server_tree import ServerTree

MIB = 1 << 20
MIB_PER_1000 = 1.0
"""Growth at most, MiB per 1,000 requests."""

FURTHER = 3
"""Windows at most that are watched behind one that grew too much."""

SAMPLES, POLL_SECONDS = 400, 0.005

type Sizes = list[tuple[int, dict[str, float]]]
"""Requests answered so far, and resident bytes by kind of process."""


def slope(window: Sequence[tuple[float, float]]) -> float:
    """Least-squares growth in MiB per 1,000 requests over (requests answered, resident bytes)."""
    return statistics.linear_regression(*zip(*window)).slope * 1000 / MIB


def watch_on(slopes: Sequence[float]) -> bool:
    """Whether one more window must be watched, after windows that grew by `slopes`.

    A leak goes on in each of them; what is warmed up once, or an allocator's step, ends. So the
    last window is judged: within MIB_PER_1000, or above it as all 1 + FURTHER were.
    """
    return not slopes or (slopes[-1] > MIB_PER_1000 and len(slopes) <= FURTHER)


async def watched(
    server: ServerTree,
    count: int,
    done: Callable[[], int],
    work: Callable[[int], Coroutine[Any, Any, Any]],
) -> dict[str, Any]:
    """Growth while `work(count)` answers `count` requests; done() is how many are answered.

    MiB at each quarter of them, of the engine core and of what answers HTTP, and their slopes over
    the last quarter. `mib_per_1000` is of both together, a list: of the last quarter, and of as
    many further windows of its length as `watch_on` wants.
    """
    sizes = await _sampled(server, count, done, work(count))
    quarters = [_at(sizes, count * k // 4) for k in range(5)]
    parts = _slopes([sample for sample in sizes if sample[0] >= count * 3 // 4])
    together = [sum(parts.values())]
    while watch_on(together):
        more = await _sampled(server, count, done, work(count // 4))
        together.append(sum(_slopes(more).values()))
    return {
        **{f"{kind}_mib": [rounded(size[kind] / MIB, 2) for size in quarters] for kind in parts},
        **{f"{kind}_mib_per_1000": rounded(value) for kind, value in parts.items()},
        "mib_per_1000": [rounded(value) for value in together],
    }


async def _sampled(
    server: ServerTree, count: int, done: Callable[[], int], work: Coroutine[Any, Any, Any]
) -> Sizes:
    """Sizes at the begin, the end and every SAMPLES-th part of `count` requests of `work`."""
    sizes = [(done(), server.resident())]

    async def watch() -> None:
        while True:
            await asyncio.sleep(POLL_SECONDS)
            if done() >= sizes[-1][0] + max(1, count // SAMPLES):
                sizes.append((done(), server.resident()))

    watching = asyncio.create_task(watch())
    try:
        await work
    finally:
        watching.cancel()
    return [*sizes, (done(), server.resident())]


def _slopes(sizes: Sizes) -> dict[str, float]:
    return {k: slope([(done, size[k]) for done, size in sizes]) for k in ("core", "api")}


def _at(sizes: Sizes, done: int) -> dict[str, float]:
    """The sample nearest to `done` requests."""
    return min(sizes, key=lambda sample: abs(sample[0] - done))[1]
