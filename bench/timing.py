"""How long a compiled program takes."""

import statistics
import time
from collections.abc import Callable


def median_seconds(program: Callable, arguments: tuple, runs: int = 3) -> float:
    """Median of so many runs, the results awaited, after one that does not count."""
    import jax

    jax.block_until_ready(program(*arguments))
    times = []
    for _ in range(runs):
        begin = time.perf_counter()
        jax.block_until_ready(program(*arguments))
        times.append(time.perf_counter() - begin)
    return statistics.median(times)
