"""What is out of range or of the wrong type: a 400 that names the field, its value and the range.

The cases come from the bodies: a numeric field without a range here, or a field that takes
anything, fails a test.
"""

import re
import types
import typing

import pytest
from mock_engine import VOCAB
from mock_server import running
from test_request_values import CHAT, CHATTED, ENDPOINTS, INSTEAD

from octavo.sampling.params import MAX_INT32, MAX_LOGPROBS, MAX_SAMPLES, MAX_SEED
from octavo.sampling.shown import shown
from octavo.serve.absent import ABSENT
from octavo.serve.protocol import UNSUPPORTED
from octavo.serve.reasoning import MAX_BUDGET
from octavo.serve.routes_admin import ReloadBody
from octavo.serve.tokenize_protocol import OF_MESSAGES, DetokenizeBody, TokenizeBody

CONTEXT = 2048


@pytest.fixture(scope="module")
def srv():
    settings = {"reasoning_parser": "think", "tool_parser": "hermes", "admin_endpoints": True}
    with running(tokenizer="mock_engine:spelled_tokenizer", **settings) as server:
        yield server
        assert "Traceback" not in server.log


BODIES = {path: (body, good, cases) for path, (body, good, cases) in ENDPOINTS.items()}
BODIES |= {
    "/tokenize": (TokenizeBody, {"prompt": "ab"}, {}),
    "/detokenize": (DetokenizeBody, {"tokens": [97]}, {}),
    "/reload_weights": (ReloadBody, {}, {}),
}
FIELDS = [(path, field) for path, (body, _, _) in BODIES.items() for field in body.model_fields]

LOGPROBS = (-1, MAX_LOGPROBS + 1, f"0 .. {MAX_LOGPROBS}")
PENALTY = (-2.5, 2.5, "[-2, 2]")
LENGTH = (-1, 5000, "at least", str(CONTEXT))
RANGES = {
    "max_tokens": LENGTH,
    "max_completion_tokens": LENGTH,
    "max_output_tokens": LENGTH,
    "temperature": (-1, 101, "[0, 100]"),
    "top_p": (0, 1.5, "(0, 1]"),
    "min_p": (-0.5, 1.5, "[0, 1]"),
    "top_k": (-2, MAX_INT32 + 1, f"-1 .. {MAX_INT32}"),
    "presence_penalty": PENALTY,
    "frequency_penalty": PENALTY,
    "repetition_penalty": (0, 10.5, "(0, 10]"),
    "n": (0, MAX_SAMPLES + 1, f"1 .. {MAX_SAMPLES}"),
    "seed": (-(2**63) - 1, MAX_SEED + 1, f"{-(2**63)} .. {MAX_SEED}"),
    "min_tokens": (-1, 3, f"0 .. {MAX_INT32}", "0 .. max_tokens (2)"),
    "prompt_logprobs": LOGPROBS,
    "logprobs": LOGPROBS,
    "top_logprobs": LOGPROBS,
    "priority": (-MAX_INT32 - 2, MAX_INT32 + 1, f"{-MAX_INT32 - 1} .. {MAX_INT32}"),
    "truncate_prompt_tokens": (-2, 0, "-1 or at least 1"),
    "thinking_token_budget": (-1, MAX_BUDGET + 1, f"0 .. {MAX_BUDGET}"),
}
"""Field: values below and above its range, and the range of each in words."""


def of_type(body, field, *kinds):
    """Whether the field takes one value of these types and nothing else."""
    annotation = body.model_fields[field].annotation
    several = isinstance(annotation, types.UnionType)
    options = set(typing.get_args(annotation) if several else [annotation]) - {type(None)}
    return bool(options) and options <= set(kinds)


NUMBERS = [(path, field) for path, field in FIELDS if of_type(BODIES[path][0], field, int, float)]


@pytest.mark.parametrize(("path", "field"), NUMBERS)
def test_a_number_out_of_range_is_named_with_its_range(srv, path, field):
    _, good, cases = BODIES[path]
    low, high, *ranges = RANGES[field]
    for value, wanted in ((low, ranges[0]), (high, ranges[-1])):
        status, _, answer = srv.post(path, good | cases[field][2] | {field: value})
        message = answer["error"]["message"]
        assert status == 400
        assert field in message
        assert shown(value) in message, message
        assert wanted in message, message
        assert answer["error"].get("param", field) == field  # Anthropic's errors have none


WRONG = [{"odd": "x"}, [["odd"]], 7.25, "odd", True, 7, ["odd"]]
ANYTHING = {("/v1/messages", "cache_control")}
"""Fields without effect, whatever they hold."""


def parts(value):
    yield value
    if isinstance(value, dict):
        for key, item in value.items():
            yield from (key, *parts(item))
    elif isinstance(value, list):
        for item in value:
            yield from parts(item)


@pytest.mark.parametrize(("path", "field"), [f for f in FIELDS if f not in ANYTHING])
def test_a_wrong_type_is_named_with_its_value(srv, path, field):
    """Whatever of these values is refused; each field refuses some."""
    _, good, cases = BODIES[path]
    beside = cases[field][2] if cases else {}
    instead = INSTEAD | {"messages": "prompt"}
    asked = {name: item for name, item in (good | beside).items() if name != instead.get(field)}
    refused = 0
    for value in WRONG:
        status, _, answer = srv.post(path, asked | {field: value})
        assert status in (200, 400, 404)
        if status == 200:
            continue
        refused += 1
        message = answer["error"]["message"]
        assert field in message, (value, message)
        assert any(shown(part) in message or str(part) in message for part in parts(value)), message
        param = answer["error"].get("param", field)  # Anthropic's errors have none
        assert re.split(r"\W", param)[0] == field
    assert refused


REFUSED = [
    (path, field, reason)
    for path, (body, _, _) in ENDPOINTS.items()
    for field, (reason, _) in (UNSUPPORTED | getattr(body, "refused", {})).items()
    if field not in body.model_fields
]


@pytest.mark.parametrize(("path", "field", "reason"), REFUSED)
def test_what_is_not_offered_is_refused_with_the_reason(srv, path, field, reason):
    _, good, _ = BODIES[path]
    status, _, answer = srv.post(path, good | {field: "odd"})
    message = f"{field} is not supported: {reason}"
    assert (status, answer["error"]["message"]) == (400, message)
    assert answer["error"].get("param", field) == field
    assert srv.post(path, good | {field: None})[0] == 200


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/responses", "max_tokens"),
        ("/v1/responses", "messages"),
        ("/v1/responses", "reasoning_effort"),
        ("/v1/responses", "response_format"),
        ("/v1/messages", "reasoning_effort"),
        ("/v1/messages", "stop"),
    ],
)
def test_a_field_of_another_endpoint_is_named_as_it_was_sent(srv, path, field):
    """And not as the field of this endpoint that means the same, which was not sent."""
    status, _, answer = srv.post(path, BODIES[path][1] | {field: "odd"})
    assert (status, answer["error"]["message"]) == (400, f"unknown field {field!r}")
    assert answer["error"].get("param", field) == field


@pytest.mark.parametrize("field", OF_MESSAGES)
def test_what_makes_a_prompt_of_messages_is_refused_beside_a_prompt(srv, field):
    value = CHAT[field][0]
    beside = CHAT[field][2]
    assert srv.post("/tokenize", {**CHATTED, **beside, field: value})[0] == 200
    status, _, answer = srv.post("/tokenize", {"prompt": "ab", field: value})
    wanted = f"{field} goes with messages, not with a prompt: {shown(value)}"
    assert (status, answer["error"]["message"]) == (400, wanted)
    assert answer["error"]["param"] == field
    assert srv.post("/tokenize", {"prompt": "ab", field: None})[0] == 200


def test_reasons_say_what_to_do_instead(srv):
    for field, words in (("best_of", "use n"), ("suffix", "before a suffix")):
        message = srv.complete("ab", **{field: 3})[2]["error"]["message"]
        assert words in message


@pytest.mark.parametrize("path", ABSENT)
def test_endpoints_of_other_servers_say_why_they_are_not_here(srv, path):
    for below in ("", "/x/y"):
        for method in ("GET", "POST"):
            status, _, answer = srv.request(method, path + below, b"{}")
            if status == 405 or (path + below, method) == ("/v1/responses", "POST"):
                continue  # there is such a path
            assert status == 404
            error = answer["error"]
            assert error["message"].startswith(f"{method} {path}{below} is not offered: ")
            assert error["code"] == "unsupported_endpoint"


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/sleep?level=1", "/pause"),
        ("/v2/models/m/infer", "KServe"),
        ("/v2/health/ready", "KServe"),
        ("/v2/rerank", "a model with such a head"),
        ("/v1/load_lora_adapter", "without adapters"),
        ("/v1/responses/resp_1/cancel", "closing the stream cancels"),
        ("/start_profile", "octavo bench"),
    ],
)
def test_later_features_are_refused_with_what_there_is_instead(srv, path, words):
    status, _, answer = srv.post(path, {})
    assert (status, words in answer["error"]["message"]) == (404, True)


@pytest.mark.parametrize("path", ENDPOINTS)
def test_another_model_or_an_adapter_is_a_404_with_the_names(srv, path):
    status, _, answer = srv.post(path, BODIES[path][1] | {"model": "sql-lora"})
    assert status == 404
    for words in ("'sql-lora'", "mock, alias/x", "one model, without adapters"):
        assert words in answer["error"]["message"]


BIASES = dict.fromkeys(map(str, range(VOCAB)), 1) | {"x" * i: 1 for i in range(1, 300)}
IDS = f"0 .. {VOCAB - 1}"
MANY = [f"x{i}" for i in range(17)]
TOOLS = [{"type": "function", "function": {"name": f"f{i}"}} for i in range(129)]
INSIDE = [
    ("/v1/completions", {"prompt": [97, VOCAB]}, "prompt", str(VOCAB), IDS),
    ("/v1/completions", {"prompt": ["a"] * 2049}, "prompt", "2049", "at most 2048"),
    ("/v1/completions", {"prompt": ["a"] * 100, "n": 100}, "n", "10000", "at most 4096"),
    ("/v1/completions", {"logit_bias": {"97": 101}}, "logit_bias", "101", "[-100, 100]"),
    ("/v1/completions", {"logit_bias": {str(VOCAB): 1}}, "logit_bias", str(VOCAB), IDS),
    (
        "/v1/completions",
        {"logit_bias": {str(i): 1 for i in range(513)}},
        "logit_bias",
        "513",
        "512",
    ),
    ("/v1/completions", {"stop_token_ids": [-1]}, "stop_token_ids", "-1", IDS),
    ("/v1/completions", {"stop_token_ids": [1] * 17}, "stop_token_ids", "17", "at most 16"),
    ("/v1/completions", {"allowed_token_ids": [VOCAB]}, "allowed_token_ids", str(VOCAB), IDS),
    ("/v1/completions", {"stop": MANY}, "stop", "17", "at most 16"),
    ("/v1/completions", {"stop": ["a", 5]}, "stop", "stop.1: ", "string, not 5"),
    ("/v1/completions", {"stop": 5}, "stop", "not 5", "string or input should be a valid list"),
    ("/v1/chat/completions", {"tools": TOOLS}, "tools", "129", "at most 128"),
    ("/v1/responses", {"metadata": dict.fromkeys(MANY, "v")}, "metadata", "17", "at most 16"),
    ("/v1/messages", {"stop_sequences": MANY}, "stop_sequences", "17", "at most 16"),
    (
        "/v1/messages",
        {"thinking": {"type": "enabled", "budget_tokens": 0}},
        "thinking.budget_tokens",
        "not 0",
        f"1 .. {MAX_BUDGET}",
    ),
    ("/v1/embeddings", {"input": [VOCAB]}, "input", str(VOCAB), IDS),
    ("/v1/score", {"prompt": [97], "continuations": [[VOCAB]]}, "continuations", str(VOCAB), IDS),
    ("/detokenize", {"tokens": [97, -5]}, "tokens", "-5", IDS),
]


@pytest.mark.parametrize(("path", "fields", "name", "value", "limit"), INSIDE)
def test_numbers_inside_a_field_are_named_with_their_range(srv, path, fields, name, value, limit):
    status, _, answer = srv.post(path, BODIES[path][1] | fields)
    message = answer["error"]["message"]
    assert status == 400
    assert answer["error"].get("param", name) == name
    for words in (name, value, limit):
        assert words in message
