"""Small requests and loops for the scheduler's tests."""

from fake_device import Loop

from octavo.sampling.params import SamplingParams
from octavo.serve.scheduler import PrefillBudget, Scheduler, SchedulerConfig, Worthwhile
from octavo.serve.types import Request

PROMPT = (3, 1, 4, 1, 5, 9, 2, 6, 5)


def config(**fields) -> SchedulerConfig:
    defaults = {
        "max_num_seqs": 4,
        "max_batch_tokens": 64,
        "num_pages": 65,
        "page_size": 4,
        "max_model_len": 128,
    }
    return SchedulerConfig(**{**defaults, **fields})


def loop_of(
    prefill_budget: PrefillBudget | None = None, worthwhile: Worthwhile | None = None, **fields
) -> Loop:
    return Loop(Scheduler(config(**fields), prefill_budget, worthwhile))


def in_fives(tokens: int, least: int, rows: int) -> int:
    """A `Worthwhile` that fills classes of 5, 10, 15 ... tokens."""
    return max(tokens // 5 * 5, least) if tokens >= 5 else tokens


def request(id_, prompt=PROMPT, max_tokens=8, *, priority=0, salt="", **params) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, seed=1, **params)
    return Request(id_, tuple(prompt), sampling, priority=priority, cache_salt=salt)


def shape(batch) -> list[tuple]:
    return [(row.request_id, row.start, row.query_len, row.num_steps) for row in batch.rows]


def step(loop: Loop) -> list[tuple]:
    """Shape of the batch that one step dispatches."""
    before = len(loop.batches)
    loop.step()
    loop.scheduler.check()
    return shape(loop.batches[-1]) if len(loop.batches) > before else []
