"""The OpenAI surface through the real process hop, against outputs worked out by hand.

The mock engine repeats the prompt, so "abc" is continued by "abcabc...".
"""

import asyncio
import json
import re
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from mock_engine import EOS, WAITS, ByteTokenizer
from mock_server import running

from octavo.sampling.params import SamplingParams
from octavo.serve.call import Call
from octavo.serve.choice import Wanted
from octavo.serve.detokenize import TokenTable
from octavo.serve.errors import ApiError
from octavo.serve.generation import Generation
from octavo.serve.metrics import Recorder
from octavo.serve.objects import Identity
from octavo.serve.prompts import Prompt
from octavo.serve.types import Request, TokenEvent


@pytest.fixture(scope="module")
def srv():
    with running() as server:
        yield server


def text(body, i=0):
    return body["choices"][i]["text"]


def content(body, i=0):
    return body["choices"][i]["message"]["content"]


def calling(calls):
    return {"role": "assistant", "content": "x", "tool_calls": calls}


# Completions -------------------------------------------------------------------------------------


def test_completion_object(srv):
    body = srv.good(srv.complete("abc", max_tokens=5))
    (choice,) = body["choices"]
    assert choice == {
        "index": 0,
        "text": "abcab",
        "logprobs": None,
        "finish_reason": "length",
        "stop_reason": None,
    }
    assert body["object"] == "text_completion"
    assert body["model"] == "mock"
    assert body["id"].startswith("cmpl-")
    assert body["system_fingerprint"].startswith("octavo-")
    assert body["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 5,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 1},
    }


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("ab", ["abab"]),
        (["ab", "c"], ["abab", "cccc"]),
        ([97, 98], ["abab"]),
        ([[97, 98], [99]], ["abab", "cccc"]),
    ],
)
def test_prompt_forms(srv, prompt, texts):
    body = srv.good(srv.complete(prompt, max_tokens=4))
    assert [c["text"] for c in body["choices"]] == texts
    assert [c["index"] for c in body["choices"]] == list(range(len(texts)))


def test_n_samples_and_usage(srv):
    body = srv.good(
        srv.complete(["abc", "xyz"], n=2, temperature=1, seed=1, max_tokens=3, logprobs=0)
    )
    assert [c["text"] for c in body["choices"]] == ["bca", "cab", "yzx", "zxy"]
    assert body["usage"]["prompt_tokens"] == 6
    assert body["usage"]["completion_tokens"] == 12


def test_default_max_tokens_is_16_or_what_is_left(srv):
    assert srv.good(srv.complete("a", max_tokens=None))["usage"]["completion_tokens"] == 16
    nearly = srv.good(srv.complete("a" * 2040, max_tokens=None))
    assert nearly["usage"]["completion_tokens"] == 8


@pytest.mark.parametrize(
    ("fields", "want", "reason", "stop"),
    [
        ({"stop": "ca"}, "ab", "stop", "ca"),
        ({"stop": ["zz", "bca"]}, "a", "stop", "bca"),
        ({"stop": "ca", "include_stop_str_in_output": True}, "abca", "stop", "ca"),
        ({"stop_token_ids": [99]}, "ab", "stop", 99),
        ({"stop_token_ids": [99], "min_tokens": 4}, "abcab", "stop", 99),
        ({"stop": "zz"}, "abcabcab", "length", None),
        ({"logit_bias": {"120": 5}, "max_tokens": 3}, "xxx", "length", None),
    ],
)
def test_stops(srv, fields, want, reason, stop):
    (choice,) = srv.good(srv.complete("abc", **fields))["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (want, reason, stop)
    events = srv.stream(
        "/v1/completions", {"prompt": "abc", "max_tokens": 8, "temperature": 0} | fields
    )
    assert "".join(text(e) for e in events[:-1]) == want
    assert events[-2]["choices"][0]["finish_reason"] == reason


def test_end_of_sequence(srv):
    prompt = "hi<|eos|>"
    body = srv.good(srv.complete(prompt))
    assert (text(body), body["choices"][0]["finish_reason"]) == ("hi", "stop")
    assert body["usage"]["completion_tokens"] == 3
    assert text(srv.good(srv.complete(prompt, ignore_eos=True, max_tokens=6))) == "hihi"
    spelled = srv.good(
        srv.complete(prompt, ignore_eos=True, skip_special_tokens=False, max_tokens=4)
    )
    assert text(spelled) == "hi<|eos|>h"


def test_logprobs(srv):
    body = srv.good(srv.complete("aé", max_tokens=4, logprobs=2))
    logprobs = body["choices"][0]["logprobs"]
    assert text(body) == "aéa"
    assert logprobs["tokens"] == ["a", "", "é", "a"]
    assert logprobs["text_offset"] == [0, 1, 1, 2]
    assert logprobs["token_logprobs"] == [-0.1, -0.2, -0.3, -0.4]
    assert logprobs["top_logprobs"][0] == {"a": -0.1, "b": -3.1}
    assert all(len(top) == 2 for top in logprobs["top_logprobs"])


def test_log_probabilities_name_tokens_by_their_ids_on_demand(srv):
    """Those of parts of characters too, which all read alike."""
    asked = {"logprobs": 2, "return_tokens_as_token_ids": True, "echo": True, "max_tokens": 3}
    ids = [f"token_id:{i}" for i in "aé".encode()]
    body = srv.good(srv.complete("aé", **asked))
    logprobs = body["choices"][0]["logprobs"]
    assert text(body) == "aéaé"
    assert logprobs["tokens"] == ids * 2
    assert logprobs["top_logprobs"][3] == {"token_id:97": -0.1, "token_id:98": -3.1}
    events = srv.stream("/v1/completions", {"prompt": "aé", "temperature": 0, **asked})[:-1]
    assert [n for e in events for n in e["choices"][0]["logprobs"]["tokens"]] == ids * 2
    asked = {"logprobs": True, "top_logprobs": 2, "return_tokens_as_token_ids": True}
    first = srv.good(srv.chat("hey", **asked))["choices"][0]["logprobs"]["content"][0]
    assert (first["token"], bytes(first["bytes"])) == (f"token_id:{ord('u')}", b"u")
    assert [top["token"] for top in first["top_logprobs"]] == ["token_id:117", "token_id:118"]


def test_echo_and_logprobs(srv):
    body = srv.good(srv.complete("abc", max_tokens=2, echo=True, logprobs=1))
    logprobs = body["choices"][0]["logprobs"]
    assert text(body) == "abcab"
    assert logprobs["tokens"] == list("abcab")
    assert logprobs["token_logprobs"] == [None, -0.1, -0.2, -0.1, -0.2]
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["text_offset"] == [0, 1, 2, 3, 4]


def test_echo_with_no_tokens_as_evaluation_harnesses_send_it(srv):
    body = srv.good(srv.complete([[97, 98], [99]], max_tokens=0, echo=True, logprobs=1))
    assert [c["text"] for c in body["choices"]] == ["ab", "c"]
    assert body["choices"][0]["logprobs"]["token_logprobs"] == [None, -0.1]
    assert body["choices"][1]["logprobs"]["token_logprobs"] == [None]
    assert body["usage"]["completion_tokens"] == 0
    full = srv.good(srv.complete("a" * 2048, max_tokens=0, echo=True))
    assert text(full) == "a" * 2048


def test_token_ids_and_prompt_logprobs(srv):
    body = srv.good(srv.complete("abc", max_tokens=2, return_token_ids=True, prompt_logprobs=1))
    (choice,) = body["choices"]
    assert choice["prompt_token_ids"] == [97, 98, 99]
    assert choice["token_ids"] == [97, 98]
    assert choice["prompt_logprobs"] == [
        None,
        {"98": {"logprob": -0.1, "rank": 1, "decoded_token": "b"}},
        {"99": {"logprob": -0.2, "rank": 1, "decoded_token": "c"}},
    ]


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"prompt_logprobs": 20, "n": 128, "temperature": 1}, "prompt_logprobs"),
        ({"logprobs": 20, "echo": True, "n": 128, "temperature": 1}, "logprobs"),
        ({"prompt": ["a" * 2000] * 200, "prompt_logprobs": 20}, "prompt_logprobs"),
        ({"prompt": ["a" * 2000] * 2048, "prompt_logprobs": 1, "max_tokens": 0}, "prompt_logprobs"),
    ],
)
def test_log_probabilities_of_prompts_are_bounded(srv, fields, name):
    """A request of two kilobytes asked for half a gigabyte of them."""
    status, _, body = srv.complete(**{"prompt": "a" * 2000, "max_tokens": 1, **fields})
    assert (status, body["error"]["param"]) == (400, name)
    assert "at most 4194304" in body["error"]["message"]


def test_truncation_keeps_the_end(srv):
    body = srv.good(srv.complete("abcdef", truncate_prompt_tokens=2, max_tokens=3, echo=True))
    assert text(body) == "efefe"


@pytest.mark.parametrize(
    ("asked", "kept"), [(5, 2043), (0, 2048), (2047, 1), (None, 2047), (2048, None), (3000, None)]
)
def test_truncation_to_what_the_context_holds_leaves_room_for_the_answer(srv, asked, kept):
    """It was a 400 whenever there was something to cut."""
    fields = {"truncate_prompt_tokens": -1, "max_tokens": asked}
    for text in ("b" * 2000 + "a" * 1000, [98] * 2000 + [97] * 1000):
        status, _, body = srv.complete(text, **fields)
        if kept is None:
            assert status == 400
            assert f"max_tokens is {asked}" in body["error"]["message"]
            continue
        assert status == 200
        usage = body["usage"]
        assert (usage["prompt_tokens"], usage["total_tokens"] <= 2048) == (kept, True)
    said = srv.chat("a" * 3000, **fields | {"max_tokens": asked or 1})
    assert (said[0] == 200) == (kept is not None)
    assert srv.good(srv.complete("ab", truncate_prompt_tokens=-1))["usage"]["prompt_tokens"] == 2


# Chat --------------------------------------------------------------------------------------------


def test_chat_object(srv):
    body = srv.good(srv.chat("hey", max_tokens=4))
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "user", "refusal": None}
    assert choice["finish_reason"] == "length"
    assert body["object"] == "chat.completion"
    assert body["usage"]["prompt_tokens"] == len("user:hey\nassistant:")


def test_chat_parts_roles_and_history(srv):
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [
        {"role": "developer", "content": "be"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "ok"},
    ]
    body = srv.good(srv.chat(messages, max_tokens=60))
    assert content(body).startswith("system:be\nuser:a\nb\nassistant:None\ntool:ok")


def test_chat_template_controls(srv):
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "Sure"}]
    body = srv.good(srv.chat(messages, continue_final_message=True, return_token_ids=True))
    assert bytes(body["prompt_token_ids"]) == b"user:q\nassistant:Sure"
    status, _, error = srv.chat("x", chat_template_kwargs={"fail": True})
    assert (status, error["error"]["param"]) == (400, "messages")
    assert srv.chat("x", chat_template="raise")[0] == 400
    assert srv.chat("x", chat_template_kwargs={"messages": []})[0] == 400
    srv.good(srv.chat("x", chat_template_kwargs={"self": 1, "param": 2, "function": 3}))
    both = srv.chat("x", continue_final_message=True, add_generation_prompt=True)
    assert both[0] == 400


def test_chat_logprobs(srv):
    body = srv.good(srv.chat("hey", max_tokens=3, logprobs=True, top_logprobs=2))
    items = body["choices"][0]["logprobs"]["content"]
    assert [i["token"] for i in items] == list("use")
    assert items[0]["bytes"] == [ord("u")]
    assert [t["token"] for t in items[0]["top_logprobs"]] == ["u", "v"]
    plain = srv.good(srv.chat("hey", max_tokens=3, logprobs=True))
    assert plain["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


def test_chat_logprobs_of_parts_of_a_character_carry_its_bytes(srv):
    messages = [{"role": "é", "content": ""}]
    body = srv.good(srv.complete("é", max_tokens=2, logprobs=0))
    assert body["choices"][0]["logprobs"]["tokens"] == ["", "é"]
    assert srv.chat(messages)[0] == 400
    fields = {"logprobs": True, "max_tokens": 8}
    items = srv.good(srv.chat("é", **fields))["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(i["bytes"]) for i in items) == "user:é\n".encode()
    assert "".join(i["token"] for i in items) == "user:é\n"


# Streams -----------------------------------------------------------------------------------------


def test_completion_stream(srv):
    events = srv.stream(
        "/v1/completions", {"prompt": "aé", "max_tokens": 5, "temperature": 0, "echo": True}
    )
    assert events[-1] == "[DONE]"
    assert [text(e) for e in events[:-1]] == ["aé", "a", "é", "a", "\ufffd"]
    assert [e["choices"][0]["finish_reason"] for e in events[:-1]] == [None] * 4 + ["length"]
    assert len({e["id"] for e in events[:-1]}) == 1


def test_chat_stream_with_usage(srv):
    body = {
        "messages": [{"role": "user", "content": "hey"}],
        "max_tokens": 3,
        "temperature": 0,
        "n": 2,
        "stream_options": {"include_usage": True},
    }
    events = srv.stream("/v1/chat/completions", body)
    assert events[-1] == "[DONE]"
    assert events[-2]["choices"] == []
    assert events[-2]["usage"]["completion_tokens"] == 6
    for index in (0, 1):
        deltas = [e["choices"][0] for e in events[:-2] if e["choices"][0]["index"] == index]
        assert deltas[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(d["delta"].get("content", "") for d in deltas) == "use"
        assert not any("role" in d["delta"] for d in deltas[1:])
        assert [d["finish_reason"] for d in deltas] == [None, None, None, "length"]
    assert all(e["usage"] is None for e in events[:-2])


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_each_event_counts_on_demand(srv, path):
    """Load generators of vLLM's count tokens by it."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    said = {"messages": [{"role": "user", "content": "hey"}], "prompt": "hey"}
    name = "messages" if "chat" in path else "prompt"
    body = {name: said[name], "max_tokens": 3, "n": 2, "stream_options": options}
    *events, last, done = srv.stream(path, body)
    assert done == "[DONE]"
    for index in (0, 1):
        mine = [e for e in events if e["choices"][0]["index"] == index]
        counts = [e["usage"]["completion_tokens"] for e in mine]
        assert counts == sorted(counts)
        assert counts[-1] == 3
        read = last["usage"]["prompt_tokens"]
        assert all(e["usage"]["total_tokens"] == read + n for e, n in zip(mine, counts))
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 6)
    plain = srv.stream(path, {**body, "seed": 1, "stream_options": {"include_usage": True}})
    counted = srv.stream(path, {**body, "seed": 1})
    for one, other in zip(plain[:-2], counted[:-2], strict=True):
        assert one["choices"] == other["choices"]
        assert (one["usage"], one.keys()) == (None, other.keys())


def test_stream_logprobs_follow_held_back_text(srv):
    body = {"prompt": "abc", "max_tokens": 7, "temperature": 0, "logprobs": 0, "stop": "cabx"}
    events = srv.stream("/v1/completions", body)[:-1]
    for event in events:
        logprobs = event["choices"][0]["logprobs"]
        assert "".join(logprobs["tokens"]) == text(event)
    assert "".join(text(e) for e in events) == "abcabca"
    assert sum(len(e["choices"][0]["logprobs"]["tokens"]) for e in events) == 7


def test_stream_token_ids_and_echoed_logprobs(srv):
    body = {"prompt": "ab", "max_tokens": 2, "temperature": 0, "return_token_ids": True}
    events = srv.stream("/v1/completions", {**body, "echo": True, "logprobs": 0})[:-1]
    assert events[0]["choices"][0]["prompt_token_ids"] == [97, 98]
    assert events[0]["choices"][0]["logprobs"]["token_logprobs"] == [None, -0.1]
    assert [e["choices"][0]["token_ids"] for e in events[1:]] == [[97], [98]]
    assert [e["choices"][0]["logprobs"]["text_offset"] for e in events[1:]] == [[2], [3]]


def test_stream_of_nothing(srv):
    events = srv.stream("/v1/completions", {"prompt": "ab", "max_tokens": 0, "echo": True})
    assert [text(e) for e in events[:-1]] == ["ab", ""]
    assert events[-2]["choices"][0]["finish_reason"] == "length"


# Failures ----------------------------------------------------------------------------------------


def test_a_nan_fails_its_request_alone(srv):
    status, _, body = srv.complete("a<|nan|>")
    assert status == 500
    assert body["error"]["type"] == "server_error"
    assert "NaN" in body["error"]["message"]
    events = srv.stream("/v1/completions", {"prompt": "ab<|nan|>", "temperature": 0})
    assert text(events[0]) == "a"
    assert "NaN" in events[-2]["error"]["message"]
    assert events[-1] == "[DONE]"
    assert text(srv.good(srv.complete("ok", max_tokens=2))) == "ok"


def test_a_failing_step_fails_what_is_in_flight_and_the_server_goes_on(srv):
    status, _, body = srv.complete("x<|boom|>")
    assert status == 500
    assert "boom" in body["error"]["message"]
    assert text(srv.good(srv.complete("ok", max_tokens=2))) == "ok"


def test_a_bug_in_admission_is_a_500_for_all_samples_of_the_call_alone(srv):
    status, _, body = srv.complete(["fine", "x<|badadd|>"])
    assert (status, body["error"]["type"]) == (500, "server_error")
    srv.wait(srv.idle)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [300]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [[97], [300]]}, "prompt"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": "ten"}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"n": 0}, "n"),
        ({"n": 10**6}, "n"),
        ({"seed": 2**64}, "seed"),
        ({"stop": 5}, "stop"),
        ({"stop": ["a", 5]}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"presence_penalty": 5}, "presence_penalty"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 5, "01": -5}}, "logit_bias"),
        ({"logit_bias": {"٣": 5}}, "logit_bias"),
        ({"logit_bias": {"1": 10**400}}, "logit_bias"),
        ({"temperature": 10**400}, "temperature"),
        ({"logit_bias": {"300": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"min_tokens": 9}, "min_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"stream": "maybe"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "stream_options"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"priority": 2**40}, "priority"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"some_future_field": 1}, "some_future_field"),
    ],
)
def test_invalid_completions_are_400_naming_the_field(srv, fields, param):
    for stream in (False, True):
        status, _, body = srv.complete(**{"prompt": "a", "stream": stream, **fields})
        if fields.get("stream_options") == {"include_usage": True} and stream:
            continue
        assert status == 400, body
        assert body["error"]["param"] == param
        assert body["error"]["type"] == "invalid_request_error"
        assert param in body["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": 7}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0]",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
            "messages[0].content[0]",
        ),
        ({"messages": [calling(0)]}, "messages[0].tool_calls"),
        ({"messages": [{**calling([]), "prefix": True}]}, "messages[0].prefix"),
        ({"messages": [{**calling([]), "partial": True}]}, "messages[0].partial"),
        ({"messages": [calling([{"function": "f"}])]}, "messages[0].tool_calls[0].function"),
        (
            {"messages": [calling([{"function": {"name": "f", "arguments": 0}}])]},
            "messages[0].tool_calls[0].function.arguments",
        ),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"functions": [{}]}, "functions"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"audio": {}}, "audio"),
        ({"echo": True}, "echo"),
        ({"prompt": "x"}, "prompt"),
    ],
)
def test_invalid_chats_are_400_naming_the_field(srv, fields, param):
    status, _, body = srv.chat(**{"messages": "hi", **fields})
    assert status == 400, body
    assert body["error"]["param"] == param


def test_neutral_and_harmless_fields_change_nothing(srv):
    want = content(srv.good(srv.chat("hi")))
    neutral = {
        "tools": [],
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "functions": None,
        "modalities": ["text"],
        "user": "u",
        "metadata": {"a": "b"},
        "store": False,
        "parallel_tool_calls": True,
        "logit_bias": {},
        "top_k": -1,
        "logprobs": False,
        "top_logprobs": 0,
        "stop": [],
        "n": None,
        "some_future_field": None,
    }
    for _ in range(2):
        assert content(srv.good(srv.chat("hi", **neutral))) == want
    words = "is accepted and has no effect"
    srv.wait(lambda: srv.log.count(words) >= 3)
    ignored = re.findall(rf"request field '(\w+)' {words}", srv.log)
    assert sorted(ignored) == ["metadata", "store", "user"]


def test_context_overflow_names_both_numbers(srv):
    status, _, body = srv.complete("a" * 2000, max_tokens=100)
    message = body["error"]["message"]
    assert status == 400
    assert body["error"]["code"] == "context_length_exceeded"
    assert all(number in message for number in ("2000", "100", "2048"))
    assert srv.chat("a" * 3000, max_tokens=None)[0] == 400


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"not json", b"[1]", b'"x"', b"null", b'{"prompt": "a", "temperature": NaN}']
)
def test_bodies_that_are_not_json_objects(srv, raw):
    status, _, body = srv.post("/v1/completions", raw)
    assert status == 400
    assert body["error"]["message"]


def test_deeply_nested_json_is_refused(srv):
    assert srv.post("/v1/completions", b"[" * 100_000)[0] == 400


def test_routes_models_and_methods(srv):
    assert srv.complete("a", model="other")[0] == 404
    assert srv.complete("a", model="other")[2]["error"]["code"] == "model_not_found"
    assert srv.complete("a", model="alias/x")[0] == 200
    assert srv.get("/v1/nothing")[0] == 404
    assert srv.get("/v1/nothing")[2]["error"]["message"]
    status, headers, _ = srv.get("/v1/completions")
    assert (status, headers["allow"]) == (405, "POST")
    assert [m["id"] for m in srv.get("/v1/models")[2]["data"]] == ["mock", "alias/x"]
    assert srv.get("/v1/models/alias/x")[2]["max_model_len"] == 2048
    assert srv.get("/v1/models/other")[0] == 404


# Operations --------------------------------------------------------------------------------------


def test_tokenize_and_detokenize(srv):
    body = srv.good(srv.post("/tokenize", {"prompt": "hé", "return_token_strs": True}))
    assert body["tokens"] == [104, 195, 169]
    assert body["count"] == 3
    assert body["max_model_len"] == 2048
    assert body["token_strs"][0] == "<0x68>"
    assert srv.good(srv.post("/detokenize", {"tokens": [104, 195, 169]}))["prompt"] == "hé"
    messages = [{"role": "user", "content": "x"}]
    assert srv.good(srv.post("/tokenize", {"messages": messages}))["count"] == 17
    assert srv.post("/tokenize", {})[0] == 400
    assert srv.post("/detokenize", {"tokens": [300]})[0] == 400
    assert srv.post("/detokenize", {"tokens": "x"})[0] == 400


def test_a_long_detokenize_holds_up_nobody(srv):
    """On the event loop nothing else would run while the mock waits in the middle of it."""
    pairs = (16 << 20) // len("97,98,") - 10
    body = b'{"tokens":[' + b"97,98," * pairs + b"99,%d]}" % WAITS
    with ThreadPoolExecutor(1) as pool, srv.hold():
        answer = pool.submit(srv.post, "/detokenize", body)
        srv.wait(lambda: "decoding is held" in srv.log)
        assert [srv.get("/health/live")[0] for _ in range(10)] == [200] * 10
        assert not answer.done()
        srv.release()
        assert srv.good(answer.result())["prompt"] == "ab" * pairs + "c"


def test_health_and_version(srv):
    assert srv.get("/health")[0] == srv.get("/health/live")[0] == srv.get("/health/ready")[0] == 200
    body = srv.good(srv.get("/version"))
    assert body["version"]
    assert body["system_fingerprint"].endswith(f"{body['config_hash']}-w0")


def test_the_root_says_where_to_go_on(srv):
    pages = srv.good(srv.get("/"))
    assert (pages.pop("name"), pages.pop("version")) == (
        "Octavo",
        srv.get("/version")[2]["version"],
    )
    assert {"/docs", "/health", "/v1/models"} <= set(pages.values())
    for path in pages.values():
        assert srv.get(path)[0] == 200


def test_metrics(srv):
    from prometheus_client.parser import text_string_to_metric_families

    srv.good(srv.complete("abc", max_tokens=4))
    raw = srv.get("/metrics")[2].decode()
    names = {family.name for family in text_string_to_metric_families(raw)}
    assert {
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:prompt_tokens",
        "vllm:generation_tokens",
        "vllm:time_to_first_token_seconds",
        "vllm:inter_token_latency_seconds",
        "vllm:e2e_request_latency_seconds",
        "vllm:request_success",
        "octavo:http_errors",
    } <= names
    before = srv.metric("vllm:e2e_request_latency_seconds_count")
    srv.good(srv.complete("abc", n=3, temperature=1, max_tokens=4))
    assert srv.metric("vllm:e2e_request_latency_seconds_count") == before + 3


def test_openapi_document(srv):
    document = srv.good(srv.get("/openapi.json"))
    body = document["paths"]["/v1/completions"]["post"]["requestBody"]
    assert "prompt" in body["content"]["application/json"]["schema"]["properties"]
    references = [r for r in json.dumps(document).split('"') if r.startswith("#/components")]
    assert all(r.rsplit("/", 1)[1] in document["components"]["schemas"] for r in references)


def test_every_answer_has_its_requests_id_in_the_header(srv):
    body = {"prompt": "ab", "max_tokens": 2}
    asked = [
        ("POST", "/v1/completions", body),
        ("POST", "/v1/completions", body | {"stream": True}),
        ("POST", "/v1/completions", {}),
        ("POST", "/v1/messages", {}),
        ("GET", "/v1/nothing", None),
        ("GET", "/health", None),
    ]
    made = set()
    for method, path, fields in asked:
        for own in ("abc-1", "x" * 128):
            _, headers, _ = srv.request(method, path, fields, {"X-Request-Id": own})
            assert headers.get_all("x-request-id") == [own]
        for unfit in ({}, {"X-Request-Id": "a b"}, {"X-Request-Id": "x" * 129}):
            (new,) = srv.request(method, path, fields, unfit)[1].get_all("x-request-id")
            assert re.fullmatch("[0-9a-f]{32}", new)
            made.add(new)
    assert len(made) == 3 * len(asked)


def test_a_request_id_of_the_clients_own_names_the_answer(srv):
    """Two at a time may have the same: they don't mix."""
    with ThreadPoolExecutor(4) as pool:
        prompts = ["ab", "cd", "ef", "gh"]
        fields = {"request_id": "mine", "max_tokens": 40}
        answers = list(pool.map(lambda prompt: srv.complete(prompt, **fields), prompts))
    assert [text(srv.good(answer)) for answer in answers] == [prompt * 20 for prompt in prompts]
    assert {answer[2]["id"] for answer in answers} == {"cmpl-mine"}
    assert srv.good(srv.chat("x", request_id="mine"))["id"] == "chatcmpl-mine"
    events = srv.stream("/v1/completions", {"prompt": "a", "max_tokens": 2, **fields})[:-1]
    assert {event["id"] for event in events} == {"cmpl-mine"}
    for unfit in ("", "a b", "é", "x" * 129):
        status, _, body = srv.complete("a", request_id=unfit)
        assert (status, body["error"]["param"]) == (400, "request_id")


def test_keep_alive_and_answers_do_not_cross(srv):
    connection = srv.connect()
    for word in ("one", "two", "six"):
        body = {"prompt": word, "max_tokens": 3, "temperature": 0}
        connection.request("POST", "/v1/completions", json.dumps(body))
        assert json.loads(connection.getresponse().read())["choices"][0]["text"] == word
    connection.close()


def test_byte_tokenizer_agrees_with_the_mock():
    assert ByteTokenizer().encode("a<|eos|>") == [97, EOS]


def test_text_that_arrives_together_with_a_failure_is_not_lost():
    client = SimpleNamespace(submit=lambda requests, start_over: Call(client.abort, []))
    client.abort = lambda ids: None
    identity = Identity("cmpl-1", 0, "mock", "fp")
    table = TokenTable(ByteTokenizer())
    job = Generation(client, Recorder(), table, identity, Wanted())
    prompt = Prompt((97,))
    job.add(prompt, Request("r", prompt.ids, SamplingParams()))
    job.start()
    events = [TokenEvent("r", (97,)), TokenEvent("r", finish_reason="error", error="NaN")]

    async def drain():
        got = []
        try:
            async for chunk in job.stream(events):
                got.append(chunk)
        except ApiError as error:
            return b"".join(got), error.message
        raise AssertionError("no failure")

    body, message = asyncio.run(drain())
    assert (b'"text":"a"' in body, message) == (True, "NaN")
