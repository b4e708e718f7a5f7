"""How the memory of a server's processes grows with the requests that it has answered."""

import asyncio
import statistics
from collections.abc import Callable, Coroutine
from typing import Any

from octavo.bench.report import rounded
from octavo.bench.server_tree import ServerTree

MIB = 1 << 20
MIB_PER_1000 = 1.0
"""Growth at most, MiB per 1,000 requests."""

SAMPLES, POLL_SECONDS = 400, 0.005

type Sizes = list[tuple[int, dict[str, float]]]
"""Requests answered so far, and resident bytes by kind of process."""


async def watched(
    server: ServerTree, count: int, done: Callable[[], int], work: Coroutine[Any, Any, Any]
) -> Sizes:
    """Sizes at up to SAMPLES moments of `work`, which has answered done() of `count` requests."""
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


def growth(sizes: Sizes, count: int) -> dict[str, Any]:
    """MiB at each quarter of `count` requests, and a least-squares slope over the last quarter.

    Of the engine core, of what answers HTTP, and the slope of both together as `mib_per_1000`.
    """
    slopes = {kind: _slope(sizes, kind, count * 3 // 4) for kind in ("core", "api")}
    quarters = [_at(sizes, count * k // 4) for k in range(5)]
    return {
        **{f"{kind}_mib": [rounded(size[kind] / MIB, 2) for size in quarters] for kind in slopes},
        **{f"{kind}_mib_per_1000": rounded(slope) for kind, slope in slopes.items()},
        "mib_per_1000": rounded(sum(slopes.values())),
    }


def _slope(sizes: Sizes, kind: str, since: int) -> float:
    last = [(done, size[kind]) for done, size in sizes if done >= since]
    return statistics.linear_regression(*zip(*last)).slope * 1000 / MIB


def _at(sizes: Sizes, done: int) -> dict[str, float]:
    """The sample nearest to `done` requests."""
    return min(sizes, key=lambda sample: abs(sample[0] - done))[1]
