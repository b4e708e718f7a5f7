"""Every field of every body, from HTTP to the request that the engine gets.

The mock engine writes down what comes to it, and its chat template spells what it is given. Each
case is sent without its field and with it: the engine's requests differ by what the field is for,
and by nothing else. Fields that shape the answer alone change nothing there.
"""

import json
from unittest.mock import ANY

import pytest
from mock_engine import BOS, SpelledTokenizer
from mock_server import running

from octavo.serve import protocol
from octavo.serve.messages_protocol import MessagesBody
from octavo.serve.responses_protocol import ResponsesBody
from octavo.serve.routes_embeddings import EmbeddingBody
from octavo.serve.routes_score import ScoreBody


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """What the engine gets of a request to a path: a function of path and body."""
    path = tmp_path_factory.mktemp("record") / "requests"
    settings = {"reasoning_parser": "think", "tool_parser": "hermes"}
    tokenizer = "mock_engine:spelled_tokenizer"
    with running(tokenizer=tokenizer, engine={"record": str(path)}, **settings) as server:

        def ask(url, body):
            path.write_bytes(b"")
            status, _, answer = server.post(url, body)
            assert status == 200, answer
            return read(path.read_bytes().splitlines())

        yield ask


def read(lines):
    """The values of the first request by their places, its text spelled out, and how many came."""
    requests = [json.loads(line) for line in lines]
    first = requests[0]
    del first["request_id"]
    first["bos"] = first["prompt"][0] == BOS
    text = SpelledTokenizer().decode(first["prompt"])
    first["prompt"] = json.loads(text) if text.startswith("{") else text
    return {**dict(flat(first)), "requests": len(requests)}


def flat(value, place=""):
    """(place, leaf) of nested objects."""
    if not isinstance(value, dict) or not value:
        yield place, value
        return
    for name, item in value.items():
        yield from flat(item, f"{place}.{name}" if place else name)


def changes(before, after):
    places = before.keys() | after.keys()
    return {p: after.get(p) for p in places if before.get(p) != after.get(p)}


def params(**values):
    return {f"params.{name}": value for name, value in values.items()}


def prompt(**values):
    return {f"prompt.{name}": value for name, value in values.items()}


SCHEMA = {"type": "object"}
GRAMMAR = {"grammar.kind": "regex", "grammar.text": "a"}
JSON = {**GRAMMAR, "grammar.kind": "json_schema", "grammar.text": json.dumps(SCHEMA)}
FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {}}}
TOOL = {"type": "function", "function": FUNCTION}
FLAT_TOOL = {"type": "function", **FUNCTION}
BLOCK_TOOL = {"name": "f", "input_schema": FUNCTION["parameters"]}
REQUIRED = {**GRAMMAR, "grammar.kind": ANY, "grammar.text": ANY}
BOUND = {
    "thinking.budget": 9,
    "thinking.open": 280,
    "thinking.close": 281,
    "thinking.opened": False,
    "thinking.blanks": ANY,
}
USER = {"role": "user", "content": "ab"}
OTHER = {"role": "user", "content": "c"}
ASSISTANT = {"role": "assistant", "content": "so"}
CUT = dict.fromkeys(prompt(messages=0, add_generation_prompt=0, continue_final_message=0))
LOGPROBS = ["message.output_text.logprobs"]

# field: (value, what it changes, fields that go with it)
SAMPLING = {
    "temperature": (0.25, params(temperature=0.25), {}),
    "top_p": (0.5, params(top_p=0.5), {}),
    "top_k": (3, params(top_k=3), {}),
}
PENALTIES = {
    "min_p": (0.25, params(min_p=0.25), {}),
    "presence_penalty": (0.5, params(presence_penalty=0.5), {}),
    "frequency_penalty": (-0.5, params(frequency_penalty=-0.5), {}),
    "repetition_penalty": (1.5, params(repetition_penalty=1.5), {}),
    "seed": (7, params(seed=7), {}),
    "stop": ("x", params(stop=["x"]), {}),
    "ignore_eos": (True, params(ignore_eos=True), {}),
}
SCHEDULING = {
    "priority": (3, {"priority": 3}, {}),
    "cache_salt": ("s", {"cache_salt": "s"}, {}),
}
GENERATING = {
    **SAMPLING,
    **PENALTIES,
    **SCHEDULING,
    "model": ("mock", {}, {}),
    "max_tokens": (3, params(max_tokens=3), {}),
    "n": (2, params(n=2) | {"requests": 2}, {"temperature": 1}),
    "stream": (True, {}, {}),
    "stream_options": ({"include_usage": True}, {}, {"stream": True}),
    "logit_bias": ({"97": 1.5}, {"params.logit_bias": None, "params.logit_bias.97": 1.5}, {}),
    "min_tokens": (2, params(min_tokens=2), {}),
    "stop_token_ids": ([98], params(stop_token_ids=[98]), {}),
    "allowed_token_ids": ([97, 98], params(allowed_token_ids=[97, 98]), {}),
    "include_stop_str_in_output": (True, params(include_stop_str_in_output=True), {}),
    "skip_special_tokens": (False, params(skip_special_tokens=False), {}),
    "prompt_logprobs": (2, params(prompt_logprobs=2), {}),
    "return_token_ids": (True, {}, {}),
    "return_tokens_as_token_ids": (True, {}, {}),
    "request_id": ("mine", {}, {}),
    "return_timing": (True, {}, {}),
    "response_format": (
        {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}},
        JSON,
        {},
    ),
    "structured_outputs": ({"regex": "a"}, GRAMMAR, {}),
    "guided_json": (SCHEMA, JSON, {}),
    "guided_regex": ("a", GRAMMAR, {}),
    "guided_choice": (["a"], {**GRAMMAR, "grammar.kind": "choice", "grammar.text": '["a"]'}, {}),
    "guided_grammar": ("start: /a/", REQUIRED | {"grammar.text": "start: /a/"}, {}),
}
COMPLETION = {
    **GENERATING,
    "prompt": ([99], {"prompt": "c", "bos": False}, {}),
    "add_special_tokens": (False, {"bos": False}, {}),
    "truncate_prompt_tokens": (1, {"prompt": "b", "bos": False}, {}),
    "echo": (True, params(prompt_logprobs=2), {"logprobs": 2}),
    "logprobs": (2, params(logprobs=2), {}),
}
CHAT = {
    **GENERATING,
    "messages": ([OTHER], prompt(messages=[OTHER]), {}),
    "add_special_tokens": (True, {"bos": True}, {}),
    "truncate_prompt_tokens": (1, CUT | {"prompt": "}"}, {}),
    "max_completion_tokens": (3, params(max_tokens=3), {}),
    "logprobs": (True, params(logprobs=0), {}),
    "top_logprobs": (2, params(logprobs=2), {"logprobs": True}),
    "add_generation_prompt": (False, prompt(add_generation_prompt=False), {}),
    "continue_final_message": (
        True,
        prompt(add_generation_prompt=False, continue_final_message=True),
        {"messages": [USER, ASSISTANT]},
    ),
    "chat_template": ("t", prompt(template="t"), {}),
    "chat_template_kwargs": ({"k": 5}, prompt(k=5), {}),
    "tools": ([TOOL], prompt(tools=[TOOL]), {}),
    "tool_choice": ("required", REQUIRED, {"tools": [TOOL]}),
    "parallel_tool_calls": (
        False,
        {"grammar.text": ANY},
        {"tools": [TOOL], "tool_choice": "required"},
    ),
    "include_reasoning": (False, {}, {}),
    "reasoning_effort": ("none", prompt(enable_thinking=False), {}),
    "thinking_token_budget": (9, BOUND, {}),
}
RESPONSES = {
    **SAMPLING,
    **PENALTIES,
    **SCHEDULING,
    "model": ("mock", {}, {}),
    "input": ("c", prompt(messages=[OTHER]), {}),
    "instructions": (
        "be",
        prompt(messages=[{"role": "system", "content": "be"}, USER]),
        {},
    ),
    "max_output_tokens": (3, params(max_tokens=3), {}),
    "stream": (True, {}, {}),
    "stream_options": ({"include_obfuscation": True}, {}, {"stream": True}),
    "tools": ([FLAT_TOOL], prompt(tools=[TOOL]), {}),
    "tool_choice": ("required", REQUIRED, {"tools": [FLAT_TOOL]}),
    "parallel_tool_calls": (
        False,
        {"grammar.text": ANY},
        {"tools": [FLAT_TOOL], "tool_choice": "required"},
    ),
    "text": ({"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}, JSON, {}),
    "reasoning": ({"effort": "none"}, prompt(enable_thinking=False), {}),
    "metadata": ({"a": "b"}, {}, {}),
    "include": (LOGPROBS, params(logprobs=0), {}),
    "top_logprobs": (2, params(logprobs=2), {"include": LOGPROBS}),
    "chat_template_kwargs": ({"k": 5}, prompt(k=5), {}),
    "thinking_token_budget": (9, BOUND, {}),
    "return_timing": (True, {}, {}),
}
MESSAGES = {
    **SAMPLING,
    "model": ("mock", {}, {}),
    "messages": ([OTHER], prompt(messages=[OTHER]), {}),
    "max_tokens": (3, params(max_tokens=3), {}),
    "system": ("be", prompt(messages=[{"role": "system", "content": "be"}, USER]), {}),
    "stop_sequences": (["x"], params(stop=["x"]), {}),
    "stream": (True, {}, {}),
    "tools": ([BLOCK_TOOL], prompt(tools=[TOOL]), {}),
    "tool_choice": ({"type": "any"}, REQUIRED, {"tools": [BLOCK_TOOL]}),
    "thinking": (
        {"type": "enabled", "budget_tokens": 9},
        {**BOUND, **prompt(enable_thinking=True)},
        {},
    ),
    "service_tier": ("auto", {}, {}),
    "cache_control": ({"type": "ephemeral"}, {}, {}),
    "return_timing": (True, {}, {}),
}
EMBEDDING = {
    **SCHEDULING,
    "model": ("mock", {}, {}),
    "input": ([99], {"prompt": "c", "bos": False}, {}),
    "add_special_tokens": (False, {"bos": False}, {}),
    "encoding_format": ("base64", {}, {}),
    "pooling": ("mean", {"pooling": "mean"}, {}),
}
SCORE = {
    **SCHEDULING,
    "model": ("mock", {}, {}),
    "prompt": ("c", {"prompt": "cx"}, {}),
    "continuations": (["y"], {"prompt": "aby"}, {}),
    "add_special_tokens": (False, {"bos": False}, {}),
    "text_1": ("c", {"prompt": "cx"}, {}),
    "text_2": (["y"], {"prompt": "aby"}, {}),
}
INSTEAD = {"text_1": "prompt", "text_2": "continuations"}
"""Fields that stand for others of the same request."""

CHATTED = {"messages": [USER], "max_tokens": 2}
ENDPOINTS = {
    "/v1/completions": (protocol.CompletionBody, {"prompt": "ab", "max_tokens": 2}, COMPLETION),
    "/v1/chat/completions": (protocol.ChatBody, CHATTED, CHAT),
    "/v1/responses": (ResponsesBody, {"input": "ab", "max_output_tokens": 2}, RESPONSES),
    "/v1/messages": (MessagesBody, CHATTED, MESSAGES),
    "/v1/embeddings": (EmbeddingBody, {"input": "ab"}, EMBEDDING),
    "/v1/score": (ScoreBody, {"prompt": "ab", "continuations": ["x"]}, SCORE),
}


@pytest.mark.parametrize("path", ENDPOINTS)
def test_every_field_has_a_case(path):
    body, _, cases = ENDPOINTS[path]
    assert cases.keys() == body.model_fields.keys()


@pytest.mark.parametrize(
    ("path", "field"), [(path, field) for path, (*_, cases) in ENDPOINTS.items() for field in cases]
)
def test_a_field_reaches_the_engine_as_it_was_meant(recorded, path, field):
    _, good, cases = ENDPOINTS[path]
    value, wanted, beside = cases[field]
    without = good | beside
    asked = {name: item for name, item in without.items() if name != INSTEAD.get(field)}
    assert changes(recorded(path, without), recorded(path, asked | {field: value})) == wanted


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_of_the_conversation_has_two_names(recorded, name):
    """vLLM's newer one was dropped without a word."""
    turns = [USER, {**ASSISTANT, name: "hm"}, OTHER]
    got = recorded("/v1/chat/completions", CHATTED | {"messages": turns})
    assert got["prompt.messages"] == [USER, {**ASSISTANT, "reasoning_content": "hm"}, OTHER]
