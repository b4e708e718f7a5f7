"""Tool calls and reasoning over HTTP. The mock engine's answer repeats the prompt."""

import asyncio
import json
from types import SimpleNamespace

import openai
import pytest
from mock_engine import BOS, SLOW, ByteTokenizer
from mock_server import running

from octavo.sampling.params import SamplingParams
from octavo.serve.call import Call
from octavo.serve.chat_formats import ChatFormats, answer_plan, chat_formats, tool_grammar
from octavo.serve.choice import Wanted
from octavo.serve.config import ServerConfig
from octavo.serve.detokenize import Detokenizer, TokenTable
from octavo.serve.errors import ApiError
from octavo.serve.metrics import Recorder
from octavo.serve.objects import Identity
from octavo.serve.prompts import Prompt, normalise_messages
from octavo.serve.split_generation import SplitGeneration
from octavo.serve.timing import Visit
from octavo.serve.tool_request import tool_use
from octavo.serve.types import Request, TokenEvent


def tool(name="f", **function):
    return {"type": "function", "function": {"name": name, "parameters": {}, **function}}


CALL = '<tool_call>{"name": "f", "arguments": {"a": "b}"}}</tool_call>'
NAMED = {"type": "function", "function": {"name": "f"}}


@pytest.fixture(scope="module")
def srv():
    with running() as server:
        yield server


@pytest.fixture(scope="module")
def thinking():
    with running(reasoning_parser="think") as server:
        yield server


def once(text, **fields):
    """Fields of a chat whose answer repeats its prompt of one message exactly once."""
    rendered = len(f"user:{text}\nassistant:".encode())
    message = {"role": "user", "content": text}
    return {"messages": [message], "max_tokens": rendered, "temperature": 0, **fields}


def joined(events):
    """The message that a stream's chunks make up, its finish reason, and its log-probabilities."""
    message = {"content": "", "reasoning_content": "", "tool_calls": []}
    reason, tokens = None, []
    for event in events[:-1]:
        for choice in event["choices"]:
            delta = choice["delta"]
            for name in ("content", "reasoning_content"):
                message[name] += delta.get(name) or ""
            for call in delta.get("tool_calls", []):
                if call["index"] == len(message["tool_calls"]):
                    assert call.keys() == {"index", "id", "type", "function"}
                    message["tool_calls"].append(call)
                else:
                    arguments = call["function"]["arguments"]
                    message["tool_calls"][call["index"]]["function"]["arguments"] += arguments
            reason = choice["finish_reason"] or reason
            if choice["logprobs"]:
                tokens += [item["token"] for item in choice["logprobs"]["content"]]
    return message, reason, tokens


def test_a_call_comes_out(srv):
    body = srv.good(srv.post("/v1/chat/completions", once(f"x {CALL} y<|eos|>", tools=[tool()])))
    (choice,) = body["choices"]
    message = choice["message"]
    assert message["content"] == "user:x" + "y"
    (call,) = message["tool_calls"]
    assert call["type"] == "function"
    assert call["id"].startswith("call_")
    assert call["function"] == {"name": "f", "arguments": '{"a": "b}"}'}
    assert choice["finish_reason"] == "tool_calls"
    assert "reasoning_content" not in message


@pytest.mark.parametrize("logprobs", [False, True])
def test_a_stream_adds_up_to_the_answer(srv, logprobs):
    text = f"x {CALL}\n{CALL} y"
    fields = once(text, tools=[tool()], logprobs=logprobs)
    (choice,) = srv.good(srv.post("/v1/chat/completions", fields))["choices"]
    message, reason, tokens = joined(srv.stream("/v1/chat/completions", fields))
    want = choice["message"]
    assert message["content"] == want["content"]
    assert [c["function"] for c in message["tool_calls"]] == [
        c["function"] for c in want["tool_calls"]
    ]
    assert len(want["tool_calls"]) == 2
    assert reason == choice["finish_reason"] == "length"
    if logprobs:
        assert tokens == [item["token"] for item in choice["logprobs"]["content"]]
        assert "".join(tokens) == f"user:{text}\nassistant:"


def test_parallel_calls_can_be_ruled_out(srv):
    fields = once(f"{CALL}{CALL}", tools=[tool()], parallel_tool_calls=False)
    body = srv.good(srv.post("/v1/chat/completions", fields))
    (choice,) = body["choices"]
    assert len(choice["message"]["tool_calls"]) == 1
    assert choice["finish_reason"] == "tool_calls"
    assert body["usage"]["completion_tokens"] < fields["max_tokens"]
    message, reason, _ = joined(srv.stream("/v1/chat/completions", fields))
    assert (len(message["tool_calls"]), reason) == (1, "tool_calls")
    srv.wait(srv.idle)


def test_a_named_function_gets_the_whole_answer(srv):
    """The mock's answer to a request with a grammar spells the grammar."""
    fields = once("q", tools=[tool("g"), tool()], tool_choice=NAMED, stop="object", max_tokens=99)
    (choice,) = srv.good(srv.post("/v1/chat/completions", fields))["choices"]
    assert choice["message"]["content"] is None
    assert choice["finish_reason"] == "stop"
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": 'json_schema {"type": "'}
    message, reason, _ = joined(srv.stream("/v1/chat/completions", fields))
    assert message["tool_calls"][0]["function"] == call["function"]
    assert reason == "stop"
    required = once("q", tools=[tool()], tool_choice="required", max_tokens=16, logprobs=True)
    (choice,) = srv.good(srv.post("/v1/chat/completions", required))["choices"]
    assert "".join(t["token"] for t in choice["logprobs"]["content"]) == "lark start: call"
    assert choice["message"]["content"] == ""
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize("fields", [{"tool_choice": "none"}, {"tools": [tool("g")]}])
def test_text_that_is_no_call_stays_text(srv, fields):
    fields = once(f"{CALL}<|eos|>", **{"tools": [tool()], **fields})
    (choice,) = srv.good(srv.post("/v1/chat/completions", fields))["choices"]
    assert choice["message"]["content"] == f"user:{CALL}"
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "stop"


def test_openai_client_puts_streamed_calls_together(srv):
    fields = once(f"x{CALL}{CALL}<|eos|>", tools=[tool()])
    with openai.OpenAI(base_url=f"http://127.0.0.1:{srv.port}/v1", api_key="k") as client:
        with client.chat.completions.stream(model="mock", **fields) as stream:
            done = stream.get_final_completion() if list(stream) else None
        calls = done.choices[0].message.tool_calls
        assert [json.loads(c.function.arguments) for c in calls] == [{"a": "b}"}] * 2
        assert done.choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": {}}, "tools"),
        ({"tools": [tool()] * 129}, "tools"),
        ({"tools": [tool(description="x" * (1 << 20))]}, "tools"),
        ({"tools": ["f"]}, "tools[0]"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [tool(), tool(name=None)]}, "tools[1].function.name"),
        ({"tools": [tool("a b")]}, "tools[0].function.name"),
        ({"tools": [tool("a" * 65)]}, "tools[0].function.name"),
        ({"tools": [tool(), tool()]}, "tools[1].function.name"),
        ({"tools": [tool(description=3)]}, "tools[0].function.description"),
        ({"tools": [tool(strict="yes")]}, "tools[0].function.strict"),
        ({"tools": [tool(parameters="x")]}, "tools[0].function.parameters"),
        ({"tools": [tool(parameters={"type": "array"})]}, "tools[0].function.parameters.type"),
        ({"tools": [tool()], "tool_choice": "always"}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": [tool("g")], "tool_choice": NAMED}, "tool_choice"),
        ({"tool_choice": NAMED}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"include_reasoning": 1}, "include_reasoning"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
    ],
)
def test_refusals_name_the_field(srv, fields, param):
    status, _, body = srv.chat("hi", **fields)
    assert (status, body["error"]["param"]) == (400, param)
    assert body["error"]["message"].startswith(param)


# Reasoning ---------------------------------------------------------------------------------------


def prefilled(**fields):
    """The answer is "user:so</think>yes...", behind a prefill that opens the think block."""
    messages = [
        {"role": "user", "content": "so</think>\nyes<|eos|>"},
        {"role": "assistant", "content": "<think>"},
    ]
    extra = {"continue_final_message": True, "max_tokens": 60, "temperature": 0}
    return {"messages": messages, **extra, **fields}


def test_reasoning_is_taken_out(thinking):
    body = thinking.good(thinking.post("/v1/chat/completions", prefilled(logprobs=True)))
    (choice,) = body["choices"]
    assert choice["message"]["reasoning_content"] == "user:so"
    assert choice["message"]["content"] == "yes"
    assert body["usage"]["completion_tokens_details"] == {
        "reasoning_tokens": len("user:so</think>")
    }
    tokens = [item["token"] for item in choice["logprobs"]["content"]]
    assert "".join(tokens).startswith("user:so</think>\nyes")
    message, reason, streamed = joined(
        thinking.stream("/v1/chat/completions", prefilled(logprobs=True))
    )
    assert (message["reasoning_content"], message["content"]) == ("user:so", "yes")
    assert (reason, streamed) == ("stop", tokens)


def test_reasoning_can_be_left_out(thinking):
    fields = prefilled(include_reasoning=False)
    body = thinking.good(thinking.post("/v1/chat/completions", fields))
    assert body["choices"][0]["message"]["reasoning_content"] is None
    assert body["choices"][0]["message"]["content"] == "yes"
    message, _, _ = joined(thinking.stream("/v1/chat/completions", fields))
    assert (message["reasoning_content"], message["content"]) == ("", "yes")


def test_an_answer_without_reasoning_is_content(thinking):
    (choice,) = thinking.good(thinking.chat("hey", max_tokens=4))["choices"]
    assert choice["message"]["content"] == "user"
    assert choice["message"]["reasoning_content"] is None


def test_calls_in_the_older_form_are_the_same_calls():
    """`function_call` and the role `function` were taken and then left out."""
    call = {"name": "f", "arguments": '{"x": 1}'}
    calls, result = normalise_messages(
        [
            {"role": "assistant", "content": None, "function_call": call},
            {"role": "function", "name": "f", "content": "2"},
        ]
    )
    function = {"name": "f", "arguments": {"x": 1}}
    assert calls["tool_calls"] == [{"type": "function", "function": function}]
    assert result == {"role": "tool", "name": "f", "content": "2"}
    call["arguments"] = "{"
    with pytest.raises(ApiError) as refused:
        normalise_messages([{"role": "assistant", "function_call": call}])
    assert refused.value.param == "messages[0].function_call.arguments"


def test_tokenize_counts_what_a_chat_with_the_same_fields_would_have():
    """Its template spells what it is given: tools were left out of the count."""
    base = {"messages": [{"role": "user", "content": "x"}]}
    with running(tokenizer="mock_engine:spelled_tokenizer", tool_parser="hermes") as server:
        counts = []
        for fields in (
            {},
            {"tools": [tool()]},
            {"tools": [tool()], "tool_choice": "none"},
            {"reasoning_effort": "none", "chat_template_kwargs": {"a": 1}},
            {"add_special_tokens": True},
        ):
            body = server.good(server.post("/tokenize", {**base, **fields}))
            chat = server.good(server.chat(**base, **fields))
            assert body["count"] == len(body["tokens"]) == chat["usage"]["prompt_tokens"]
            counts.append(body["count"])
        assert counts[0] == counts[2] < counts[4] == counts[0] + 1
        assert min(counts[1], counts[3]) > counts[0]
        assert server.post("/tokenize", {**base, "tools": 3})[2]["error"]["param"] == "tools"


# Which parser ------------------------------------------------------------------------------------


def formats(template, specials=(), **settings):
    tokenizer = SimpleNamespace(chat_template=template, tool_template=template)
    names = dict(enumerate(specials))
    table = SimpleNamespace(special_ids=frozenset(names), label=names.get)
    return chat_formats(ServerConfig(**settings), tokenizer, table)


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("no mention", "hermes"),
        (None, "hermes"),
        ("{{ message['tool_calls'] }} [TOOL_CALLS]", "hermes"),
        ("{{ tools }} <tool_call>", "hermes"),
        ("{{ tools }} [TOOL_CALLS]", "mistral"),
        ('{{ tools }} {"name": function name, "parameters": ...}', "llama3_json"),
        ("{{ tools }} [func_name1(params_name1=...)]", "pythonic"),
        ("{{ tools }} <tool_call><function=x>", None),
        ("{{ tools }} in a way of its own", None),
    ],
)
def test_auto_reads_the_template(template, name):
    assert formats(template).tools == name
    assert formats(template, tool_parser="none").tools is None
    assert formats(template, tool_parser="pythonic").tools == "pythonic"


def test_auto_reasoning_and_special_tokens():
    specials = ("<|im_end|>", "[TOOL_CALLS]", "</think>")
    found = formats("<think> {{ tools }} [TOOL_CALLS]", specials)
    assert found == ChatFormats("mistral", True, frozenset({1}), frozenset({2}))
    assert not formats("{{ messages }}").reasoning
    assert not formats("<think>", reasoning_parser="none").reasoning


def test_an_unknown_format_refuses_what_it_cannot_read():
    def plan(choice):
        use = tool_use([tool()], choice, None)
        fields = {"constrained": False, "opened": False, "include_reasoning": True}
        return answer_plan(ChatFormats(), use, **fields)

    with pytest.raises(ApiError, match="tool_parser"):
        plan("auto")
    assert plan("required").grammar.kind == "lark"
    assert plan(NAMED).grammar.kind == "json_schema"
    assert plan("none") is None


def test_required_calls_have_a_grammar_in_the_models_format():
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}}
    use = tool_use([tool("f", parameters=schema), tool("g")], "required", None)
    text = tool_grammar("hermes", use).text
    assert text.splitlines() == [
        'start: call ("\\n" call){0,7}',
        "call: call_0 | call_1",
        'call_0: "<tool_call>\\n{\\"name\\": \\"f\\", \\"arguments\\": " args_0 "}\\n</tool_call>"',
        f"args_0: %json {json.dumps(schema)}",
        'call_1: "<tool_call>\\n{\\"name\\": \\"g\\", \\"arguments\\": " args_1 "}\\n</tool_call>"',
        'args_1: %json {"type": "object"}',
    ]
    one = tool_use([tool()], "required", False)
    assert tool_grammar("mistral", one).text.startswith('start: "[" call "]"\n')


def test_marker_tokens_are_shown_to_the_parser_only():
    table = TokenTable(ByteTokenizer())
    detokenizer = Detokenizer(table, shown=frozenset({SLOW}))
    assert [detokenizer.push(i) for i in (SLOW, BOS, 97)] == ["<|slow|>", "", "a"]


@pytest.mark.parametrize("at_once", [1, 3, 8, 1000])
@pytest.mark.parametrize("ending", [None, "length"])
def test_what_is_drawn_behind_the_last_call_is_not_billed(at_once, ending):
    """Tokens that come in one event with the end of its arguments: how many is by chance."""
    plan = answer_plan(
        ChatFormats("hermes"),
        tool_use([tool()], "auto", False),
        constrained=False,
        opened=False,
        include_reasoning=True,
    )
    data = f"{CALL}{CALL}".encode()
    cuts = [data[i : i + at_once] for i in range(0, len(data), at_once)]
    events = [TokenEvent("r", tuple(cut)) for cut in cuts]
    events[-1].finish_reason = ending

    def started():
        client = SimpleNamespace(abort=lambda ids: None)
        client.submit = lambda requests, start_over: Call(client.abort, requests)
        wanted = Wanted(chat=True, usage=True)
        parts = (Recorder(), TokenTable(ByteTokenizer()), Identity("x", 0, "mock", "fp"), wanted)
        job = SplitGeneration(client, *parts, Visit(), plan)
        job.add(Prompt((97,)), Request("r", (97,), SamplingParams(max_tokens=len(data))))
        call = job.start()
        for event in events:
            call.put(event)
        return job

    async def whole():
        job = started()
        await job.collect()
        return json.loads(job.answer())

    async def stream():
        job = started()
        return b"".join([body async for body in job.stream(await job.first_events())])

    answer = asyncio.run(whole())
    (choice,) = answer["choices"]
    assert (choice["finish_reason"], len(choice["message"]["tool_calls"])) == ("tool_calls", 1)
    assert answer["usage"]["completion_tokens"] == CALL.index("}</tool_call>")
    *_, last, done = asyncio.run(stream()).split(b"\n\n")[:-1]
    assert done == b"data: [DONE]"
    assert json.loads(last.removeprefix(b"data: "))["usage"] == answer["usage"]
