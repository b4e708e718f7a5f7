"""The real scheduler before a device without a model, as an engine of the core process.

Its queue is the real one, so that admission can be seen through the server; its tokens mean
nothing.
"""

import time
from dataclasses import replace
from types import SimpleNamespace

from fake_device import VOCAB, Loop
from scheduler_cases import config as scheduler_config

from octavo.serve.scheduler import Scheduler


class ScheduledEngine:
    """`config.scheduler` are fields of SchedulerConfig; a step takes `config.step_seconds`."""

    eos_ids = ()
    gate, weights_epoch = "open", 0
    model_config = SimpleNamespace(vocab_size=300)

    def __init__(self, config):
        self.generation = {}
        self._seconds = config.step_seconds
        self._loop = Loop(Scheduler(scheduler_config(**config.scheduler)))
        self._scheduler = self._loop.scheduler
        self.max_model_len = self._scheduler.config.max_model_len

    def add(self, request):
        prompt = tuple(token % VOCAB for token in request.prompt)
        self._loop.now = time.monotonic()
        self._loop.add(replace(request, prompt=prompt))

    def abort(self, request_id):
        self._loop.abort(request_id)

    def has_work(self):
        return self._scheduler.has_work()

    def step(self):
        time.sleep(self._seconds)
        self._loop.now = time.monotonic()
        return self._loop.step()

    def stats(self):
        return self._scheduler.stats()

    def slack(self):
        return 0.0

    def on_compile(self, callback):
        pass
