"""/v1/embeddings and LLM.embed: the HTTP surface over the mock, the numbers on a tiny model."""

import base64

import jax.numpy as jnp
import numpy as np
import openai
import pytest
from family_data import FOLDER
from hypothesis import given
from hypothesis import strategies as st
from mock_server import running
from tiny import ARTEFACTS, drain, tiny_config, tiny_engine, tiny_params

from octavo.llm import LLM
from octavo.model.forward import forward
from octavo.sampling.params import SamplingParams
from octavo.serve.embedding import PROMPT_ONLY, unit_vector
from octavo.serve.types import Request


@pytest.fixture(scope="module")
def srv():
    with running(pooling="mean") as server:
        yield server


def unit(*values):
    return pytest.approx(np.array(values) / np.linalg.norm(values), abs=1e-6)


def embed(srv, value, **fields):
    return srv.post("/v1/embeddings", {"model": "mock", "input": value, **fields})


@pytest.mark.parametrize(
    ("value", "vectors"),
    [
        ("ab", [(2, 97, 98)]),
        (["ab", "c"], [(2, 97, 98), (1, 99, 99)]),
        ([97, 98], [(2, 97, 98)]),
        ([[97, 98], [99]], [(2, 97, 98), (1, 99, 99)]),
    ],
)
def test_every_form_of_input(srv, value, vectors):
    body = srv.good(embed(srv, value))
    assert body["object"] == "list"
    assert body["model"] == "mock"
    assert [item["index"] for item in body["data"]] == list(range(len(vectors)))
    for item, vector in zip(body["data"], vectors):
        assert item["object"] == "embedding"
        assert item["embedding"] == unit(*vector)
    tokens = sum(vector[0] for vector in vectors)
    assert body["usage"]["prompt_tokens"] == body["usage"]["total_tokens"] == tokens


def test_pooling_and_encoding(srv):
    body = srv.good(embed(srv, "ab", pooling="last", encoding_format="base64"))
    raw = base64.b64decode(body["data"][0]["embedding"])
    assert np.frombuffer(raw, "<f4") == unit(2, 0, 98)


def test_the_openai_client_reads_many_at_once(srv):
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{srv.port}/v1", api_key="none")
    answer = client.embeddings.create(model="mock", input=["a" * n for n in range(1, 65)])
    assert len(answer.data) == 64
    assert answer.data[63].embedding == unit(64, 97, 97)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({}, "input", "string"),
        ({"input": []}, "input", "empty"),
        ({"input": ""}, "input", "at least one token"),
        ({"input": [""]}, "input", "at least one token"),
        ({"input": ["a", 3]}, "input", "input[1]"),
        ({"input": [300]}, "input", "0 .. 299"),
        ({"input": [-1]}, "input", "0 .. 299"),
        ({"input": "a" * 2049}, "input", "2048"),
        ({"input": ["a"] * 2049}, "input", "2048"),
        ({"input": {"text": "a"}}, "input", "string"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "base64"),
        ({"input": "a", "pooling": "max"}, "pooling", "mean"),
        ({"input": "a", "dimensions": 2}, "dimensions", "cut short"),
        ({"input": "a", "cache_salt": ""}, "cache_salt", "empty"),
        ({"input": "a", "temperature": 1}, "temperature", "unknown"),
    ],
)
def test_bad_embedding_requests(srv, fields, param, words):
    status, _, body = srv.post("/v1/embeddings", fields)
    assert status == 400
    assert body["error"]["param"] == param
    assert words in body["error"]["message"]


def test_an_unknown_model_and_a_failing_engine(srv):
    assert embed(srv, "a", model="other")[0] == 404
    status, _, body = embed(srv, ["ok", "<|boom|>"])
    assert (status, body["error"]["type"]) == (500, "server_error")
    srv.wait(srv.idle)
    assert srv.good(embed(srv, "ab"))["data"][0]["embedding"] == unit(2, 97, 98)


# Scores ------------------------------------------------------------------------------------------


def score(srv, prompt, continuations, **fields):
    body = {"prompt": prompt, "continuations": continuations, **fields}
    return srv.post("/v1/score", {k: v for k, v in body.items() if v is not None})


def test_scores_of_texts_and_ids(srv):
    body = srv.good(score(srv, "ab", ["cd", "e"]))
    first, second = body["data"]
    # The mock gives prompt token i > 0 the log-probability -i/10.
    assert first["token_logprobs"] == pytest.approx([-0.2, -0.3])
    assert first["score"] == pytest.approx(-0.5)
    assert (first["tokens"], first["token_ids"]) == (["c", "d"], [99, 100])
    assert (second["index"], second["score"], second["is_greedy"]) == (1, pytest.approx(-0.2), True)
    assert body["usage"]["prompt_tokens"] == 4 + 3
    assert body["id"].startswith("score-")
    ids = srv.good(score(srv, [97, 98], [[99, 100], [101]]))
    assert [item["score"] for item in ids["data"]] == [first["score"], second["score"]]
    aliases = srv.good(srv.post("/v1/score", {"text_1": "ab", "text_2": "cd"}))
    assert aliases["data"][0]["score"] == first["score"]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"continuations": "a"}, "prompt", "prompt or text_1"),
        ({"prompt": "a"}, "continuations", "continuations or text_2"),
        ({"prompt": "a", "text_1": "b", "text_2": "c"}, "prompt", "either"),
        ({"prompt": ["a", "b"], "continuations": "c"}, "prompt", "one prompt"),
        ({"prompt": "a", "continuations": [[1]]}, "continuations", "texts for a text"),
        ({"prompt": "a", "continuations": ""}, "continuations", "at least one token"),
        ({"prompt": "", "continuations": "a"}, "prompt", "at least one token"),
        ({"prompt": [1], "continuations": [[300]]}, "continuations", "0 .. 299"),
        ({"prompt": "a" * 2000, "continuations": "b" * 49}, "prompt", "2049 tokens"),
        ({"prompt": "a", "continuations": "b", "max_tokens": 1}, "max_tokens", "unknown"),
    ],
)
def test_bad_score_requests(srv, fields, param, words):
    status, _, body = srv.post("/v1/score", fields)
    assert (status, body["error"]["param"]) == (400, param)
    assert words in body["error"]["message"]


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_evaluation_harnesses_read_the_same_scores_from_echoed_completions(srv, max_tokens):
    """What lm-eval's API models send and how they read it: rows of ids, context lengths known."""
    pairs = [([97, 98], [99, 100]), ([97], [98, 99, 100])]
    fields = {"echo": True, "logprobs": 1, "seed": 1234, "max_tokens": max_tokens}
    body = srv.good(srv.complete([before + after for before, after in pairs], **fields))
    choices = sorted(body["choices"], key=lambda choice: choice["index"])
    for (before, after), choice in zip(pairs, choices, strict=True):
        end = len(before) + len(after)
        logprobs = choice["logprobs"]
        values = logprobs["token_logprobs"][len(before) : end]
        tops = logprobs["top_logprobs"][len(before) : end]
        (scored,) = srv.good(score(srv, before, [after]))["data"]
        assert values == scored["token_logprobs"]
        assert all(v == max(t.values()) for v, t in zip(values, tops)) == scored["is_greedy"]


# The engine --------------------------------------------------------------------------------------


def states(ids):
    """Final hidden states f32[T, E] by the plain forward: its head is made the identity."""
    config = tiny_config()
    padded = jnp.zeros(100, jnp.int32).at[: len(ids)].set(jnp.asarray(ids))  # one shape to compile
    params = {**tiny_params(), "head": jnp.eye(config.hidden_size, config.vocab_size)}
    return np.asarray(forward(config, params, padded))[: len(ids), : config.hidden_size]


def prompt_of(length, seed):
    return tuple(np.random.default_rng(seed).integers(4, 160, length).tolist())


def embedding_request(name, prompt, pooling):
    return Request(name, prompt, PROMPT_ONLY, pooling=pooling)


def expected(prompt, pooling):
    hidden = states(prompt)
    return hidden[-1] if pooling == "last" else hidden.mean(0)


def check_embedding(event, prompt, pooling):
    assert event.finish_reason == "length"
    found = np.frombuffer(event.embedding, "<f4")
    np.testing.assert_allclose(found, expected(prompt, pooling), rtol=2e-5, atol=2e-5)


def test_pooled_states_in_chunks_and_company_are_those_of_the_plain_forward():
    engine = tiny_engine()
    engine.add(Request("talk", prompt_of(20, 9), SamplingParams(temperature=0.0, max_tokens=30)))
    cases = [(length, pooling) for length in (1, 16, 33, 100) for pooling in ("mean", "last")]
    for index, (length, pooling) in enumerate(cases):
        engine.add(embedding_request(str(index), prompt_of(length, index), pooling))
    tokens, ends = drain(engine)
    assert len(tokens["talk"]) == 30
    for index, (length, pooling) in enumerate(cases):
        assert tokens[str(index)] == []
        check_embedding(ends[str(index)], prompt_of(length, index), pooling)
    engine.check()
    assert engine.stats().pages_used == 0


def test_a_cached_prefix_serves_the_last_token_and_not_the_mean():
    engine, prompt = tiny_engine(), prompt_of(65, 1)  # the last one comes alone
    for name, pooling, cached in (("a", "last", 0), ("b", "last", 64), ("c", "mean", 0)):
        engine.add(embedding_request(name, prompt, pooling))
        _, ends = drain(engine)
        assert ends[name].cached_tokens == cached
        check_embedding(ends[name], prompt, pooling)


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_log_probabilities_of_a_prompt_come_with_its_embedding(pooling):
    engine, prompt = tiny_engine(), prompt_of(40, 6)  # two chunks
    params = SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=1)
    engine.add(Request("both", prompt, params, pooling=pooling))
    engine.add(Request("scored", prompt, params))
    _, ends = drain(engine)
    check_embedding(ends["both"], prompt, pooling)
    both, scored = ([e.logprob for e in ends[n].prompt_logprobs[1:]] for n in ("both", "scored"))
    assert both == pytest.approx(scored, abs=1e-5)


def test_a_preempted_mean_counts_each_token_once():
    engine = tiny_engine(num_pages=12, max_batch_tokens=5, max_decode_steps=1)
    talk = SamplingParams(temperature=0.0, max_tokens=70)
    engine.add(Request("talk", prompt_of(47, 2), talk))
    prompt = prompt_of(100, 3)
    engine.add(embedding_request("mean", prompt, "mean"))
    _, ends = drain(engine)
    assert ends["mean"].preemptions > 0
    check_embedding(ends["mean"], prompt, "mean")


@pytest.mark.parametrize(("pooling", "most"), [("max", 0), ("mean", 1), ("last", None)], ids=str)
def test_the_engine_refuses_other_poolings_and_generating(pooling, most):
    params = SamplingParams(max_tokens=most)
    with pytest.raises(ValueError, match="pooling"):
        tiny_engine().add(Request("x", (5,), params, pooling=pooling))


def test_states_that_are_not_finite_fail_their_request_alone():
    params = tiny_params()
    bad = {**params, "embed": params["embed"].at[7].set(jnp.nan)}
    engine = tiny_engine(params=bad)
    engine.add(embedding_request("bad", (5, 7), "mean"))
    engine.add(embedding_request("good", (5, 6), "mean"))
    _, ends = drain(engine)
    assert (ends["bad"].finish_reason, ends["bad"].embedding) == ("error", None)
    check_embedding(ends["good"], (5, 6), "mean")


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=9))
def test_vectors_have_length_one_or_zero(values):
    vector = unit_vector(np.array(values, "<f4").tobytes())
    length = np.linalg.norm(vector.astype(float))
    assert length == pytest.approx(1, abs=1e-5) or np.abs(values).max() < 1e-29


def test_llm_embed_beside_a_stream():
    llm = LLM(
        str(FOLDER.parent / "gguf" / "tiny-llama-q8_0.gguf"),
        max_num_seqs=2,
        max_batch_tokens=32,
        max_model_len=128,
        num_pages=20,
        artefact_dir=ARTEFACTS,
    )
    texts = ["hello world", "hello", "once more, and again"]
    alone = [llm.embed(text, "mean") for text in texts]
    stream = llm.stream("hello", SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True))
    first = next(stream)
    together = llm.embed(texts, "mean")
    assert together.shape == (3, llm.engine.model_config.hidden_size)
    np.testing.assert_allclose(np.linalg.norm(together, axis=1), 1, atol=1e-6)
    np.testing.assert_allclose(together, np.concatenate(alone), atol=1e-5)
    made = len(first.token_ids) + sum(len(item.token_ids) for item in stream)
    assert made == 6
    assert not np.allclose(llm.embed(texts), together)
    assert llm.embed([]).shape[0] == 0
    with pytest.raises(ValueError, match="pooling"):
        llm.embed("x", "max")
    with pytest.raises(ValueError, match="at least one token"):
        llm.embed([[5], []])
    assert not llm.engine.has_work()


def test_the_continuations_of_a_long_prompt_are_bounded_together():
    """Each has a copy of the prompt: a few hundred kilobytes asked for gigabytes."""
    with running(engine={"max_model_len": 8192, "tame": True}) as server:
        for prompt, continuations in (("a" * 4000, ["b"] * 2048), ([97] * 4000, [[98]] * 2048)):
            status, _, body = score(server, prompt, continuations)
            message = body["error"]["message"]
            assert (status, body["error"]["param"]) == (400, "prompt")
            assert message.startswith("prompt: 2048 continuations of 4000 tokens are 8192000, at ")
            assert len(server.good(score(server, prompt, continuations[:20]))["data"]) == 20
