"""Weights replaced under a running engine: nothing compiles, nothing of the old ones is left."""

import json
import shutil

import jax
import numpy as np
import pytest
from tiny import ARTEFACTS, drain, run, tiny_config, tiny_engine, tiny_fields, tiny_params

from octavo.llm import LLM
from octavo.model.checkpoint.export import export_hf
from octavo.model.checkpoint.source import Checkpoint
from octavo.model.families import family_of
from octavo.model.params import init_params
from octavo.sampling.params import SamplingParams
from octavo.serve.control import Controls
from octavo.serve.types import Request
from octavo.serve.wire import Control, Controlled, EngineState

PROMPT = [9, 8, 7, 6, 5] * 8
OTHERS = [[11, 12, 13], [14, 15] * 9]
GREEDY = SamplingParams(temperature=0.0, max_tokens=20)


def write(folder, params, **fields):
    """A model of these weights as a Hugging Face folder."""
    described = folder.with_suffix(".described")
    described.mkdir()
    (described / "config.json").write_text(json.dumps(tiny_fields(**fields)))
    export_hf(Checkpoint(tiny_config(**fields), params, (), path=described), folder)


def params_of(config, key):
    return init_params(family_of(config).abstract_params(config), jax.random.key(key))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders of two models of one shape, of others, and of damaged ones, by name."""
    root = tmp_path_factory.mktemp("models")
    config = tiny_config()
    bad = params_of(config, 6)
    bad["head"] = bad["head"].at[3, 3].set(np.nan)
    write(root / "a", tiny_params())
    write(root / "b", params_of(config, 6))
    write(root / "nan", bad)
    wide = {"intermediate_size": 96}
    write(root / "wide", params_of(tiny_config(**wide), 6), **wide)
    for name in ("cut", "rope", "empty"):
        shutil.copytree(root / "b", root / name)
    (weights,) = (root / "cut").glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1000])
    (root / "empty" / weights.name).unlink()
    described = json.loads((root / "rope" / "config.json").read_text())
    described["rope_theta"] *= 2
    (root / "rope" / "config.json").write_text(json.dumps(described))
    return root


def made(folder, **settings):
    fields = {"max_num_seqs": 4, "max_batch_tokens": 32, "max_model_len": 128, "page_size": 16}
    return LLM(str(folder), num_pages=33, artefact_dir=ARTEFACTS, **{**fields, **settings})


def tokens(llm, prompts=(PROMPT, *OTHERS)):
    return [out.outputs[0].token_ids for out in llm.generate(list(prompts), GREEDY)]


@pytest.fixture(scope="module")
def expected(models):
    """What each of the two models says."""
    found = {name: tokens(made(models / name)) for name in "ab"}
    assert found["a"] != found["b"]
    return found


@pytest.fixture
def llm(models):
    return made(models / "a")


def test_the_new_weights_answer_and_nothing_is_compiled(llm, models, expected):
    assert tokens(llm) == expected["a"]
    made_before = len(llm.engine.runner.programs.items())
    assert llm.reload(str(models / "b")) == 1
    assert tokens(llm) == expected["b"]
    assert llm.reload(str(models / "a")) == 2
    assert tokens(llm) == expected["a"]
    assert len(llm.engine.runner.programs.items()) == made_before


def test_prefixes_of_other_weights_are_not_shared(llm, models, expected):
    llm.generate([PROMPT], GREEDY)
    assert llm.generate([PROMPT], GREEDY)[0].cached_tokens == 32
    llm.reload(str(models / "b"))
    out = llm.generate([PROMPT], GREEDY)[0]
    assert (out.cached_tokens, out.outputs[0].token_ids) == (0, expected["b"][0])
    assert llm.generate([PROMPT], GREEDY)[0].cached_tokens == 32


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("wide", "intermediate_size is 96, here 64"),
        ("rope", "layers is"),
        ("nan", "lm_head.weight holds NaN"),
        ("cut", "safetensors"),
        ("empty", "safetensors"),
        ("none", "none"),
    ],
)
def test_what_does_not_fit_leaves_the_old_ones(llm, models, expected, name, words):
    with pytest.raises(ValueError, match=words):
        llm.reload(str(models / name))
    assert llm.engine.weights_epoch == 0
    assert tokens(llm) == expected["a"]


def test_without_a_name_the_same_files_are_read_again(models, expected, tmp_path):
    shutil.copytree(models / "a", tmp_path / "m")
    llm = made(tmp_path / "m")
    assert tokens(llm) == expected["a"]
    shutil.copytree(models / "b", tmp_path / "m", dirs_exist_ok=True)
    assert llm.reload() == 1
    assert tokens(llm) == expected["b"]


@pytest.mark.parametrize("overlap", [False, True])
def test_what_runs_ends_on_the_old_and_what_waits_begins_on_the_new(
    models, expected, overlap, monkeypatch
):
    llm = made(models / "a", max_num_seqs=2, overlap=overlap)
    events, step = [], llm.engine.step
    monkeypatch.setattr(llm.engine, "step", lambda: events.extend(new := step()) or new)
    streams = [llm.stream(prompt, GREEDY) for prompt in (PROMPT, OTHERS[0])]
    firsts = [next(stream).token_ids for stream in streams]
    llm.engine.add(Request("late", tuple(OTHERS[1]), GREEDY))
    assert (llm.engine.stats().running, llm.engine.stats().waiting) == (2, 1)
    llm.reload(str(models / "b"))
    assert (llm.engine.stats().running, llm.engine.stats().waiting) == (0, 1)
    for first, stream, want in zip(firsts, streams, expected["a"]):
        assert first + sum((item.token_ids for item in stream), ()) == want
    while llm.engine.has_work():
        llm.engine.step()
    late = [event.token_ids for event in events if event.request_id == "late"]
    assert sum(late, ()) == expected["b"][2]
    llm.engine.check()


def test_preempted_requests_end_before_newcomers_begin():
    """Three rows that grow to three pages each, in a pool of six; the gate closes on them."""
    engine = tiny_engine(num_pages=7, max_model_len=80)
    for i in range(3):
        prompt = tuple(range(10 + i, 20 + i))
        engine.add(Request(f"r{i}", prompt, SamplingParams(temperature=0.0, max_tokens=36)))
    ended = []
    while engine.stats().preemptions == 0:
        ended += [e.request_id for e in engine.step() if e.finish_reason]
    engine.gate = "closing"
    engine.add(Request("late", (4, 5), SamplingParams(max_tokens=2), priority=-100))
    while engine.has_work():
        ended += [e.request_id for e in engine.step() if e.finish_reason]
        engine.check()
    assert sorted(ended) == ["r0", "r1", "r2"]
    assert engine.stats().waiting == 1
    engine.gate = "shut"
    assert not engine.has_work()
    assert engine.step() == []
    engine.gate = "open"
    drained, _ = drain(engine)
    assert list(drained) == ["late"]


def test_the_core_replaces_them_while_requests_come_and_go(models, expected):
    """As the engine core does it: read in a thread, put in place between requests."""
    engine, told, answers, events = made(models / "a").engine, [], [], []
    controls = Controls(
        engine,
        EngineState(),
        answer=lambda identity, reply: answers.append(reply),
        tell=told.append,
        abort_all=lambda: None,
        excuse=lambda: None,
    )
    engine.add(Request("r", tuple(PROMPT), GREEDY))
    controls.take(b"", Control(1, "reload", "wait", model=str(models / "b")))
    while not answers:
        events += engine.step()
        controls.advance()
    assert answers == [Controlled(1, weights_epoch=1)]
    assert told == [EngineState(False, 1, str(models / "b"))]
    assert sum((event.token_ids for event in events), ()) == expected["a"][0]
    assert drain_of(engine, PROMPT) == expected["b"][0]
    controls.take(b"", Control(2, "reload", "wait", model=str(models / "nan")))
    while len(answers) < 2:
        controls.advance()
    assert (answers[1].kind, "NaN" in answers[1].message) == ("invalid", True)
    assert drain_of(engine, PROMPT) == expected["b"][0]


def drain_of(engine, prompt):
    return tuple(run(engine, [Request("x", tuple(prompt), GREEDY)])[0]["x"])


def test_a_pause_does_not_count_as_slow_prefill():
    engine = tiny_engine()
    now = [0.0]
    engine._clock = lambda: now[0]
    for i in range(6):
        engine.add(Request(f"r{i}", tuple(PROMPT), SamplingParams(temperature=0.0, max_tokens=30)))
    for _ in range(4):
        engine.step()
        now[0] += 0.1
    before = engine.stats().estimated_wait
    engine.gate = "shut"
    now[0] += 1000.0
    engine.gate = "open"
    engine.step()
    assert 0 < engine.stats().estimated_wait < 2 * before
