"""The engine on a tiny model: the same tokens in any company, loop, chunking and cache state."""

from contextlib import contextmanager
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import EOS, VOCAB, drain, run, tiny_config, tiny_engine, tiny_params

from octavo.generate import make_generate
from octavo.model.forward import forward
from octavo.sampling.params import SamplingParams
from octavo.serve.compile import ProgramKey, Programs
from octavo.serve.programs import COMMON_FLAGS, SAMPLING_FLAGS, ProgramBuilder
from octavo.serve.types import FINISH_ERROR, FINISH_LENGTH, FINISH_STOP, Request

PLAIN = {"overlap": False, "max_decode_steps": 1}
LOOPS = [
    pytest.param({"overlap": True, "max_decode_steps": 1}, id="overlap"),
    pytest.param({"overlap": False, "max_decode_steps": 8}, id="multi-step"),
    pytest.param({"overlap": True, "max_decode_steps": 8}, id="overlap multi-step"),
]


def prompts(count, seed=0, longest=40):
    rng = np.random.default_rng(seed)
    return [tuple(rng.integers(4, VOCAB, rng.integers(1, longest)).tolist()) for _ in range(count)]


def greedy(max_tokens=12, **fields):
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **fields)


def mixed_params():
    """One of each kind of sampling."""
    return [
        greedy(),
        SamplingParams(temperature=1.0, seed=1, max_tokens=9),
        SamplingParams(temperature=0.7, top_k=20, top_p=0.9, min_p=0.02, seed=2, max_tokens=15),
        SamplingParams(
            temperature=1.3, seed=3, presence_penalty=0.8, frequency_penalty=0.4, max_tokens=11
        ),
        SamplingParams(temperature=1.0, seed=4, repetition_penalty=1.3, max_tokens=7),
        SamplingParams(
            temperature=1.0, seed=5, logit_bias={7: 4.0}, bad_token_ids=(9,), max_tokens=8
        ),
        SamplingParams(temperature=1.0, seed=6, allowed_token_ids=(10, 11, 12, 50), max_tokens=8),
        SamplingParams(
            temperature=1.0, seed=7, min_tokens=5, stop_token_ids=(20, 21, 22), max_tokens=20
        ),
    ]


def requests(params=None, seed=0):
    params = mixed_params() if params is None else params
    pairs = zip(prompts(len(params), seed), params, strict=True)
    return [Request(f"r{i}", prompt, p) for i, (prompt, p) in enumerate(pairs)]


@pytest.fixture(scope="module")
def alone():
    """Each request's tokens, one at a time through the plain loop."""
    engine = tiny_engine(**PLAIN)
    return {r.request_id: run(engine, [r])[0][r.request_id] for r in requests()}


def check_pages_free(engine):
    engine.check()
    stats = engine.stats()
    assert (stats.pages_used, stats.running, stats.waiting) == (0, 0, 0)


def test_greedy_equals_teacher_forced_argmax(alone):
    request = requests()[0]
    sequence = [*request.prompt, *alone["r0"]]
    logits = forward(tiny_config(), tiny_params(), jnp.asarray(sequence, jnp.int32))
    expected = np.asarray(logits).argmax(-1)[len(request.prompt) - 1 : -1]
    assert alone["r0"] == expected.tolist()


@pytest.mark.parametrize("loop", LOOPS)
def test_same_tokens_in_a_crowd(alone, loop):
    engine = tiny_engine(**loop)
    tokens, last = run(engine, requests(), every_step=lambda e: e.check())
    assert tokens == alone
    assert {e.finish_reason for e in last.values()} <= {FINISH_LENGTH, FINISH_STOP}
    check_pages_free(engine)


@pytest.mark.parametrize("loop", LOOPS)
def test_same_tokens_under_preemption(loop):
    """Four rows that grow to three pages each, in a pool of six."""
    long = [replace(p, max_tokens=36, min_tokens=0, stop_token_ids=()) for p in mixed_params()]
    batch = [replace(r, prompt=r.prompt[:10]) for r in requests(long)]
    engine = tiny_engine(**PLAIN)
    expected = {r.request_id: run(engine, [r])[0][r.request_id] for r in batch}
    engine = tiny_engine(num_pages=7, max_model_len=80, **loop)
    tokens, _ = run(engine, batch, every_step=lambda e: e.check())
    assert tokens == expected
    assert engine.stats().preemptions > 0
    check_pages_free(engine)


@pytest.mark.parametrize("caching", [False, True])
def test_same_tokens_with_and_without_prefix_cache(alone, caching):
    engine = tiny_engine(prefix_caching=caching, **PLAIN)
    for _ in range(2):
        tokens, last = run(engine, requests())
        assert tokens == alone
    hits = sum(e.cached_tokens for e in last.values())
    assert (hits > 0) == caching
    check_pages_free(engine)


def test_same_tokens_whatever_the_chunks(alone):
    engine = tiny_engine(max_batch_tokens=5, **PLAIN)
    assert run(engine, requests())[0] == alone


def test_multi_step_ends_at_a_stop_id_drawn_on_the_device():
    params = greedy(30)
    engine = tiny_engine(**PLAIN)
    request = Request("a", prompts(1, 3)[0], params)
    full = run(engine, [request])[0]["a"]
    stop = full[10]
    end = full.index(stop) + 1
    for fields in (PLAIN, {"overlap": True, "max_decode_steps": 8}):
        engine = tiny_engine(**fields)
        stopped = replace(request, params=replace(params, stop_token_ids=(stop,)))
        tokens, last = run(engine, [stopped])
        assert tokens["a"] == full[:end]
        assert (last["a"].finish_reason, last["a"].stop_token) == (FINISH_STOP, stop)
        check_pages_free(engine)


def test_eos_ends_unless_ignored():
    engine = tiny_engine(eos_ids=(EOS,))
    bias = {EOS: 100.0}
    ended, _ = run(engine, [Request("a", (5, 6), greedy(6, logit_bias=bias))])
    ignored, _ = run(engine, [Request("b", (5, 6), greedy(6, logit_bias=bias, ignore_eos=True))])
    held, _ = run(engine, [Request("c", (5, 6), greedy(6, logit_bias=bias, min_tokens=3))])
    assert ended["a"] == [EOS]
    assert ignored["b"] == [EOS] * 6
    assert EOS not in held["c"][:3]
    assert held["c"][3:] == [EOS]


def test_logprobs_of_output_and_prompt_match_the_forward_pass():
    engine = tiny_engine()
    prompt = prompts(1, 9)[0] * 2
    _, last = run(engine, [Request("a", prompt, greedy(1, logprobs=5, prompt_logprobs=2))])
    logits = forward(tiny_config(), tiny_params(), jnp.asarray(prompt, jnp.int32))
    expected = np.asarray(jax.nn.log_softmax(logits))
    event = last["a"]
    first, *rest = event.prompt_logprobs
    assert first is None
    for position, entry in enumerate(rest):
        assert entry.token_id == prompt[position + 1]
        assert entry.logprob == pytest.approx(expected[position, entry.token_id], abs=1e-4)
        assert entry.rank == 1 + (expected[position] > expected[position, entry.token_id]).sum()
        assert [t for t, _ in entry.top] == (-expected[position]).argsort()[:2].tolist()
    drawn = event.logprobs[0]
    assert drawn.logprob == pytest.approx(expected[-1].max(), abs=1e-4)
    assert len(drawn.top) == 5
    assert drawn.top[0][0] == drawn.token_id


@pytest.mark.parametrize("fields", [{"max_batch_tokens": 7}, {"max_chunk_tokens": 1}], ids=str)
def test_prompt_logprobs_across_chunks_and_without_generation(fields):
    prompt = prompts(1, 11, longest=30)[0] * 4
    request = Request("a", prompt, greedy(0, prompt_logprobs=0))
    whole = run(tiny_engine(), [request])[1]["a"]
    chunked = run(tiny_engine(**fields), [request])[1]["a"]
    assert whole.token_ids == chunked.token_ids == ()
    assert whole.finish_reason == FINISH_LENGTH
    for a, b in zip(whole.prompt_logprobs[1:], chunked.prompt_logprobs[1:], strict=True):
        assert a.token_id == b.token_id
        assert a.logprob == pytest.approx(b.logprob, abs=1e-4)


def test_no_compile_after_warm_up():
    engine = tiny_engine()
    builder, store = engine.runner.builder, engine.runner.programs.store
    programs = Programs(builder.build, store, devices=jax.devices()[:1], strict=True)
    keys = builder.warmup_keys()
    # Of the sampling variants those that the requests need: each costs seconds to compile.
    rare = {flags for flags in SAMPLING_FLAGS if flags.grammar or flags.logprobs > 5}
    programs.warm([key for key in keys if key.flags not in rare], workers=2)
    programs.seal()
    monkey = pytest.MonkeyPatch()
    with monkey.context() as patch:
        patch.setattr(engine.runner, "programs", programs)
        run(engine, requests())
        run(engine, [Request("p", (5, 6, 7), greedy(3, logprobs=3, prompt_logprobs=1))])
    with pytest.raises(RuntimeError, match="compile after warm-up"):
        programs.get(ProgramKey("logits", size=7))


@contextmanager
def plain_greedy_programs(engine):
    """The engine with these alone: that it takes another one is an error."""
    builder, store = engine.runner.builder, engine.runner.programs.store
    programs = Programs(builder.build, store, devices=jax.devices()[:1], strict=True)
    programs.warm(builder.plain_keys(COMMON_FLAGS[:1]), workers=2)
    programs.seal()
    warmed = {key for key, _ in programs.items()}
    assert warmed < set(builder.plain_keys())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.runner, "programs", programs)
        yield
    # Nor was another one loaded, which a store that other tests have filled would allow.
    assert {key for key, _ in programs.items()} == warmed


def test_the_plain_programs_are_what_requests_of_any_length_and_number_need():
    engine = tiny_engine()
    asked = [(f"{i}", (5,) * length) for i, length in enumerate((1, 3, 30, 9, 61, 2))]
    with plain_greedy_programs(engine):
        _, last = run(engine, [Request(name, ids, greedy(20)) for name, ids in asked])
    assert {output.finish_reason for output in last.values()} == {"length"}


@pytest.mark.parametrize(
    ("lengths", "most", "fields"),
    [
        pytest.param((1,), 9, {}, id="a prompt of one token"),
        pytest.param((33,), 9, {}, id="one left by a chunk"),
        pytest.param((17, 17, 33), 9, {}, id="all but one cached"),
        pytest.param((5, 20), 9, {"max_chunk_tokens": 1}, id="each alone"),
        pytest.param((1, 33), 0, {}, id="nothing to draw"),
        pytest.param((10, 10, 10, 10), 36, {"num_pages": 7, "max_model_len": 80}, id="preempted"),
    ],
)
@pytest.mark.parametrize("loop", LOOPS[1:])
def test_a_prompts_token_that_comes_alone_runs_the_loops_program(lengths, most, fields, loop):
    """One after the other, or at once when they are to take each other's pages."""
    prompt = prompts(1, 3, longest=41)[0] * 40
    asked = [Request(f"{i}", prompt[:n], greedy(most)) for i, n in enumerate(lengths)]
    plain = tiny_engine(**PLAIN)
    expected = [run(plain, [request])[0][request.request_id] for request in asked]
    engine, found = tiny_engine(**loop, **fields), {}
    with plain_greedy_programs(engine):
        for group in [asked] if "num_pages" in fields else [[request] for request in asked]:
            found |= run(engine, group, every_step=lambda e: e.check())[0]
    assert list(found.values()) == expected
    assert (engine.stats().preemptions > 0) == ("num_pages" in fields)
    assert (engine.stats().cached_tokens > 0) == (len(lengths) == 3)
    check_pages_free(engine)


@pytest.mark.parametrize("decode_steps", [1, 8])
def test_the_common_programs_are_what_plain_requests_need(decode_steps):
    engine = tiny_engine(max_decode_steps=decode_steps)
    builder, store = engine.runner.builder, engine.runner.programs.store
    few = ProgramBuilder(
        builder.graph, builder.layout, replace(builder.settings, max_decode_steps=decode_steps)
    )
    programs = Programs(few.build, store, devices=jax.devices()[:1], strict=True)
    programs.warm(few.common_keys(), workers=2)
    programs.seal()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.runner, "programs", programs)
        patch.setattr(engine.runner, "builder", few)
        patch.setattr(engine.runner, "settings", few.settings)
        for length, params in ((3, greedy(20)), (30, SamplingParams(max_tokens=20, seed=1))):
            _, last = run(engine, [Request("r", tuple(range(5, 5 + length)), params)])
            assert last["r"].finish_reason == "length"


@pytest.mark.parametrize("kind", ["forward", "decode"])
def test_cache_is_updated_in_place(kind):
    """On a cache that dwarfs the model: donated, aliased, and no copy among the temporaries."""
    small = tiny_engine().runner
    layout = replace(small.layout, num_pages=4000)
    builder = ProgramBuilder(small.graph, layout, small.settings)
    bucket = small.settings.buckets.decode(4, 8)
    key = (
        ProgramKey("forward", bucket)
        if kind == "forward"
        else builder.decode_key(bucket, COMMON_FLAGS[0])
    )
    lowerable = builder.build(key)
    analysis = lowerable.lower().compile().memory_analysis()
    cache_bytes = layout.page_bytes * layout.num_pages
    assert analysis.alias_size_in_bytes >= cache_bytes
    assert analysis.temp_size_in_bytes < cache_bytes / 8


def test_nan_in_one_row_fails_that_request_alone():
    params = dict(tiny_params())
    params["embed"] = params["embed"].at[7].set(jnp.nan)
    engine = tiny_engine(params=params)
    good = Request("good", (5, 6, 8), greedy(6, bad_token_ids=(7,)))
    bad = Request("bad", (5, 7, 8), greedy(6))
    tokens, last = run(engine, [good, bad])
    assert last["bad"].finish_reason == FINISH_ERROR
    assert "NaN" in last["bad"].error
    assert tokens["good"] == run(tiny_engine(), [good])[0]["good"]
    # Pages that held NaN are used again without harm.
    again, _ = run(engine, [replace(good, request_id=f"g{i}") for i in range(6)])
    assert all(t == tokens["good"] for t in again.values())
    check_pages_free(engine)


STAGES = {
    "schedule": ["octavo.serve.scheduler.Scheduler.schedule"],
    "pack": ["octavo.serve.batch.pack_forward", "octavo.serve.batch.pack_decode"],
    "compile": ["octavo.serve.compile.Programs.get"],
    "dispatch": ["octavo.serve.runner.Runner.dispatch"],
    "sample": ["octavo.serve.runner.Runner.sample"],
    "read": ["octavo.serve.inflight.InFlight.read"],
    "commit": ["octavo.serve.scheduler.Scheduler.commit"],
}


@pytest.mark.parametrize("stage", STAGES)
def test_a_failed_step_fails_what_was_running_and_keeps_what_waits(monkeypatch, stage):
    engine = tiny_engine(max_num_seqs=2)
    params = greedy(20, logprobs=1 if stage == "sample" else None)  # those are drawn on their own
    requests = [Request(f"r{i}", (5, 6, 7 + i), params) for i in range(5)]
    expected, _ = run(engine, requests)
    for request in requests:
        engine.add(request)
    engine.step()
    with monkeypatch.context() as patch:
        for name in STAGES[stage]:
            patch.setattr(name, lambda *args, **kwargs: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    events = engine.recover("the step failed")
    assert [(e.request_id, e.finish_reason, e.error) for e in events] == [
        (id_, FINISH_ERROR, "the step failed") for id_ in ("r0", "r1")
    ]
    engine.check()
    tokens, _ = drain(engine)
    assert tokens == {id_: expected[id_] for id_ in ("r2", "r3", "r4")}
    check_pages_free(engine)
    assert run(engine, requests)[0] == expected


def test_score_is_the_forward_pass():
    engine = tiny_engine()
    ids = prompts(1, 21, longest=100)[0] * 2
    logits = engine.score(ids[:100])
    expected = forward(tiny_config(), tiny_params(), jnp.asarray(ids[:100], jnp.int32))
    np.testing.assert_allclose(logits, np.asarray(expected), atol=1e-4 * float(expected.std()))
    check_pages_free(engine)


def test_make_generate_equals_the_engine():
    generate = make_generate(tiny_config(), max_tokens=12)
    batch = prompts(3, 30)
    width = max(map(len, batch))
    tokens = np.zeros((3, width), np.int32)
    for row, prompt in enumerate(batch):
        tokens[row, : len(prompt)] = prompt
    lengths = np.array([len(p) for p in batch], np.int32)
    out = generate(tiny_params(), tokens, lengths, jax.random.key(0))
    engine = tiny_engine()
    for row, prompt in enumerate(batch):
        expected = run(engine, [Request("a", prompt, greedy(12))])[0]["a"]
        assert np.asarray(out[row]).tolist() == expected


def test_make_generate_is_reproducible_and_stops():
    sampling = SamplingParams(
        temperature=1.0, repetition_penalty=1.2, stop_token_ids=tuple(range(4, 20))
    )
    generate = make_generate(tiny_config(), max_tokens=16, sampling=sampling)
    tokens, lengths = np.full((2, 3), 50, np.int32), np.array([3, 3], np.int32)
    once = np.asarray(generate(tiny_params(), tokens, lengths, jax.random.key(1)))
    again = np.asarray(generate(tiny_params(), tokens, lengths, jax.random.key(1)))
    other = np.asarray(generate(tiny_params(), tokens, lengths, jax.random.key(2)))
    np.testing.assert_array_equal(once, again)
    assert (once != other).any()
    assert (once[0] != once[1]).any()
    for row in (*once, *other):
        stops = np.flatnonzero((row >= 4) & (row < 20))
        if len(stops):
            assert (row[stops[0] + 1 :] == -1).all()


@pytest.mark.parametrize("devices", [2, 4])
def test_tensor_parallel_gives_the_same_tokens(alone, devices):
    """Two KV heads on two devices; on four each KV head is held twice."""
    engine = tiny_engine(tensor=devices)
    assert run(engine, requests())[0] == alone
    check_pages_free(engine)


BAD_REQUESTS = [
    (Request("a", (), greedy()), "at least one token"),
    (Request("a", (VOCAB,), greedy()), f"0 .. {VOCAB - 1}"),
    (Request("a", (-1,), greedy()), "outside the vocabulary"),
    (Request("a", (5,) * 129, greedy(0)), "128"),
    (Request("a", (5,) * 100, greedy(29)), "129"),
    (Request("a", (5,), greedy(logit_bias={VOCAB: 1.0})), "logit_bias"),
    (Request("a", (5,), greedy(stop_token_ids=(VOCAB,))), "stop_token_ids"),
]


@pytest.mark.parametrize(("request_", "message"), BAD_REQUESTS)
def test_bad_requests_are_refused_before_any_work(request_, message):
    engine = tiny_engine()
    with pytest.raises(ValueError, match=message):
        engine.add(request_)
    assert not engine.has_work()
