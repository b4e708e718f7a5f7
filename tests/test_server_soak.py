"""A short soak of `octavo serve` with a two-layer llama; `octavo bench soak` is the long one."""

import json
from collections import Counter
from pathlib import Path

import pytest
from tiny import ARTEFACTS

from octavo.bench import soak
from octavo.bench.soak_cases import Case, good_cases
from octavo.bench.soak_client import MANNERS, Soak
from octavo.bench.soak_judge import content, same

GGUF = Path(__file__).parent / "data" / "gguf" / "tiny-llama-q8_0.gguf"
REQUESTS = 120
FEW_PROGRAMS = ("--max_num_seqs=4", "--max_batch_tokens=64")
"""Where they must be compiled first, that is most of this test's time."""


def test_nothing_is_lost_crossed_or_left_behind():
    flags = [f"--model={GGUF}", f"--artefact_dir={ARTEFACTS}", *FEW_PROGRAMS]
    with soak.serving(flags) as server:
        found = soak.soak(server, REQUESTS, at_once=24, copies=1, seed=7)
    assert found["examples"] == []
    assert found["at_rest"]
    further = len(found["mib_per_1000"]) - 1
    assert sum(found["ends"].values()) == found["requests"] == REQUESTS + further * REQUESTS // 4
    assert set(found["ends"]) == {*MANNERS, "refused"}


# The judge can tell


STREAM = b'data: {"choices": [%s], "usage": null}\n\n'
END = b'data: {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 2}}\n\n'
DONE = b"data: [DONE]\n\n"
CASE = Case("c", "/v1/completions", {})


def chunk(text, reason=b"null", index=0):
    return STREAM % (b'{"index": %d, "text": "%s", "finish_reason": %s}' % (index, text, reason))


def test_a_stream_says_what_the_whole_answer_says():
    data = chunk(b"a") + chunk(b"b", b'"stop"') + END + DONE
    whole = b'{"choices": [{"index": 0, "text": "ab", "finish_reason": "stop"}], "usage": '
    whole += b'{"prompt_tokens": 1, "completion_tokens": 2}}'
    expected = content(CASE, whole, streamed=False)
    assert content(CASE, data, streamed=True) == expected == ([["ab", [], [], "stop"]], [1, 2])


@pytest.mark.parametrize(
    "data",
    [
        chunk(b"a", b'"stop"') + END,
        chunk(b"a", b'"stop"') + DONE,
        chunk(b"a") + END + DONE,
        chunk(b"a", b'"stop"') + chunk(b"a", index=1) + END + DONE,
        chunk(b"a", b'"stop"') + END + DONE + chunk(b"a"),
        b'data: {"error": {"message": "m"}}\n\n' + DONE,
    ],
)
def test_a_stream_that_is_not_whole_is_noticed(data):
    with pytest.raises(ValueError, match="c: "):
        content(CASE, data, streamed=True)


def event(kind, **fields):
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode()


USAGE = {"input_tokens": 1, "cache_read_input_tokens": 2, "output_tokens": 2}
MESSAGE = {"content": [], "stop_reason": None, "usage": {"output_tokens": 0}}
MESSAGE_EVENTS = [
    event("message_start", message=MESSAGE),
    event("content_block_start", index=0, content_block={"type": "text", "text": ""}),
    event("content_block_delta", index=0, delta={"type": "text_delta", "text": "a"}),
    event("content_block_delta", index=0, delta={"type": "text_delta", "text": "b"}),
    event("content_block_stop", index=0),
    event("message_delta", delta={"stop_reason": "end_turn"}, usage=USAGE),
    event("message_stop"),
]
RESPONSE = {"output": [{"content": [{"text": "ab"}]}], "status": "completed"}
RESPONSE |= {"usage": {"input_tokens": 3, "output_tokens": 2}}
RESPONSE_EVENTS = [
    event("response.created", response={}),
    event("response.output_text.delta", delta="a"),
    event("response.output_text.delta", delta="b"),
    event("response.completed", response=RESPONSE),
]
NAMED = {"/v1/messages": MESSAGE_EVENTS, "/v1/responses": RESPONSE_EVENTS}


@pytest.mark.parametrize("path", NAMED)
def test_named_events_say_what_the_whole_answer_says(path):
    case, events = Case("c", path, {}), NAMED[path]
    block = {"content": [{"text": "ab"}], "stop_reason": "end_turn", "usage": USAGE}
    whole = block if path == "/v1/messages" else RESPONSE
    expected = content(case, json.dumps(whole).encode(), streamed=False)
    assert content(case, b"".join(events), streamed=True) == expected
    assert (expected[0], expected[2]) == (["ab"], [3, 2])
    with pytest.raises(ValueError, match="did not end"):
        content(case, b"".join(events[:-1]), streamed=True)
    without = b"".join(one for one in events if b'"a"' not in one)
    if path == "/v1/messages":
        assert not same(content(case, without, streamed=True), expected)
    else:
        with pytest.raises(ValueError, match="the deltas say 'b'"):
            content(case, without, streamed=True)


def test_numbers_may_move_by_rounding_and_no_more():
    def scored(logprob, vector=(0.25, 0.5)):
        row = {"token_ids": [1], "is_greedy": True, "score": logprob, "token_logprobs": [logprob]}
        rows = json.dumps({"data": [row, {"embedding": list(vector)}]})
        return content(Case("c", "/v1/score", {}), rows.encode(), streamed=False)

    assert same(scored(-1.5), scored(-1.5002))
    assert not same(scored(-1.5), scored(-1.51))
    assert not same(scored(-1.5), scored(-1.5, (0.25, 0.51)))
    assert not same(scored(-1.5), scored(-1.5, (0.25,)))
    assert not same([[1], True], [[True], True])


def test_log_probabilities_are_judged_however_they_come():
    one = {"text": "a", "finish_reason": "stop", "index": 0}
    plain = {**one, "logprobs": {"token_logprobs": [None, -0.5]}}
    chat = {**one, "logprobs": {"content": [{"logprob": -0.5}]}}
    for choice in (plain, chat):
        usage = {"prompt_tokens": 1, "completion_tokens": 2}
        whole = json.dumps({"choices": [choice], "usage": usage}).encode()
        told = content(CASE, whole, streamed=False)
        assert told == ([["a", [], [-0.5], "stop"]], [1, 2])
        data = b"data: %s\n\n" % json.dumps({"choices": [choice]}).encode()
        assert content(CASE, data + END + DONE, streamed=True) == told


def test_another_requests_answer_is_named():
    judge = Soak(0, [], [], {"c": "mine", "d": "theirs"})
    judge._judge(CASE, "mine", "reads")
    judge._judge(CASE, "theirs", "reads")
    assert judge.tally.ends == Counter(reads=1)
    assert judge.tally.faults == ["c: theirs instead of mine (that is the answer to ['d'])"]


def test_cases_are_the_same_each_time_and_differ_from_each_other():
    cases = good_cases(3)
    assert cases == good_cases(3)
    assert len({case.payload(1, stream=False) for case in cases}) == len(cases)
