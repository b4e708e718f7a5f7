"""Anthropic's Messages API through the real `anthropic` client. The mock repeats the prompt."""

import anthropic
import pytest
from mock_server import running

from octavo.serve.messages_protocol import MessagesBody, chat_body

CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
TOOL = {"name": "f", "description": "d", "input_schema": {"type": "object"}}

NO_CALL = {"tools": [TOOL], "tool_choice": {"type": "none"}}
GREEDY = {"generation": {"temperature": 0}}
IMAGE = {"role": "user", "content": [{"type": "image"}]}
USE = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
RESULT = {"type": "tool_result", "content": "x"}


def user(*blocks):
    return {"role": "user", "content": list(blocks)}


def said(*blocks):
    return {"role": "assistant", "content": list(blocks)}


@pytest.fixture(scope="module")
def srv():
    with running(engine=GREEDY, reasoning_parser="think", api_key="secret") as server:
        yield server


@pytest.fixture(scope="module")
def client(srv):
    address = f"http://127.0.0.1:{srv.port}"
    with anthropic.Anthropic(base_url=address, api_key="secret", max_retries=0) as made:
        yield made


def ask(text, **fields):
    """Keyword arguments of a request answered by "user:" and the text."""
    message = {"role": "user", "content": text}
    return {"model": "mock", "max_tokens": 200, "messages": [message], **fields}


def dumped(message):
    return [
        {k: v for k, v in block.model_dump().items() if v is not None and k != "id"}
        for block in message.content
    ]


def test_text(client):
    message = client.messages.create(**ask("hey<|eos|>"))
    assert (message.role, message.type) == ("assistant", "message")
    assert dumped(message) == [{"type": "text", "text": "user:hey"}]
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    prompt = client.messages.count_tokens(model="mock", messages=ask("hey<|eos|>")["messages"])
    usage = message.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == prompt.input_tokens
    assert usage.output_tokens == len("user:hey") + 1


@pytest.mark.parametrize(
    ("text", "fields", "kinds", "reason"),
    [
        ("hey<|eos|>", {}, ["text"], "end_turn"),
        ("hey", {"max_tokens": 3}, ["text"], "max_tokens"),
        ("hey", {"stop_sequences": ["ey"]}, ["text"], "stop_sequence"),
        (f"x{CALL}y{CALL}<|eos|>", {"tools": [TOOL]}, ["text", "tool_use"] * 2, "tool_use"),
        (
            f"{CALL}{CALL}",
            {
                "tools": [TOOL],
                "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
            },
            ["text", "tool_use"],
            "tool_use",
        ),
        (
            f"{CALL}<|eos|>",
            {"tools": [TOOL], "tool_choice": {"type": "none"}},
            ["text"],
            "end_turn",
        ),
    ],
)
def test_a_stream_adds_up_to_the_message(client, text, fields, kinds, reason):
    message = client.messages.create(**ask(text, **fields))
    assert [block.type for block in message.content] == kinds
    assert message.stop_reason == reason
    with client.messages.stream(**ask(text, **fields)) as stream:
        streamed = stream.get_final_message()
    assert dumped(streamed) == dumped(message)
    assert streamed.stop_reason == reason
    assert streamed.stop_sequence == message.stop_sequence
    assert streamed.usage == message.usage


def test_a_stream_says_first_what_the_prompt_costs(client):
    """A client that bills by message_start would charge cached tokens in full."""
    with client.messages.create(**ask("hey<|eos|>"), stream=True) as stream:
        events = list(stream)
    begun, ended = events[0].message.usage, events[-2].usage
    assert begun.cache_read_input_tokens == ended.cache_read_input_tokens > 0
    assert begun.input_tokens == ended.input_tokens
    assert (begun.output_tokens, ended.output_tokens) == (0, len("user:hey") + 1)


def test_calls_have_objects_for_input(client):
    message = client.messages.create(**ask(f"{CALL}<|eos|>", tools=[TOOL]))
    assert message.content[1].input == {"a": 1}
    cut = '<tool_call>{"name": "f", "arguments": {"a": '
    message = client.messages.create(**ask(f"{cut}<|eos|>", tools=[TOOL]))
    assert message.content[1].input == {"INVALID_JSON": '{"a": '}


def test_history_and_prefill(client):
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "tool_use", "id": "1", "name": "f", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "1", "content": "no", "is_error": True},
                {"type": "text", "text": "so?"},
            ],
        },
        {"role": "assistant", "content": "Well"},
    ]
    fields = {"system": [{"type": "text", "text": "be"}], "messages": messages}
    message = client.messages.create(**ask("", **fields, stop_sequences=["Well"]))
    want = "system:be\nuser:a\nb\nassistant:None\ntool:error: no\nuser:so?\nassistant:"
    assert message.content[0].text == want


def test_thinking_between_calls_is_kept():
    """Interleaved thinking: of several blocks only the last one reached the template."""
    thought = {"type": "thinking", "signature": ""}
    blocks = (thought | {"thinking": "a"}, USE, thought | {"thinking": "b"}, USE | {"id": "2"})
    (message,) = chat_body(MessagesBody(messages=[said(*blocks)])).messages
    assert message["reasoning_content"] == "a\nb"
    assert [call["id"] for call in message["tool_calls"]] == ["1", "2"]


def test_messages_of_one_side_in_a_row_are_one_turn():
    """Their blocks are in order as those of one message are, results before what is said."""
    thought = {"type": "thinking", "thinking": "hm", "signature": ""}
    turns = [
        {"role": "user", "content": "a"},
        user({"type": "text", "text": "b"}),
        said(thought, USE),
        said({"type": "text", "text": "c"}, USE | {"id": "2"}),
        user(RESULT | {"tool_use_id": "1"}),
        {"role": "user", "content": "d"},
        user(RESULT | {"tool_use_id": "2"}, {"type": "text", "text": "e"}),
        {"role": "assistant", "content": "so"},
        {"role": "assistant", "content": "it is"},
    ]
    chat = chat_body(MessagesBody(messages=turns))
    asked, called, *results, then, begun = chat.messages
    assert asked == {"role": "user", "content": "a\nb"}
    assert (called["reasoning_content"], called["content"]) == ("hm", "c")
    assert [call["id"] for call in called["tool_calls"]] == ["1", "2"]
    assert [result["tool_call_id"] for result in results] == ["1", "2"]
    assert then == {"role": "user", "content": "d\ne"}
    assert begun == {"role": "assistant", "content": "so\nit is"}
    assert chat.continue_final_message


def test_thinking_comes_first(client):
    messages = [
        {"role": "user", "content": "so</think>yes<|eos|>"},
        {"role": "assistant", "content": "<think>"},
    ]
    message = client.messages.create(**ask("", messages=messages))
    assert [b.type for b in message.content] == ["thinking", "text"]
    assert (message.content[0].thinking, message.content[1].text) == ("user:so", "yes")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages[0].role"),
        ({"messages": [IMAGE]}, "messages[0].content[0]"),
        ({"messages": [user(), user({"type": "text", "text": "a"}, {})]}, "messages[1].content[1]"),
        ({"messages": []}, "messages must hold at least one message"),
        ({"messages": [], "system": "be"}, "messages must hold at least one message"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"system": [{"type": "image"}]}, "system[0]"),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools[0].type"),
        ({"messages": [user(RESULT)]}, "messages[0].content[0].tool_use_id must be a string"),
        ({"messages": [user(RESULT | {"is_error": "no"})]}, "messages[0].content[0].is_error must"),
        ({"messages": [user(RESULT | {"content": 0})]}, "messages[0].content[0].content must be"),
        ({"system": False}, "system must be a string or a list"),
        ({"messages": [said(USE | {"name": 1})]}, "messages[0].content[0].name must be a string"),
        ({"messages": [said(USE | {"id": None})]}, "messages[0].content[0].id must be a string"),
        ({"messages": [said(USE | {"input": [1]})]}, "messages[0].content[0].input must be an ob"),
        ({"messages": [said({"type": "thinking"})]}, "messages[0].content[0].thinking must be a"),
        ({"tools": [{**TOOL, "name": "a b"}]}, "tools[0].name must be"),
        ({"tools": [{**TOOL, "input_schema": 3}]}, "tools[0].input_schema must be"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name must be a string"),
        ({"tools": [{**TOOL, "defer_loading": True}]}, "tools[0].defer_loading is not offered"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "auto", "tools": ["f"]}},
            "tool_choice.tools is not offered",
        ),
        ({"stop_sequences": [""]}, "stop_sequences must not hold"),
        ({"tools": [TOOL], "tool_choice": {"type": "some"}}, "tool_choice.type"),
        (
            {"tool_choice": {"type": "auto", "disable_parallel_tool_use": "false"}},
            "tool_choice.disable_parallel_tool_use",
        ),
        ({"thinking": {"type": "always"}}, "thinking.type"),
        ({"thinking": {"type": "adaptive", "display": "omitted"}}, "thinking.display is not supp"),
        ({"thinking": {"type": "disabled", "effort": 1}}, "thinking.effort is not offered"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "disabled"}}, "thinking.type"),  # its tags are several tokens each
        ({"extra_body": {"some_future_field": 1}}, "unknown field"),
    ],
)
def test_refusals(client, fields, param):
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(**ask("hi", **fields))
    body = caught.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert body["error"]["message"].startswith(param)


def test_what_asks_for_nothing_is_taken(client):
    neutral = {
        "service_tier": "auto",
        "cache_control": {"type": "ephemeral"},
        "thinking": {"type": "adaptive", "display": "summarized"},
        "metadata": {"user_id": "me"},
        "tool_choice": {"type": "none"},
        "tools": [
            {
                **TOOL,
                "strict": True,
                "eager_input_streaming": True,
                "cache_control": {"type": "ephemeral"},
                "input_examples": None,
            }
        ],
    }
    message = client.messages.create(**ask("hey<|eos|>", **neutral))
    assert dumped(message) == [{"type": "text", "text": "user:hey"}]


@pytest.mark.parametrize(
    ("method", "path", "fields", "key", "status", "kind"),
    [
        ("POST", "/v1/messages", {}, "wrong", 401, "authentication_error"),
        ("POST", "/v1/messages/count_tokens", {}, "", 401, "authentication_error"),
        ("GET", "/v1/messages", {}, "secret", 405, "invalid_request_error"),
        ("POST", "/v1/messages/none", {}, "secret", 404, "not_found_error"),
        ("POST", "/v1/messages", {"max_tokens": 0}, "secret", 400, "invalid_request_error"),
        ("POST", "/v1/messages", {"system": "fault:tokenise"}, "secret", 500, "api_error"),
    ],
)
def test_every_failure_has_anthropics_shape(srv, method, path, fields, key, status, kind):
    found, _, body = srv.request(method, path, ask("hi", **fields), {"x-api-key": key})
    assert (found, body["type"], body["error"]["type"]) == (status, "error", kind)
    assert body["error"].keys() == {"type", "message"}


def test_failures(srv, client):
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**ask("hi", model="other"))
    with pytest.raises(anthropic.AuthenticationError):
        client.with_options(api_key="wrong").messages.create(**ask("hi"))
    with pytest.raises(anthropic.InternalServerError, match="NaN"):
        client.messages.create(**ask("<|nan|>"))
    with (
        pytest.raises(anthropic.APIStatusError, match="NaN"),
        client.messages.stream(**ask("<|nan|>")) as stream,
    ):
        stream.get_final_message()
