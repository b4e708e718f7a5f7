"""Mixed traffic with random aborts: nothing leaks, and the engine says afterwards what it said."""

import ctypes
import gc
import itertools
import os
import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from mock_engine import ByteTokenizer
from tiny import EOS, VOCAB, run, tiny_engine

from octavo.bench.growth import FURTHER, MIB, MIB_PER_1000, slope, watch_on
from octavo.sampling.params import SamplingParams
from octavo.serve.output import OutputProcessor
from octavo.serve.types import Request

REQUESTS, PART = 1000, 25
"""Requests of the run, and between two looks at memory."""

WINDOW = REQUESTS // 4 // PART
"""Looks over which growth is measured: those of the last quarter, then as many more."""

LIVE = 9
REFERENCE = Request(
    "reference", tuple(range(30, 70)), SamplingParams(temperature=0.0, max_tokens=24)
)


def sampling(rng):
    """Parameters of a random kind; one of a few mixes, as in real traffic."""
    fields = {"max_tokens": rng.choice([0, 1, 3, 8, 8, 60]), "seed": rng.randrange(1 << 30)}
    fields["temperature"] = rng.choice([0.0, 0.0, 0.7, 1.0, 1.5])
    kind = rng.randrange(10)
    if kind == 0:
        fields |= {"top_k": 20, "top_p": 0.9, "min_p": 0.01}
    elif kind == 1:
        fields |= {"presence_penalty": 0.7, "frequency_penalty": -0.3, "repetition_penalty": 1.2}
    elif kind == 2:
        fields |= {"stop_token_ids": tuple(rng.sample(range(4, VOCAB), 5))}
    elif kind == 3:
        fields |= {"stop": tuple(chr(rng.randrange(40, 120)) for _ in range(4))}
    elif kind == 4:
        fields |= {"logprobs": rng.choice([0, 3, 20])}
    elif kind == 5:
        fields |= {"prompt_logprobs": rng.choice([0, 2])}
    elif kind == 6:
        fields |= {"logit_bias": {9: 3.0}, "bad_token_ids": (10, 11)}
    elif kind == 7 and fields["max_tokens"]:
        fields |= {"min_tokens": rng.randrange(fields["max_tokens"]), "ignore_eos": True}
    return SamplingParams(**fields)


def request(rng, serial):
    """A random request; one in twelve can't be served."""
    length = rng.choice([1, 2, 7, 12, 17, 40, 64])
    prompt = tuple(rng.randrange(4, VOCAB) for _ in range(length))
    if rng.random() < 0.3:
        prompt = (*range(4, 4 + 32), *prompt)[:68]  # a prefix that many share
    made = Request(
        f"r{serial}",
        prompt,
        sampling(rng),
        sample_index=rng.randrange(3),
        priority=rng.randrange(-1, 2),
        cache_salt=rng.choice(["", "", "salt"]),
    )
    if rng.random() < 1 / 12:
        made = replace(made, prompt=rng.choice([(), (VOCAB,), (-1,), (5,) * 129]))
    return made


class Traffic:
    """Requests, aborts and steps from one seed; counts what became of each request."""

    def __init__(self, engine, seed):
        self.engine, self.rng = engine, random.Random(seed)
        self.outputs = OutputProcessor(ByteTokenizer())
        self.live, self.ends, self.serial = set(), Counter(), 0

    def send(self):
        made = request(self.rng, self.serial)
        self.serial += 1
        try:
            self.engine.add(made)
        except ValueError:
            self.ends["refused"] += 1
            return
        self.outputs.add(made, track=True)
        self.live.add(made.request_id)

    def abort(self, request_id):
        self.engine.abort(request_id)
        self.outputs.discard(request_id)
        self.live.discard(request_id)

    def step(self):
        deltas, aborts = self.outputs.process(self.engine.step())
        for request_id in aborts:
            self.engine.abort(request_id)
        for request_id, delta in deltas:
            if delta.finish_reason is not None:
                self.ends[delta.finish_reason] += 1
                self.live.discard(request_id)

    def turn(self, limit):
        while self.serial < limit and len(self.live) < self.rng.randrange(1, LIVE):
            self.send()
        if self.live and self.rng.random() < 0.02:
            self.abort(self.rng.choice(sorted(self.live)))
            self.ends["aborted"] += 1
        self.step()

    def until(self, limit):
        """Run until `limit` requests have been sent and all have ended."""
        while self.serial < limit or self.live:
            self.turn(limit)


TRIM = getattr(ctypes.CDLL(None), "malloc_trim", None)


def resident():
    """Resident bytes of this process, less what is free and only not given back yet (glibc)."""
    gc.collect()
    if TRIM is not None:
        TRIM(0)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def look(traffic):
    """(requests sent, resident bytes) after PART more requests, when nothing runs or is held."""
    traffic.until(traffic.serial + PART)
    traffic.engine.check()
    stats = traffic.engine.stats()
    assert (stats.running, stats.waiting, stats.pages_used) == (0, 0, 0)
    return traffic.serial, resident()


def windows(traffic, first):
    """The looks of `first`, then of traffic that goes on; each begins where the last ended."""
    looks = first
    while True:
        yield looks
        looks = [looks[-1], *(look(traffic) for _ in range(WINDOW))]


def slopes_of(windows):
    """Growth over the windows that the rule wants to see, MiB per 1,000 requests."""
    slopes = []
    while watch_on(slopes):
        slopes.append(slope(next(windows)))
    return slopes


def test_a_long_run_leaks_nothing():
    engine = tiny_engine(eos_ids=(EOS,), num_pages=10)
    keys = engine.runner.builder.warmup_keys()
    keys = [key for key in keys if key.flags is None or not key.flags.grammar]  # none has one
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(engine.runner.programs.get, keys))
    expected, _ = run(engine, [REFERENCE])
    traffic = Traffic(engine, seed=1)
    sizes = [look(traffic) for _ in range(REQUESTS // PART)]
    assert sum(traffic.ends.values()) == REQUESTS
    stats = engine.stats()
    kinds = {"stop", "length", "aborted", "refused"}
    assert set(traffic.ends) == kinds, traffic.ends
    assert min(traffic.ends.values()) > 20
    assert stats.preemptions > 10
    assert stats.cached_tokens > 1000
    assert not traffic.outputs._samples
    assert not engine.scheduler._states
    slopes = slopes_of(windows(traffic, sizes[-WINDOW - 1 :]))
    assert slopes[-1] <= MIB_PER_1000, slopes
    assert run(engine, [REFERENCE])[0] == expected


# The judge can tell


KIB = 1024
STEPS = [0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1]
"""An allocator's step, in one window of looks."""


def grown(per_request, steps=()):
    """Windows of a process that keeps `per_request` bytes of each, with steps of 0.3 MiB."""
    steps = iter(steps)
    for start in itertools.count(0, WINDOW * PART):
        done = range(start, start + WINDOW * PART + 1, PART)
        more = next(steps, [0] * len(done))
        yield [(n, 1e9 + n * per_request + 0.3 * MIB * step) for n, step in zip(done, more)]


@pytest.mark.parametrize("per_request", [1.2 * KIB, 2 * KIB, 10 * KIB])
def test_a_leak_goes_on_and_is_one(per_request):
    slopes = slopes_of(grown(per_request))
    assert slopes == pytest.approx([per_request * 1000 / MIB] * (1 + FURTHER))
    assert slopes[-1] > MIB_PER_1000


def test_a_step_of_the_allocator_ends_and_is_none():
    slopes = slopes_of(grown(0, [STEPS]))
    assert slopes[0] > MIB_PER_1000
    assert slopes[1:] == [pytest.approx(0)]
    assert len(slopes_of(grown(0.5 * KIB))) == 1
