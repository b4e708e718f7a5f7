"""Host cost of scheduling: microseconds of `schedule` and `commit` per step, decode rows only.

python bench/scheduler_bench.py [rows ...]
"""

import statistics
import sys
import time
from collections import deque

from octavo.sampling.params import SamplingParams
from octavo.serve.scheduler import Scheduler, SchedulerConfig
from octavo.serve.types import Request, RowResult

PROMPT, OUTPUT, PAGE = 1024, 400, 64


def measure(rows: int, overlap: bool) -> tuple[list[float], list[float]]:
    """Seconds of each schedule and each commit while `rows` rows decode."""
    pages = rows * -(-(PROMPT + OUTPUT) // PAGE) + 1
    scheduler = Scheduler(SchedulerConfig(rows, 8192, pages, PAGE, 4096, overlap=overlap))
    for index in range(rows):
        prompt = tuple((index + token) % 1000 for token in range(PROMPT))
        params = SamplingParams(max_tokens=OUTPUT, stop_token_ids=(100_000,))
        scheduler.add(Request(str(index), prompt, params, eos_ids=(100_001, 100_002)), 0.0)
    schedules, commits = [], []
    in_flight: deque = deque()
    while scheduler.has_work():
        start = time.perf_counter()
        batch = scheduler.schedule(0.0)
        elapsed = time.perf_counter() - start
        if batch is not None:
            in_flight.append(batch)
            if batch.num_tokens == len(batch.rows) == rows:
                schedules.append(elapsed)
            if overlap and len(in_flight) < 2:
                continue
        batch = in_flight.popleft()
        results = [RowResult((7,)) if row.samples else RowResult() for row in batch.rows]
        start = time.perf_counter()
        scheduler.commit(batch, results, 0.0)
        if batch.num_tokens == len(batch.rows) == rows:
            commits.append(time.perf_counter() - start)
    return schedules, commits


def main(counts: list[int]) -> None:
    """Print one line per row count and mode."""
    print(f"{'us of':>14} {'schedule P10':>14} {'P50':>6} {'commit P10':>14} {'P50':>6}")
    for rows in counts:
        for overlap in (False, True):
            name = f"{rows} {'overlap' if overlap else 'plain'}"
            cells = []
            for seconds in measure(rows, overlap):
                tenths = statistics.quantiles(seconds, n=10)
                cells += [1e6 * tenths[0], 1e6 * tenths[4]]
            print("{:>14} {:14.0f} {:6.0f} {:14.0f} {:6.0f}".format(name, *cells))


if __name__ == "__main__":
    main([int(argument) for argument in sys.argv[1:]] or [1, 8, 64, 256])
