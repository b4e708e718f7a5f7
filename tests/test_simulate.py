"""The simulation of scheduling policies: that it is the engine's loop, not what it says."""

import pytest

from octavo.bench.simulate import Simulation
from octavo.bench.workload import load

COUNT = 40


@pytest.mark.parametrize("serving", [False, True])
@pytest.mark.parametrize("at_once", [None, 8])
def test_every_request_gets_all_its_tokens_in_time_order(serving, at_once):
    mix = load()
    asked = list(zip(mix.prompt_lens[:COUNT], mix.output_lens))
    due = [0.0] * at_once if at_once else [1e3 * at for at in mix.arrivals(COUNT, 32)]
    simulation = Simulation(16, 640, serving=serving)
    outcome = simulation.run(asked, due, at_once)
    assert set(outcome.ended) == set(range(COUNT))
    for index in range(COUNT):
        assert outcome.came[index] < outcome.first[index] <= outcome.ended[index]
    assert not simulation.scheduler.has_work()
    simulation.scheduler.check()
    figures = outcome.figures([output for _, output in asked])
    # Sixteen rows get a token each in 4.4 ms at best.
    assert 0 < figures["out_tok_s"] < 16 / 0.0044
    assert figures["tpot_ms_p50"] > 4.4


def test_a_step_that_computes_more_takes_longer():
    mix = [(1000, 20)] * 8
    ends = [
        max(Simulation(8, least, serving=True).run(asked, [0.0] * 8).ended.values())
        for least, asked in ((8192, mix), (8192, [(2000, 20)] * 8))
    ]
    assert ends[0] < ends[1]
