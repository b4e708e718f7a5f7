"""OpenAI's Responses API through the real `openai` client. The mock repeats the prompt."""

import json

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mock_server import running

from octavo.serve.answer_parser import ContentDelta
from octavo.serve.answer_splitter import AnswerSplitter
from octavo.serve.errors import ApiError
from octavo.serve.output import TokenText
from octavo.serve.reasoning import ThinkParser
from octavo.serve.reasoning_effort import effort_controls
from octavo.serve.responses_input import input_messages
from octavo.serve.responses_output import EventWriter, OutputItems
from octavo.serve.tool_formats import HermesParser

CALL = '<tool_call>{"name": "f", "arguments": {"a": "b}"}}</tool_call>'
TOOL = {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}}
NAMED = {"type": "function", "name": "f"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
GREEDY = {"generation": {"temperature": 0}}


@pytest.fixture(scope="module")
def srv():
    with running(engine=GREEDY, reasoning_parser="think") as server:
        yield server


@pytest.fixture(scope="module")
def client(srv):
    with openai.OpenAI(
        base_url=f"http://127.0.0.1:{srv.port}/v1", api_key="k", max_retries=0
    ) as made:
        yield made


def ask(text, /, **fields):
    """Keyword arguments of a request answered by "user:" and the text."""
    ours = {name: fields.pop(name) for name in ("stop", "seed") if name in fields}
    base = {"model": "mock", "max_output_tokens": 200, "input": text, "extra_body": ours}
    return {**base, **fields}


def shown(response, *hidden):
    """A response without what differs from one to the next."""
    drop = {"id", "created_at", "completed_at", "call_id", "item_id", *hidden}

    def clean(value):
        if isinstance(value, dict):
            return {k: clean(v) for k, v in value.items() if k not in drop and v is not None}
        return [clean(item) for item in value] if isinstance(value, list) else value

    return clean(response if isinstance(response, dict) else response.model_dump())


def streamed(client, **fields):
    """The events of a stream, and the last response object among them."""
    with client.responses.create(stream=True, **fields) as stream:
        events = list(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    return events, events[-1].response


def rebuilt(events):
    """Output items put together from a stream's events alone: dicts of type and fields."""
    items, open_items = [], 0
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(items)
            assert not open_items
            open_items += 1
            items.append(dict(event["item"]))
        elif kind == "content_part.added":
            assert items[-1]["content"] == []
            items[-1]["content"] = [dict(event["part"])]
        elif kind in ("output_text.delta", "reasoning_text.delta"):
            assert (event["item_id"], event["content_index"]) == (items[-1]["id"], 0)
            (part,) = items[-1]["content"]
            part["text"] += event["delta"]
            if kind == "output_text.delta":
                part["logprobs"] = part["logprobs"] + event["logprobs"]
        elif kind == "function_call_arguments.delta":
            items[-1]["arguments"] += event["delta"]
        elif kind in ("output_text.done", "reasoning_text.done"):
            assert event["text"] == items[-1]["content"][0]["text"]
            assert event.get("logprobs") == items[-1]["content"][0].get("logprobs")
        elif kind == "function_call_arguments.done":
            assert event["arguments"] == items[-1]["arguments"]
        elif kind == "content_part.done":
            assert event["part"] == items[-1]["content"][0]
        elif kind == "output_item.done":
            open_items -= 1
            items[-1]["status"] = event["item"]["status"]
            assert event["item"] == items[-1]
    assert not open_items
    return items


def test_text(client):
    response = client.responses.create(
        **ask("hey<|eos|>", instructions="be", metadata={"a": "b"}, temperature=0.0)
    )
    assert response.output_text == "system:be\nuser:hey"
    assert (response.object, response.status, response.error) == ("response", "completed", None)
    assert (response.metadata, response.instructions) == ({"a": "b"}, "be")
    assert (response.temperature, response.store) == (0.0, False)
    (item,) = response.output
    assert (item.type, item.role, item.status) == ("message", "assistant", "completed")
    usage = response.usage
    assert usage.input_tokens == len("system:be\nuser:hey\nassistant:") + 1
    assert usage.input_tokens_details.cached_tokens == usage.input_tokens // 2
    assert usage.output_tokens == len("system:be\nuser:hey") + 1
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert usage.output_tokens_details.reasoning_tokens == 0
    assert response.system_fingerprint.startswith("octavo-")


CASES = [
    ("hey<|eos|>", {}, ["message"], "completed"),
    ("hey", {"max_output_tokens": 3}, ["message"], "incomplete"),
    ("hey<|eos|>", {"stop": ["ey"]}, ["message"], "completed"),
    (f"x{CALL}y{CALL}<|eos|>", {"tools": [TOOL]}, ["message", "function_call"] * 2, "completed"),
    (
        f"{CALL}{CALL}",
        {"tools": [TOOL], "parallel_tool_calls": False},
        ["message", "function_call"],
        "completed",
    ),
    (f"{CALL[:-20]}", {"tools": [TOOL]}, ["message", "function_call"], "incomplete"),
    (f"{CALL}<|eos|>", {"tools": [TOOL], "tool_choice": "none"}, ["message"], "completed"),
    (
        "q",
        {"tools": [TOOL], "tool_choice": NAMED, "stop": "object"},
        ["function_call"],
        "completed",
    ),
    ("<|eos|>", {"stop": "user"}, [], "completed"),
]


@pytest.mark.parametrize(("text", "fields", "kinds", "status"), CASES)
def test_a_stream_adds_up_to_the_response(client, text, fields, kinds, status):
    want = client.responses.create(**ask(text, **fields))
    assert [item.type for item in want.output] == kinds
    assert want.status == status
    events, last = streamed(client, **ask(text, **fields))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type == f"response.{status}"
    assert shown(last) == shown(want)
    items = rebuilt([event.model_dump() for event in events])
    assert shown({"output": items}) == {"output": shown(want)["output"]}
    if status == "incomplete":
        assert want.incomplete_details.reason == "max_output_tokens"
        assert want.output[-1].status == "incomplete"


def test_the_clients_own_stream_puts_it_together(client):
    fields = ask(f"x{CALL}<|eos|>", tools=[TOOL])
    with client.responses.stream(**fields) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds.count("response.output_item.done") == 2
    assert final.output_text == "user:x"
    call = final.output[1]
    assert (call.name, json.loads(call.arguments)) == ("f", {"a": "b}"})
    assert call.call_id.startswith("call_")


def test_formats_reach_the_engine(client):
    """The mock's answer to a request with a grammar spells the grammar."""
    formats = {
        "json_object": {"type": "json_object"},
        "json_schema": {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True},
    }
    for kind, shape in formats.items():
        response = client.responses.create(**ask("q", text={"format": shape}))
        assert response.output_text.startswith(kind)
        assert response.text.format.type == kind
    plain = client.responses.create(**ask("q<|eos|>", text={"format": {"type": "text"}}))
    assert plain.output_text == "user:q"


def test_a_conversation_goes_round(client):
    """Items of every kind as input, those of an answer among them."""
    first = client.responses.create(**ask(f"x{CALL}<|eos|>", tools=[TOOL]))
    call = first.output[1]
    items = [
        {"role": "developer", "content": "be"},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [
            {"type": "reasoning_text", "text": "hm"}]},
        *(item.model_dump(exclude_none=True) for item in first.output),
        {"type": "function_call_output", "call_id": call.call_id, "output": "42"},
    ]  # fmt: skip
    response = client.responses.create(**ask(items, stop="42"))
    assert response.output_text == "system:be\nuser:a\nassistant:user:x\ntool:"


def test_items_in_a_row_are_one_turn():
    def call(name):
        return {"type": "function_call", "call_id": name, "name": name, "arguments": "{}"}

    def said(text):
        return {"type": "message", "role": "assistant", "content": text}

    def thought(text):
        content = [{"type": "reasoning_text", "text": text}]
        return {"type": "reasoning", "summary": [], "content": content}

    items = [thought("r"), said("t"), call("f"), call("g"), said("u"), thought("s"), call("h")]
    first, second, third = input_messages(items)
    assert (first["reasoning_content"], first["content"]) == ("r", "t")
    assert [c["id"] for c in first["tool_calls"]] == ["f", "g"]
    assert second == {"role": "assistant", "content": "u"}
    assert (third["reasoning_content"], third["content"]) == ("s", None)
    assert [c["id"] for c in third["tool_calls"]] == ["h"]


def test_reasoning_is_an_item_of_its_own(client):
    """Drawn with a seed, the mock's answer starts so many tokens into its prompt."""
    text = "<think>so</think>yes<|eos|>"
    fields = ask(text, seed=len("user:"), temperature=1.0)
    want = client.responses.create(**fields)
    assert [item.type for item in want.output] == ["reasoning", "message"]
    assert want.output[0].content[0].text == "so"
    assert want.output_text == "yes"
    assert want.usage.output_tokens_details.reasoning_tokens == len("so</think>") + 1
    events, last = streamed(client, **fields)
    assert shown(last) == shown(want)
    kinds = [event.type for event in events]
    assert kinds.index("response.reasoning_text.done") < kinds.index("response.output_text.delta")
    assert rebuilt([event.model_dump() for event in events])[0]["type"] == "reasoning"


MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>", CALL, "x", " ", "\n", "é", '"']


@settings(max_examples=200, deadline=None)
@given(
    pieces=st.lists(st.sampled_from(MARKS), max_size=12),
    cuts=st.lists(st.integers(0, 300), max_size=20),
    opened=st.booleans(),
)
def test_any_cut_of_the_text_streams_the_same_items(pieces, cuts, opened):
    def splitter():
        return AnswerSplitter(ThinkParser(opened=opened), HermesParser({"f": {}}))

    def spelled(tokens):
        return [{"token": token.text} for token in tokens]

    text = "".join(pieces)
    tokens = [TokenText(0, char, i, None) for i, char in enumerate(text)]
    whole = OutputItems(EventWriter(), spelled)
    whole.write(splitter().push(text, last=True), tokens)
    whole.close()
    told = OutputItems(EventWriter(), spelled)
    ends = [*sorted(cut for cut in cuts if cut < len(text)), len(text)]
    start, out, one = 0, b"", splitter()
    for end in ends:
        last = end == len(text)
        out += told.write(one.push(text[start:end], last=last), tokens[start:end])
        start = end
        if last:
            break
    out += told.close()
    events = [json.loads(e.split(b"data: ")[1]) for e in out.split(b"\n\n") if e]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert rebuilt(events) == told.items
    assert shown({"output": told.items}) == shown({"output": whole.items})
    for item in told.items:
        if item["type"] == "message":
            (part,) = item["content"]
            assert "".join(one["token"] for one in part["logprobs"]) == part["text"]


LOGPROBS = "message.output_text.logprobs"
LATE = {"seed": len("user:"), "temperature": 1.0}
THOUGHT = "<think>so</think> yes<|eos|>"
SPELLED = [
    ("hé<|eos|>", {}, [("user:h\0é", "user:hé")]),
    ("hey<|eos|>", {"stop": ["eyx"]}, [("user:hey", "user:hey")]),
    ("hey<|eos|>", {"stop": ["ey"]}, [("user:h", "user:h")]),
    ("hey", {"max_output_tokens": 4, "stop": ["rx"]}, [("user", "user")]),
    (f"x{CALL} y{CALL}<|eos|>", {"tools": [TOOL]}, [("user:x", "user:x"), ("y", "y")]),
    (THOUGHT, LATE, [("yes", "yes")]),
    ("<|eos|>", {"stop": "user"}, []),
]
"""Per message its tokens, \\0 for one without text, and its text."""


@pytest.mark.parametrize(("text", "fields", "messages"), SPELLED)
def test_log_probabilities_are_of_the_tokens_of_the_text(client, text, fields, messages):
    fields = ask(text, **fields, include=[LOGPROBS], top_logprobs=2)
    want = client.responses.create(**fields)
    parts = [item.content[0] for item in want.output if item.type == "message"]
    assert [part.text for part in parts] == [text for _, text in messages]
    for part, (tokens, _) in zip(parts, messages):
        assert [one.token or "\0" for one in part.logprobs] == list(tokens)
        assert all(len(one.top_logprobs) == 2 for one in part.logprobs)
    assert want.top_logprobs == 2
    events, last = streamed(client, **fields)
    assert shown(last) == shown(want)
    items = rebuilt([event.model_dump() for event in events])
    assert shown({"output": items}) == {"output": shown(want)["output"]}


def test_a_token_that_a_stop_string_cuts_comes_with_an_empty_delta():
    """Of a token "abc" a stop string "cd" leaves "ab", of which "a" has gone out before it."""
    told = OutputItems(EventWriter(), lambda tokens: [{"token": token.text} for token in tokens])
    out = told.write([ContentDelta("a", 0)])
    out += told.write([ContentDelta("b", 1)])
    out += told.write([], [TokenText(7, "ab", 0, None), TokenText(8, "", 2, None)])
    out += told.close()
    events = [json.loads(e.split(b"data: ")[1]) for e in out.split(b"\n\n") if e]
    deltas = [(e["delta"], e["logprobs"]) for e in events if e["type"].endswith("text.delta")]
    assert deltas == [("a", []), ("b", []), ("", [{"token": "ab"}])]
    assert rebuilt(events) == told.items


def test_log_probabilities_are_those_of_a_chat(srv, client):
    asked = {"logprobs": True, "top_logprobs": 3, "max_tokens": 30}
    chat = srv.good(srv.chat("hé<|eos|>", **asked))["choices"][0]["logprobs"]["content"]
    fields = ask("hé<|eos|>", include=[LOGPROBS], top_logprobs=3)
    with client.responses.stream(**fields) as stream:
        (part,) = stream.until_done().get_final_response().output[0].content
    assert [one.model_dump() for one in part.logprobs] == chat[:-1]
    (bare,) = client.responses.create(**ask("q<|eos|>", include=[LOGPROBS])).output[0].content
    assert [one.top_logprobs for one in bare.logprobs] == [[]] * len("user:q")
    (none,) = client.responses.create(**ask("q<|eos|>", top_logprobs=0)).output[0].content
    assert none.logprobs == []


REFUSED = [
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"conversation": "c"}, "conversation"),
    ({"store": True}, "store"),
    ({"background": True}, "background"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"max_tool_calls": 1}, "max_tool_calls"),
    ({"truncation": "auto"}, "truncation"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"top_logprobs": -1, "include": ["message.output_text.logprobs"]}, "top_logprobs"),
    ({"top_logprobs": 21, "include": ["message.output_text.logprobs"]}, "top_logprobs"),
    ({"extra_body": {"top_logprobs": "2"}}, "top_logprobs"),
    ({"include": ["file_search_call.results"]}, "include"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{**TOOL, "name": "a b"}]}, "tools[0].name"),
    ({"tools": [TOOL], "tool_choice": {"type": "web_search"}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice"),
    ({"text": {"verbosity": "low"}}, "text.verbosity"),
    ({"text": {"format": {"type": "xml"}}}, "text.format"),
    ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format"),
    ({"text": 3}, "text"),
    ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
    ({"reasoning": {"effort": "none"}}, "reasoning.effort"),
    ({"reasoning": {"effort": 3}}, "reasoning"),
    ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": 5000}, "max_output_tokens"),
    ({"temperature": -1.0}, "temperature"),
    ({"metadata": {str(i): "x" for i in range(17)}}, "metadata"),
    ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
    ({"extra_body": {"stream_options": {"include_usage": True}}}, "stream_options"),
    ({"extra_body": {"some_future_field": 1}}, "some_future_field"),
    ({"input": []}, "input"),
    ({"input": [3]}, "input[0].type"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "user", "content": 3}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
    ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
    ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{"}]},
     "input[0].arguments"),
    *(({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": text}]},
       "input[0].arguments") for text in ('{"a": NaN}', '{"a": 1e999}')),
    ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output"),
    ({"input": [{"type": "reasoning", "encrypted_content": "x"}]}, "input[0].encrypted_content"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param"), REFUSED)
def test_refusals_name_the_field(client, fields, param):
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**{**ask("hi"), **fields})
    assert caught.value.param == param
    assert param in caught.value.body["message"]


def test_what_asks_for_nothing_is_taken(client):
    neutral = {
        "store": False,
        "background": False,
        "truncation": "disabled",
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"effort": "medium", "summary": "auto"},
        "text": {"verbosity": "medium"},
        "service_tier": "auto",
        "user": "me",
        "prompt_cache_key": "k",
    }
    assert client.responses.create(**ask("hey<|eos|>", **neutral)).output_text == "user:hey"


def test_failures(client):
    with pytest.raises(openai.NotFoundError):
        client.responses.create(**ask("hi", model="other"))
    with pytest.raises(openai.InternalServerError, match="NaN"):
        client.responses.create(**ask("<|nan|>"))
    events, last = streamed(client, **ask("abc<|nan|>"))
    assert events[-1].type == "response.failed"
    assert (last.status, last.error.code) == ("failed", "server_error")
    assert "NaN" in last.error.message
    rebuilt([event.model_dump() for event in events])


def test_effort_is_what_the_template_can_say():
    def variables(effort, template="", reasons=True):
        controls = effort_controls(effort, template, reasons=reasons)
        assert controls.closed == (effort == "none" and not template and reasons)
        return controls.variables

    assert variables("high", "{{ reasoning_effort }}") == {"reasoning_effort": "high"}
    assert variables("none", "{{ enable_thinking }}") == {"enable_thinking": False}
    assert variables("none", "{{ enable_thinking }}", False) == {"enable_thinking": False}
    assert variables("none") == variables("none", reasons=False) == {}
    assert variables("medium") == variables(None) == {}
    for effort, template in (("low", "{{ enable_thinking }}"), ("most", "")):
        with pytest.raises(ApiError, match="reasoning_effort"):
            variables(effort, template)
