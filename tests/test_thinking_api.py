"""Budgets of reasoning over HTTP. The mock repeats its prompt, from the seed's place on."""

import anthropic
import openai
import pytest
from mock_server import running
from test_server_tools import joined

TEXT = "<think>abcdef</think>yes<|eos|>"
LATE = {"seed": len("user:"), "temperature": 1.0, "max_tokens": 60}
"""The answer begins at the text's own start."""

PREFILLED = [
    {"role": "user", "content": "so<|eos|>"},
    {"role": "assistant", "content": "<think>"},
]


@pytest.fixture(scope="module")
def srv():
    tokenizer = "mock_engine:tagged_tokenizer"
    fields = {"engine": {"generation": {"temperature": 0}}, "reasoning_parser": "think"}
    with running(tokenizer=tokenizer, **fields) as server:
        yield server


@pytest.mark.parametrize(
    ("budget", "reasoning", "content"),
    [
        (0, None, "bcdef</think>yes"),
        (3, "abc", "ef</think>yes"),
        (6, "abcdef", "yes"),
        (7, "abcdef", "yes"),
    ],
)
def test_reasoning_is_cut_at_its_budget(srv, budget, reasoning, content):
    """The forced tag stands where the mock's next token would: that one is lost."""
    fields = {**LATE, "thinking_token_budget": budget, "n": 1}
    body = srv.good(srv.chat(TEXT, **fields))
    (choice,) = body["choices"]
    assert choice["message"]["reasoning_content"] == reasoning
    assert choice["message"]["content"] == content
    counted = body["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert counted == len(reasoning or "") + 2
    messages = [{"role": "user", "content": TEXT}]
    events = srv.stream("/v1/chat/completions", {"messages": messages, **fields})
    message, reason, _ = joined(events)
    assert (message["reasoning_content"] or None, message["content"]) == (reasoning, content)
    assert reason == "stop"


def test_a_block_that_the_prompt_opened_counts_from_the_first_token(srv):
    fields = {"continue_final_message": True, "thinking_token_budget": 2, "max_tokens": 60}
    (choice,) = srv.good(srv.chat(PREFILLED, **fields))["choices"]
    assert choice["message"]["reasoning_content"] == "us"
    assert choice["message"]["content"] == "r:so"


def test_a_grammar_leaves_nothing_to_bound(srv):
    fields = {"thinking_token_budget": 2, "response_format": {"type": "json_object"}}
    (choice,) = srv.good(srv.chat("q", **fields, max_tokens=30))["choices"]
    assert choice["message"]["content"].startswith("json_object")


def test_responses_take_it(srv):
    address = f"http://127.0.0.1:{srv.port}/v1"
    with openai.OpenAI(base_url=address, api_key="k", max_retries=0) as client:
        extra = {"thinking_token_budget": 3, "seed": LATE["seed"]}
        response = client.responses.create(
            model="mock", input=TEXT, temperature=1.0, max_output_tokens=60, extra_body=extra
        )
    assert response.output[0].content[0].text == "abc"
    assert response.output_text == "ef</think>yes"
    assert response.usage.output_tokens_details.reasoning_tokens == len("abc") + 2


def test_anthropics_thinking_has_a_budget(srv):
    fields = {"model": "mock", "max_tokens": 60, "messages": PREFILLED}
    budget = {"type": "enabled", "budget_tokens": 2}
    address = f"http://127.0.0.1:{srv.port}"
    with anthropic.Anthropic(base_url=address, api_key="k", max_retries=0) as client:
        message = client.messages.create(**fields, thinking=budget)
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert (message.content[0].thinking, message.content[1].text) == ("us", "r:so")


OFF = {
    "/v1/chat/completions": {"reasoning_effort": "none"},
    "/v1/responses": {"reasoning": {"effort": "none"}},
    "/v1/messages": {"thinking": {"type": "disabled"}},
}
ON = {"/v1/messages": {"thinking": {"type": "enabled", "budget_tokens": 9}}}


def asked(server, path, fields):
    """An answer to "hi<|eos|>" through any of the three endpoints."""
    said = [{"role": "user", "content": "hi<|eos|>"}]
    body = {"input": said, "max_output_tokens": 60} if "responses" in path else None
    return server.post(path, (body or {"messages": said, "max_tokens": 60}) | fields)


def test_none_and_disabled_are_the_templates_switch():
    fields = {"engine": {"generation": {"temperature": 0}}, "reasoning_parser": "think"}
    with running(tokenizer="mock_engine:switched_tokenizer", **fields) as server:

        def length(path, fields):
            usage = server.good(asked(server, path, fields))["usage"]
            names = ("prompt_tokens", "input_tokens", "cache_read_input_tokens")
            return sum(usage.get(name, 0) for name in names)

        for path, off in OFF.items():
            assert length(path, off) == length(path, {}) + 1
        for path, on in ON.items():
            assert length(path, on) == length(path, {}) + 2
        body = {"messages": PREFILLED[:1], **OFF["/v1/messages"]}
        counted = server.good(server.post("/v1/messages/count_tokens", body))["input_tokens"]
        assert counted == length("/v1/messages", OFF["/v1/messages"])


def test_without_a_switch_they_close_the_block_as_it_opens(srv):
    """The mock draws the tag in place of its first token."""
    chat = {"messages": PREFILLED, "continue_final_message": True, "max_tokens": 60}
    whole = srv.good(srv.post("/v1/chat/completions", chat | OFF["/v1/chat/completions"]))
    message = whole["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == (None, "ser:so")
    body = {"messages": PREFILLED, "max_tokens": 60}
    (block,) = srv.good(srv.post("/v1/messages", body | OFF["/v1/messages"]))["content"]
    assert block == {"type": "text", "text": "ser:so"}
    body = {"input": TEXT, "max_output_tokens": 60, "temperature": 1.0, "seed": LATE["seed"]}
    (item,) = srv.good(srv.post("/v1/responses", body | OFF["/v1/responses"]))["output"]
    assert item["content"][0]["text"] == "bcdef</think>yes"


def test_a_model_that_does_not_reason_has_nothing_to_turn_off():
    with running(engine={"generation": {"temperature": 0}}, reasoning_parser="none") as server:
        for path, off in OFF.items():
            assert asked(server, path, off)[0] == 200
        for path, on in ON.items():
            status, _, body = asked(server, path, on)
            assert status == 400
            assert body["error"]["message"].startswith("thinking.budget_tokens is not supported")
        assert "reasoning_parser" in refused(server, 5)


def refused(server, budget):
    status, _, body = server.chat("hi", thinking_token_budget=budget)
    assert (status, body["error"]["param"]) == (400, "thinking_token_budget")
    return body["error"]["message"]


def test_refusals(srv):
    assert "must be 0" in refused(srv, -1)
    assert "must be 0" in refused(srv, 2**31)
    assert srv.complete("hi", thinking_token_budget=5)[0] == 400
    with running(reasoning_parser="think") as server:
        assert "one token each" in refused(server, 5)
