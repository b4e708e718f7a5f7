"""Random chat requests from a seed, and a streamed answer joined into what a whole one says."""

import json
import random

TEXTS = (
    "Hi",
    "What is the weather in Paris?",
    "Réponds en français, s'il te plaît. 🙂",
    "数えてください: 1, 2, 3",
    "Call a tool.\n\n```python\nprint('</tool_call>')\n```",
    '{"name": "look_up", "arguments": {"city": "Rome"}}',
    '<tool_call>\n{"name": "look_up"',
    " \t ",
)
TOOLS = (
    {
        "name": "look_up",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
    {"name": "now", "parameters": {"type": "object", "properties": {}}},
    {"name": "no_schema"},
    {
        "name": "choose-one",
        "parameters": {
            "type": "object",
            "properties": {
                "way": {"enum": ["left", "right", None, 3]},
                "sure": {"type": "boolean"},
            },
            "required": ["way", "sure"],
            "additionalProperties": False,
        },
    },
)
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string", "maxLength": 8}, "b": {"type": "array", "items": {}}},
    "required": ["a"],
}


def history(rng):
    """Messages of every role and shape, ending so that an answer can follow."""
    messages = []
    if rng.random() < 0.3:
        messages.append({"role": rng.choice(["system", "developer"]), "content": rng.choice(TEXTS)})
    for _ in range(rng.choice([0, 0, 1, 2])):
        messages.append({"role": "user", "content": rng.choice(TEXTS)})
        if rng.random() < 0.4:
            call = {"name": "look_up", "arguments": '{"city": "Rome"}'}
            calls = [{"id": f"call_{len(messages)}", "type": "function", "function": call}]
            content = rng.choice([None, "", "I'll look."])
            messages.append({"role": "assistant", "content": content, "tool_calls": calls})
            answer = rng.choice(["sunny", '{"sky": "grey"}', ""])
            messages.append({"role": "tool", "tool_call_id": calls[0]["id"], "content": answer})
        else:
            messages.append({"role": "assistant", "content": rng.choice(TEXTS)})
    content = rng.choice(TEXTS)
    if rng.random() < 0.3:
        content = [{"type": "text", "text": content}, {"type": "text", "text": rng.choice(TEXTS)}]
    return [*messages, {"role": "user", "content": content}]


def request(seed):
    """The body of a valid chat request; equal seeds give equal ones."""
    rng = random.Random(f"chat {seed}")
    body = {"messages": history(rng), "seed": rng.randrange(1 << 20)}
    body["max_tokens"] = rng.choice([1, 5, 16, 40])
    body["temperature"] = rng.choice([0, 0.7, 1, 1.5])
    kind = rng.choice(["plain", "tools", "tools", "format", "prefill"])
    if kind == "tools":
        tools = rng.sample(TOOLS, rng.randrange(1, len(TOOLS) + 1))
        body["tools"] = [{"type": "function", "function": tool} for tool in tools]
        named = {"type": "function", "function": {"name": rng.choice(tools)["name"]}}
        body["tool_choice"] = rng.choice(["auto", "none", "required", "required", named, named])
        body["parallel_tool_calls"] = rng.random() < 0.7
    elif kind == "format":
        schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
        body["response_format"] = rng.choice([{"type": "json_object"}, schema, {"type": "text"}])
    elif kind == "prefill":
        body["messages"].append({"role": "assistant", "content": rng.choice(["Sure", "1, 2,"])})
        body |= {"continue_final_message": True, "add_generation_prompt": False}
    for name, value in (
        ("n", rng.choice([2, 3])),
        ("stop", rng.choice([["e"], ["}", "\n\n"], "the"])),
        ("logprobs", True),
        ("top_p", 0.9),
        ("presence_penalty", 0.5),
        ("min_tokens", 1),
        ("include_stop_str_in_output", True),
        ("logit_bias", {"30": 2}),
    ):
        if rng.random() < 0.2:
            body[name] = value
    if body.get("logprobs") and rng.random() < 0.5:
        body["top_logprobs"] = 2
    return body


def plain(message):
    """A message's fields that say something, calls without their random ids."""
    found = {
        name: message[name]
        for name in ("role", "content", "reasoning_content", "refusal")
        if message.get(name)
    }
    calls = [call["function"] for call in message.get("tool_calls") or []]
    return found | ({"tool_calls": calls} if calls else {})


def of_whole(answer):
    """What a whole answer says: by choice, then the usage."""
    choices = {
        choice["index"]: {
            "message": plain(choice["message"]),
            "finish_reason": choice["finish_reason"],
            "logprobs": (choice.get("logprobs") or {}).get("content"),
        }
        for choice in answer["choices"]
    }
    return choices, answer["usage"]


def of_stream(text):
    """What a stream of server-sent events says, in the same form; checks its framing."""
    events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert events.pop() == "[DONE]"
    choices, usage = {}, None
    for event in map(json.loads, events):
        assert "error" not in event, event
        usage = event.get("usage") or usage
        for part in event["choices"]:
            at = choices.setdefault(
                part["index"], {"message": {}, "finish_reason": None, "logprobs": None}
            )
            assert at["finish_reason"] is None, "news after the end"
            join(at["message"], part["delta"])
            if part.get("logprobs"):
                at["logprobs"] = (at["logprobs"] or []) + part["logprobs"]["content"]
            at["finish_reason"] = part["finish_reason"]
    for choice in choices.values():
        choice["message"] = plain(choice["message"])
    return choices, usage


def join(message, delta):
    """Add a delta: texts grow, a call is named once and its arguments grow."""
    for name, value in delta.items():
        if name == "role":
            message[name] = value
        elif name == "tool_calls":
            calls = message.setdefault(name, [])
            for part in value:
                if part["index"] == len(calls):
                    assert part["id"]
                    calls.append({"function": {"name": part["function"]["name"], "arguments": ""}})
                function = calls[part["index"]]["function"]
                function["arguments"] += part["function"].get("arguments") or ""
        elif value:
            message[name] = message.get(name, "") + value
