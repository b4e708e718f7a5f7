"""How steps reach the device: without a detour, at once where nothing is waited for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import drain, run, tiny_engine

from octavo.sampling.params import SamplingParams
from octavo.serve.compile import ProgramKey, Programs
from octavo.serve.types import Request


def greedy(max_tokens, **fields):
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **fields)


def test_steps_go_to_the_device_by_the_short_way(monkeypatch):
    """Inputs travel with their dispatch, and no call leaves jax's C++ path once it was made."""
    engine = tiny_engine()
    requests = [
        Request("greedy", (5, 6, 7), greedy(20)),
        Request("biased", (5, 6, 8), greedy(4, bad_token_ids=(7,), prompt_logprobs=1)),
    ]
    expected, _ = run(engine, requests)
    again, _ = run(engine, requests)  # what a dispatch finds, last tokens say, differs at first
    slow: list[object] = []
    call = jax.stages.Compiled.call

    def noted(*args, **kwargs):
        slow.append(args[0])
        return call(*args, **kwargs)

    monkeypatch.setattr(jax.stages.Compiled, "call", staticmethod(noted))
    program = jax.jit(jnp.sin).lower(jnp.float32(1)).compile()
    for _ in range(3):
        program(jnp.float32(1))
    assert len(slow) == 1, "a program's first call, which tells jax the short way"
    slow.clear()
    monkeypatch.setattr(jax, "device_put", lambda *args: 1 / 0)
    tokens, _ = run(engine, requests)
    assert tokens == expected == again
    assert slow == []


def test_hidden_states_are_made_once_a_step_whoever_wants_them(monkeypatch):
    engine = tiny_engine()
    requests = [
        Request("scored", (5, 6, 7), greedy(1, prompt_logprobs=2)),
        Request("scored too", (5, 6, 7, 8), greedy(1, prompt_logprobs=0)),
        Request("embedded", (8, 9), greedy(0), pooling="mean"),
    ]
    ran: list[ProgramKey] = []
    get = Programs.get
    monkeypatch.setattr(Programs, "get", lambda *args: ran.append(args[1]) or get(*args))
    _, together = run(engine, requests)
    assert sorted(key.kind for key in ran) == [
        *("forward", "pool", "prompt_logprobs", "sample", "states")
    ]
    ran.clear()
    _, alone = run(engine, requests[:1])
    values = [[e.logprob for e in last["scored"].prompt_logprobs[1:]] for last in (together, alone)]
    assert values[0] == pytest.approx(values[1], abs=1e-5)
    _, alone = run(engine, requests[2:])
    values = [np.frombuffer(last["embedded"].embedding, "<f4") for last in (together, alone)]
    assert values[0] == pytest.approx(values[1], abs=1e-5)
    run(engine, [Request("neither", (5, 6, 7), greedy(1))])
    assert [key.kind for key in ran].count("states") == 2


def test_an_idle_engine_dispatches_at_once():
    engine = tiny_engine()
    run(engine, [Request("before", (5, 6, 7), greedy(8))])
    assert engine.slack() == 0.0
    engine.add(Request("a", (5, 6, 7), greedy(8)))
    assert engine.slack() == 0.0, "nothing is on the device that it could wait for"
    engine.step()
    assert engine.begun
    drain(engine)
