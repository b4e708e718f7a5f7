"""Prompts at the context's edge: one token less, exactly as long, one more; on every endpoint."""

import pytest
from mock_server import running
from test_llm import MODEL, SIZES, assert_empty, greedy

import octavo

LIMIT = 256
COMPLETIONS, CHAT, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/messages"
RESPONSES = "/v1/responses"
FRAME = len("user:\nassistant:")  # what the mock's template puts around a message


@pytest.fixture(scope="module")
def srv():
    with running(engine={"max_model_len": LIMIT}) as server:
        yield server


@pytest.fixture(scope="module")
def llm():
    return octavo.LLM(MODEL, **SIZES)


def post(srv, path, tokens, **fields):
    """Status and answer to a prompt of exactly so many tokens."""
    body = {"model": "mock", "temperature": 0, **fields}
    turn = {"role": "user", "content": "a" * (tokens - FRAME)}
    if path == COMPLETIONS:
        body["prompt"] = "a" * tokens
    elif path == RESPONSES:
        body["input"] = [turn]
        body["max_output_tokens"] = body.pop("max_tokens", None)
    else:
        body["messages"] = [turn]
    status, _, answer = srv.post(path, body)
    return status, answer


def counted(path, answer):
    """Why the answer ended, and its tokens."""
    usage = answer["usage"]
    if path in (COMPLETIONS, CHAT):
        (reason,) = {choice["finish_reason"] for choice in answer["choices"]}
        return reason, usage["completion_tokens"]
    reason = answer.get("stop_reason") or (answer.get("incomplete_details") or {}).get("reason")
    return reason, usage["output_tokens"]


CUT = {MESSAGES: "max_tokens", RESPONSES: "max_output_tokens"}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, MESSAGES, RESPONSES])
def test_the_last_place_is_given_out_and_not_one_more(srv, path):
    for left in (1, 2, 5):
        status, answer = post(srv, path, LIMIT - left, max_tokens=left)
        assert (status, *counted(path, answer)) == (200, CUT.get(path, "length"), left)
        assert post(srv, path, LIMIT - left, max_tokens=left + 1)[0] == 400
    for tokens in (LIMIT, LIMIT + 1):
        status, answer = post(srv, path, tokens, max_tokens=1)
        assert status == 400
        assert str(tokens) in answer["error"]["message"]
        assert str(LIMIT) in answer["error"]["message"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, RESPONSES])
def test_what_is_left_is_the_default(srv, path):
    status, answer = post(srv, path, LIMIT - 1)
    assert (status, *counted(path, answer)) == (200, CUT.get(path, "length"), 1)
    for tokens in (LIMIT, LIMIT + 1):
        assert post(srv, path, tokens)[0] == 400


@pytest.mark.parametrize("extra", [{}, {"echo": True}, {"prompt_logprobs": 0}, {"logprobs": 1}])
def test_samples_echo_and_logprobs_change_nothing(srv, extra):
    fields = {"n": 3, "temperature": 1, "max_tokens": 2, **extra}
    status, answer = post(srv, COMPLETIONS, LIMIT - 2, **fields)
    assert (status, *counted(COMPLETIONS, answer)) == (200, "length", 6)
    assert post(srv, COMPLETIONS, LIMIT - 1, **fields)[0] == 400


def test_a_prompt_that_fills_the_context_can_be_scored(srv):
    scored = {"max_tokens": 0, "echo": True, "logprobs": 1}
    status, answer = post(srv, COMPLETIONS, LIMIT, **scored)
    assert (status, *counted(COMPLETIONS, answer)) == (200, "length", 0)
    assert len(answer["choices"][0]["logprobs"]["tokens"]) == LIMIT
    assert post(srv, COMPLETIONS, LIMIT + 1, **scored)[0] == 400


def test_truncation_counts_before_the_limit(srv):
    for keep, most in ((LIMIT - 1, 1), (LIMIT, 0), (5, LIMIT - 5)):
        fields = {"truncate_prompt_tokens": keep}
        status, answer = post(srv, COMPLETIONS, 3 * LIMIT, max_tokens=most, **fields)
        assert (status, *counted(COMPLETIONS, answer)) == (200, "length", most)
        assert answer["usage"]["prompt_tokens"] == LIMIT - most
        assert post(srv, COMPLETIONS, 3 * LIMIT, max_tokens=most + 1, **fields)[0] == 400
    for most in (0, 1, LIMIT - 1):
        fields = {"truncate_prompt_tokens": -1, "max_tokens": most}
        status, answer = post(srv, COMPLETIONS, 3 * LIMIT, **fields)
        assert (status, *counted(COMPLETIONS, answer)) == (200, "length", most)
        assert answer["usage"]["prompt_tokens"] == LIMIT - most
    assert (
        post(srv, COMPLETIONS, LIMIT + 1, max_tokens=0, truncate_prompt_tokens=LIMIT + 1)[0] == 400
    )


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("prompt_logprobs", [None, 0])
def test_the_engine_itself(llm, n, prompt_logprobs):
    most = SIZES["max_model_len"]
    for tokens in (most - 1, most - 2):
        params = greedy(most - tokens, n=n, prompt_logprobs=prompt_logprobs)
        (output,) = llm.generate([[5] * tokens], params)
        assert [len(sample.token_ids) for sample in output.outputs] == [most - tokens] * n
        assert {sample.finish_reason for sample in output.outputs} == {"length"}
        with pytest.raises(ValueError, match=str(most)):
            llm.generate([[5] * (tokens + 1)], params)
    (output,) = llm.generate([[5] * (most - 1)], greedy(None, n=n))
    assert [len(sample.token_ids) for sample in output.outputs] == [1] * n
    for tokens in (most, most + 1):
        with pytest.raises(ValueError, match=str(most)):
            llm.generate([[5] * tokens], greedy(None))
    assert llm.score([5] * most).shape[0] == most
    with pytest.raises(ValueError, match=str(most)):
        llm.score([5] * (most + 1))
    assert_empty(llm)
