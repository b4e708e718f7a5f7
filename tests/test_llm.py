"""`octavo.LLM` on a small checkpoint folder without a tokenizer."""

import itertools
import signal
import subprocess
import sys

import numpy as np
import pytest
from family_data import FOLDER, TOLERANCE, reference_of
from tiny import ARTEFACTS

import octavo
from octavo.interrupts import interrupts_deferred
from octavo.sampling.params import MAX_SEED, SamplingParams
from octavo.serve.config import EngineConfig
from octavo.serve.inflight import InFlight
from octavo.serve.launch import build_engine
from octavo.serve.queue import QueueFull

MODEL = FOLDER / "llama_tied"
VOCAB = 384
SIZES = {
    "max_num_seqs": 4,
    "max_batch_tokens": 32,
    "max_model_len": 128,
    "num_pages": 40,
    "page_size": 16,
    "artefact_dir": ARTEFACTS,
}


@pytest.fixture(scope="module")
def shared():
    return octavo.LLM(MODEL, **SIZES)


@pytest.fixture
def llm(shared):
    """The shared one, which every test leaves as empty as it found it."""
    yield shared
    assert_empty(shared)


def assert_empty(llm):
    with llm._driver.alone() as engine:
        engine.check()
    stats = llm.engine.stats()
    assert (stats.waiting, stats.running, stats.pages_used) == (0, 0, 0)
    assert llm._driver.idle
    assert not llm._driver._outputs._samples
    for _ in range(3):  # what is in flight for dropped requests
        llm.engine.step()
    assert not llm.engine.has_work()


def greedy(max_tokens=24, **fields):
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **fields)


def seeded(seed, max_tokens=10, **fields):
    return SamplingParams(seed=seed, max_tokens=max_tokens, ignore_eos=True, **fields)


def prompts():
    return [prompt.ids for prompt in reference_of("llama_tied")[0]]


def continuations():
    return [tuple(prompt.greedy) for prompt in reference_of("llama_tied")[0]]


def test_generate_keeps_the_order_of_the_prompts(llm):
    outputs = llm.generate(prompts(), greedy())
    assert [output.prompt_token_ids for output in outputs] == [tuple(p) for p in prompts()]
    assert [output.outputs[0].token_ids for output in outputs] == continuations()
    for output in outputs:
        (sample,) = output.outputs
        assert (sample.index, sample.text, sample.finish_reason) == (0, "", "length")
        assert output.prompt is None


def test_the_longest_are_queued_first_and_seeds_are_drawn_in_the_callers_order(llm, monkeypatch):
    added, add = [], llm.engine.add
    monkeypatch.setattr(llm.engine, "add", lambda asked: (added.append(asked), add(asked))[1])
    monkeypatch.setattr(llm.engine, "_seeds", np.random.default_rng(7))
    drawing = np.random.default_rng(7)
    drawn = [int(drawing.integers(MAX_SEED)) for _ in range(5)]
    lengths = (3, 9, 3, 6, 9)
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in lengths]
    outputs = llm.generate([prompts()[1]] * 5, params)
    assert [len(output.outputs[0].token_ids) for output in outputs] == list(lengths)
    queued = [(asked.params.max_tokens, asked.params.seed) for asked in added]
    assert queued == [(lengths[i], drawn[i]) for i in (1, 4, 3, 0, 2)]
    alone = [llm.generate(prompts()[1], seeded(s, n))[0] for s, n in zip(drawn, lengths)]
    assert [o.outputs[0].token_ids for o in alone] == [o.outputs[0].token_ids for o in outputs]


def test_one_prompt_may_stand_alone_and_be_an_array(llm):
    expected = continuations()[1]
    for prompt in (prompts()[1], np.array(prompts()[1]), tuple(prompts()[1])):
        (output,) = llm.generate(prompt, greedy())
        assert output.outputs[0].token_ids == expected
    assert llm.generate([], greedy()) == []


def test_params_are_one_for_all_or_one_a_prompt(llm):
    outputs = llm.generate(prompts(), [greedy(n) for n in (3, 4, 5)])
    expected = [ids[:n] for ids, n in zip(continuations(), (3, 4, 5))]
    assert [output.outputs[0].token_ids for output in outputs] == expected
    with pytest.raises(ValueError, match="3 prompts but 2 params"):
        llm.generate(prompts(), [greedy()] * 2)


def test_default_params_are_the_models(llm):
    (output,) = llm.generate(prompts()[1])
    assert len(output.outputs[0].token_ids) <= 16
    assert llm.default_params(top_k=3).top_k == 3


def test_n_samples_differ_and_each_is_reproducible(llm):
    (output,) = llm.generate([prompts()[1]], seeded(5, n=3))
    (again,) = llm.generate([prompts()[1]], seeded(5, n=3))
    assert [sample.index for sample in output.outputs] == [0, 1, 2]
    assert len({sample.token_ids for sample in output.outputs}) == 3
    assert output.outputs == again.outputs
    assert llm.generate([prompts()[1]], seeded(5))[0].outputs[0] == output.outputs[0]


def test_progress_is_shown_on_request(llm, capsys):
    llm.generate(prompts(), greedy(4), progress=True)
    assert "3/3" in capsys.readouterr().err
    llm.generate(prompts(), greedy(4))
    assert capsys.readouterr().err == ""


def test_more_prompts_than_may_wait(llm, monkeypatch):
    """A list of any length runs: the engine steps while its queue is full."""
    add, refusals = llm.engine.add, []

    def bounded(request):
        if llm.engine.stats().waiting >= 2:
            refusals.append(request)
            raise QueueFull("full")
        add(request)

    monkeypatch.setattr(llm.engine, "add", bounded)
    outputs = llm.generate([prompts()[1]] * 12, greedy(4))
    assert [output.outputs[0].token_ids for output in outputs] == [continuations()[1][:4]] * 12
    assert refusals


def test_logprobs_of_sampled_and_prompt_tokens(llm):
    reference, std = reference_of("llama_tied")
    prompt = reference[1]
    (output,) = llm.generate([prompt.ids], greedy(5, logprobs=5, prompt_logprobs=5))
    with np.load(MODEL / "reference.npz") as data:
        top_ids, top = data["prompt1_top5_ids"], data["prompt1_top5_logprobs"]
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(prompt.ids)
    for entry, ids, values, token in zip(output.prompt_logprobs[1:], top_ids, top, prompt.ids[1:]):
        assert entry.token_id == token
        assert [id_ for id_, _ in entry.top] == ids.tolist()
        assert np.abs([value for _, value in entry.top] - values).max() <= TOLERANCE * std
    sampled = output.outputs[0].logprobs
    assert [entry.token_id for entry in sampled] == prompt.greedy[:5]
    assert all(entry.rank == 1 and len(entry.top) == 5 for entry in sampled)


def test_score_is_the_reference(llm):
    reference, std = reference_of("llama_tied")
    for prompt in reference:
        logits = llm.score([*prompt.ids, *prompt.greedy[:-1]])
        assert logits.dtype == np.float32
        assert np.abs(logits - prompt.all_logits).max() <= TOLERANCE * std


def test_an_end_of_sequence_id_ends_and_is_reported(llm):
    bias = {2: 100.0}
    (output,) = llm.generate([[5, 6]], SamplingParams(temperature=0, logit_bias=bias))
    sample = output.outputs[0]
    assert (sample.token_ids, sample.finish_reason, sample.stop_reason) == ((2,), "stop", None)
    (output,) = llm.generate([[5, 6]], greedy(logit_bias={9: 100.0}, stop_token_ids=(9,)))
    assert output.outputs[0].stop_reason == 9


# Streams ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [greedy(), seeded(3, n=3)], ids=["greedy", "n"])
def test_stream_deltas_join_to_what_generate_returns(llm, params):
    (whole,) = llm.generate([prompts()[1]], params)
    joined, ends = {}, {}
    for delta in llm.stream(prompts()[1], params):
        assert delta.index not in ends, "news after the end"
        joined.setdefault(delta.index, []).extend(delta.token_ids)
        if delta.finish_reason is not None:
            ends[delta.index] = delta.finish_reason
    assert [tuple(joined[sample.index]) for sample in whole.outputs] == [
        sample.token_ids for sample in whole.outputs
    ]
    assert set(ends.values()) == {"length"}


def test_closing_a_stream_aborts(llm):
    before = llm.engine.stats().finished.get("abort", 0)
    stream = llm.stream(prompts()[1], greedy(100, n=2))
    next(stream)
    assert llm.engine.stats().running == 2
    stream.close()
    assert_empty(llm)
    assert llm.engine.stats().finished["abort"] == before + 2


def test_a_stream_that_nobody_reads_costs_nothing(llm):
    llm.stream(prompts()[1], greedy(100)).close()
    assert_empty(llm)


def test_streams_read_in_turns_lose_nothing(llm):
    streams = [llm.stream(prompt, greedy()) for prompt in prompts()]
    found = [[] for _ in streams]
    for turn in itertools.zip_longest(*streams):
        for tokens, delta in zip(found, turn):
            tokens.extend(delta.token_ids if delta else ())
    assert [tuple(tokens) for tokens in found] == continuations()


def test_generate_while_a_stream_is_open(llm):
    stream = llm.stream(prompts()[2], greedy())
    tokens = list(next(stream).token_ids)
    (output,) = llm.generate([prompts()[1]], greedy())
    assert output.outputs[0].token_ids == continuations()[1]
    for delta in stream:
        tokens.extend(delta.token_ids)
    assert tuple(tokens) == continuations()[2]


# Refusals and failures --------------------------------------------------------------------------

BAD = [
    ([], greedy(), "at least one token"),
    ([5, VOCAB], greedy(), f"0 .. {VOCAB - 1}"),
    ([-1], greedy(), "outside the vocabulary"),
    ([5] * 129, greedy(0), "129 tokens; the context holds 128"),
    ([5] * 120, greedy(20), "128"),
    ([5.5, 6], greedy(), "a list of token ids"),
    ([[5, 6]], greedy(), "a list of token ids"),
    ("text", greedy(), "no tokenizer files: give prompts as token ids"),
    ([5], greedy(stop=("x",)), "stop strings need a tokenizer"),
    ([5], greedy(stop_token_ids=(VOCAB,)), "stop_token_ids"),
    ([5], greedy(n=4, logit_bias={VOCAB: 1.0}), "logit_bias"),
]


@pytest.mark.parametrize(("prompt", "params", "message"), BAD)
def test_a_bad_prompt_among_good_ones_leaves_nothing_behind(llm, prompt, params, message):
    with pytest.raises(ValueError, match=message):
        llm.generate([prompts()[0], prompt, prompts()[1]], [greedy(), params, greedy()])
    assert_empty(llm)


@pytest.mark.parametrize("params", [greedy(n=3, stop=("x",)), greedy(200)])
def test_a_refused_stream_leaves_nothing_behind(llm, params):
    with pytest.raises(ValueError, match=r"tokenizer|128"):
        next(llm.stream(prompts()[0], params))
    assert_empty(llm)


def test_chat_needs_a_tokenizer(llm):
    with pytest.raises(ValueError, match="llama_tied has no tokenizer files"):
        llm.chat([{"role": "user", "content": "hello"}])


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_a_failed_step_loses_its_requests_and_nothing_else(llm, monkeypatch, error):
    stream = llm.stream(prompts()[2], greedy())
    next(stream)

    def fail(*args):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(InFlight, "read", fail)
        with pytest.raises(error):
            llm.generate(prompts(), greedy())
    assert [delta.finish_reason for delta in stream][-1] == "error"
    assert_empty(llm)
    assert llm.generate(prompts(), greedy())[1].outputs[0].token_ids == continuations()[1]


@pytest.fixture
def default_sigint():
    """Python's own handler: a job that a shell put in the background starts with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("default_sigint")
def test_ctrl_c_waits_for_the_end_of_the_step(llm, monkeypatch):
    """Interrupted in mid-step, a call leaves whole steps behind: no request fails for it."""
    failed = llm.engine.stats().finished.get("error", 0)
    whole = InFlight.read

    def interrupted(self):
        signal.raise_signal(signal.SIGINT)
        return whole(self)

    with monkeypatch.context() as patch:
        patch.setattr(InFlight, "read", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(prompts()[1:2], greedy())
    assert_empty(llm)
    assert llm.engine.stats().finished.get("error", 0) == failed
    assert llm.generate(prompts(), greedy())[2].outputs[0].token_ids == continuations()[2]


@pytest.mark.usefixtures("default_sigint")
def test_a_second_ctrl_c_does_not_wait():
    signals = []

    def send_twice():
        with interrupts_deferred() as deferral:
            for number in (1, 2, 3):
                signals.append(number)
                signal.raise_signal(signal.SIGINT)
            with deferral.urgent():
                signals.append(4)
                signal.raise_signal(signal.SIGINT)
                signals.append("not reached")

    with pytest.raises(KeyboardInterrupt):
        send_twice()
    assert signals == [1, 2, 3, 4]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_settings_are_checked_before_anything_is_loaded():
    with pytest.raises(ValueError, match="unknown setting 'max_num_seq'; did you mean max_num_seq"):
        octavo.LLM(MODEL, max_num_seq=3)
    with pytest.raises(ValueError, match="page_size must be one of 16, 32, 64, 128"):
        octavo.LLM(MODEL, page_size=48)
    with pytest.raises(ValueError, match="no model at 'no-such-model'"):
        octavo.LLM("no-such-model")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_pages": 10**9}, r"num_pages=1000000000 takes 1000000000 pages x \d+ B = "),
        ({"num_pages": 3}, "max_model_len=128 needs 9 pages of 16 tokens"),
        ({"max_batch_tokens": 2}, "max_batch_tokens=2 must be at least max_num_seqs=4"),
        ({"mesh": "tensor=64"}, "needs 64 devices"),
    ],
)
def test_what_cannot_fit_is_refused_with_the_arithmetic(fields, message):
    with pytest.raises(ValueError, match=message):
        octavo.LLM(MODEL, **{**SIZES, **fields})


def test_a_config_file_configures_and_keywords_win(tmp_path):
    path = tmp_path / "config.py"
    path.write_text(
        "def get_config():\n    return " + repr({**SIZES, "model": str(MODEL), "num_pages": 9})
    )
    llm = octavo.LLM(config=path, num_pages=40)
    assert llm.config.num_pages == 40
    assert llm.generate([prompts()[1]], greedy(4))[0].outputs[0].token_ids == continuations()[1][:4]


@pytest.mark.parametrize(
    ("serving", "fields", "found"),
    [
        (False, {}, "nothing"),
        (True, {}, "common"),
        (False, {"warmup": "common"}, "common"),
        (True, {"warmup": "lazy"}, "nothing"),
    ],
)
def test_warm_up_on_a_cpu(serving, fields, found):
    engine = build_engine(EngineConfig(str(MODEL), **SIZES, **fields), serving=serving)
    common = set(engine.runner.builder.common_keys())
    ready = {key for key, _ in engine.runner.programs.items()}
    assert ready == (common if found == "common" else set())


LEAVE = """
import jax, jax.numpy as jnp
from octavo.serve import inflight
slow = jax.jit(lambda x: jax.lax.fori_loop(0, 300, lambda i, y: jnp.sin(y @ y), x))
x = jnp.ones((600, 600))
program = slow.lower(x).compile()
inflight.fetch(program(x))
"""


def test_a_process_that_ends_in_the_middle_of_a_step_ends_well():
    """As after Ctrl-C: without waiting for the step's answer jax aborts the process."""
    done = subprocess.run([sys.executable, "-c", LEAVE], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
