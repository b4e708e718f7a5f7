"""Programs lowered in processes of their own: the same programs, and no fault of one costs more."""

import pickle
import re
import sys
import time
from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import tiny_config, tiny_engine

from octavo.model.families import FAMILIES, family_of
from octavo.sampling.flags import SamplingFlags
from octavo.serve import lowering_pool
from octavo.serve.buckets import make_buckets
from octavo.serve.compile import Lowerable, ProgramKey, Programs
from octavo.serve.lowering import LoweringSpec, carry, restore
from octavo.serve.lowering_pool import LoweringPool
from octavo.serve.programs import ProgramBuilder, ProgramSettings
from octavo.serve.step import Graph

FILTERS = SamplingFlags(filters=True)
HOPPER = {"platform": "gpu", "kind": "NVIDIA H200", "num_cores": 132}


@pytest.fixture(scope="module")
def builder():
    return tiny_engine().runner.builder


def keys_of(builder):
    buckets = builder.settings.buckets
    stateful = SamplingFlags(penalties=True, filters=True)
    return [
        ProgramKey("forward", buckets.mixed(8, 1, 1)),
        builder.decode_key(buckets.decode(1, 1), FILTERS),
        builder.sample_key(buckets.decode(1, 1).rows, FILTERS),
        builder.sample_key(buckets.decode(1, 1).rows, stateful),
        ProgramKey("reset", size=builder.settings.reset_sizes()[0]),
        ProgramKey("prompt_logprobs", flags=SamplingFlags(logprobs=5), size=8),
    ]


def operations(compiled):
    """How often each operation stands in an executable, parameters among them."""
    return Counter(re.findall(r"= \S+ ([a-z\-]+)\(", compiled.as_text()))


def test_a_program_that_was_carried_over_is_the_one_lowered_here(builder):
    spec = LoweringSpec.of(builder)
    for key in keys_of(builder):
        lowerable = builder.build(key)
        ours, theirs = lowerable.lower(), restore(carry(lowerable, spec), lowerable)
        assert (ours.in_tree, ours.out_tree) == (theirs.in_tree, theirs.out_tree)
        assert ours.donate_argnums == theirs.donate_argnums
        ours, theirs = ours.compile(), theirs.compile()
        assert operations(ours) == operations(theirs)
        sizes = [made.memory_analysis() for made in (ours, theirs)]
        assert sizes[0].alias_size_in_bytes == sizes[1].alias_size_in_bytes
        assert sizes[0].temp_size_in_bytes == sizes[1].temp_size_in_bytes


@pytest.fixture
def as_a_helper():
    jax.config.update("jax_export_ignore_forward_compatibility", True)
    yield
    jax.config.update("jax_export_ignore_forward_compatibility", False)


@pytest.mark.parametrize("kind", ["forward", "decode"])
def test_kernels_are_lowered_for_a_gpu_that_is_not_here(kind, as_a_helper):
    config = tiny_config(head_dim=64, hidden_size=256, torch_dtype="bfloat16")
    graph = Graph(family_of(config), config, "mosaic", None, 64, "xla", "xla")
    settings = ProgramSettings(make_buckets(16, 256, 4, fine=True), 16, 256, 8)
    builder = ProgramBuilder(graph, config.cache_layout(8, 64), settings)
    if kind == "forward":
        key = ProgramKey("forward", settings.buckets.mixed(256, 2, 4))
    else:
        key = builder.decode_key(settings.buckets.decode(8, 4), FILTERS)
    spec, lowerable = replace(LoweringSpec.of(builder), **HOPPER), builder.build(key)
    with spec.device():
        direct = lowerable.jitted.trace(*lowerable.args).lower(lowering_platforms=("cuda",))
    carried = restore(carry(lowerable, spec), lowerable, ("cuda",))
    ours, theirs = (  # kernels' own code holds the lines that made it, which differ
        sorted(re.findall(r"custom_call @(mosaic\w+).* : (.*)", lowered.as_text()))
        for lowered in (direct, carried)
    )
    assert ours
    assert ours == theirs


def test_a_helper_lowers_what_an_engine_runs(builder):
    programs = Programs(builder.build, devices=jax.devices()[:1])
    pool = LoweringPool(builder.build, programs._lower_here, LoweringSpec.of(builder), helpers=1)
    try:
        wait_for(pool, 2)
        programs._lower = pool.lower
        for key in keys_of(builder):
            programs.get(key)
        assert pool.lowered_apart == 3
    finally:
        pool.close()
    size = builder.settings.buckets.decode(1, 1).rows
    sample = programs.get(builder.sample_key(size, FILTERS))
    assert sample.in_tree == builder.build(builder.sample_key(size, FILTERS)).lower().in_tree


TALK = """
import os, pickle, sys, time
from multiprocessing.connection import Connection
connection = Connection(int(sys.argv[1]))
print("something for nobody", flush=True)
connection.recv_bytes()
{start}
connection.send_bytes(b"ready")
connection.recv_bytes()
{lower}
connection.recv_bytes()
"""


@pytest.mark.parametrize(
    ("start", "lower"),
    [
        ("", "os._exit(1)"),
        ("", "time.sleep(60)"),
        ("", "connection.send_bytes(b'junk')"),
        ("", "connection.send_bytes(pickle.dumps((b'junk', '')))"),
        ("", "connection.send_bytes(pickle.dumps(3))"),
        ("", "connection.send_bytes(pickle.dumps((b'', 'not this one')))"),
        ("os._exit(1)", ""),
        ("time.sleep(60)", ""),
        ("sys.exit(connection.close())", ""),
    ],
)
def test_whatever_a_helper_does_the_program_is_lowered(start, lower, monkeypatch):
    monkeypatch.setattr(lowering_pool, "READY_SECONDS", 2.0)
    monkeypatch.setattr(lowering_pool, "LOWER_SECONDS", 0.5)
    script = TALK.format(start=start, lower=lower)
    monkeypatch.setattr(lowering_pool, "command_of", lambda module: [sys.executable, "-c", script])
    doubled = Lowerable(lambda x: x + x, (jax.ShapeDtypeStruct((3,), jnp.int32),))
    build = lambda key: doubled  # noqa: E731
    pool = LoweringPool(build, lambda key: (build(key).lower(), 0.0), 3, helpers=1)
    try:
        if not start:
            wait_for(pool, 2)
        for _ in range(2):
            lowered, seconds = pool.lower(ProgramKey("double"))
            assert np.asarray(lowered.compile()(np.arange(3, dtype=np.int32))).tolist() == [0, 2, 4]
            assert seconds < 20
        assert pool.lowered_apart == 0
    finally:
        pool.close()
    assert all(helper._process.returncode is not None for helper in pool._helpers)


def test_a_helper_ends_with_its_engine(builder):
    helper = lowering_pool._Helper(pickle.dumps(LoweringSpec.of(builder)))
    assert helper.receive(120) == b"ready"
    helper._process.stdin.close()  # as when the engine is killed
    assert helper._process.wait(60) == 3
    helper._connection.close()


def test_a_machine_without_processes_lowers_all_the_same(monkeypatch, builder):
    def refuse(*args, **kwargs):
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(lowering_pool.subprocess, "Popen", refuse)
    here = Programs(builder.build, devices=jax.devices()[:1])._lower_here
    pool = LoweringPool(builder.build, here, LoweringSpec.of(builder), helpers=2)
    assert pool.lower(keys_of(builder)[2])[0].compile()
    pool.close()


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.name)
def test_what_a_helper_must_know_of_a_family_can_be_sent(family):
    assert pickle.loads(pickle.dumps(family)) == family


def test_helpers_are_for_many_programs_on_a_gpu(monkeypatch, builder):
    assert lowering_pool.helpers_for(builder, 50) == 0
    monkeypatch.setattr(lowering_pool.devices, "on_gpu", lambda: True)
    monkeypatch.setattr(lowering_pool.os, "sched_getaffinity", lambda _: range(16))
    assert [lowering_pool.helpers_for(builder, count) for count in (50, 9, 3)] == [6, 2, 0]
    monkeypatch.setattr(lowering_pool.os, "sched_getaffinity", lambda _: range(2))
    assert lowering_pool.helpers_for(builder, 50) == 1


def wait_for(pool, count):
    """Until so many can lower."""
    ending = time.monotonic() + 120
    while pool._free.qsize() < count:
        assert time.monotonic() < ending
        time.sleep(0.01)
