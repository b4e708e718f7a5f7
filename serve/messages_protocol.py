"""Anthropic's /v1/messages: its body, and the chat request that means the same."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from pydantic import BaseModel, ConfigDict

from octavo.sampling.shown import shown
from octavo.serve.errors import ApiError, invalid, unsupported
from octavo.serve.protocol import ChatBody, StopStrings
from octavo.serve.reasoning import MAX_BUDGET
from octavo.serve.reasoning_effort import SWITCH

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_OF_A_TOOL = (
    "type",
    "name",
    "description",
    "input_schema",
    "strict",
    "cache_control",
    "eager_input_streaming",
)
"""Fields of a tool: from `strict` on without effect, see docs/serving.md."""

_NOT_TEXT = "only text, thinking, tool_use and tool_result blocks are accepted"


CHAT_WORDS = {
    r"\bthinking_token_budget\b": "thinking.budget_tokens",
    r"\breasoning_effort\b": "thinking.type",
    r"(tools\[\d+\])\.function\.parameters\b": r"\1.input_schema",
    r"(tools\[\d+\])\.function\b": r"\1",
    r"^stop\b": "stop_sequences",
}
"""Fields of the chat request as the caller knows them: see errors.in_words."""


class MessagesBody(BaseModel):
    """POST /v1/messages. None means the default."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

    model: str | None = None
    messages: list[Any]
    max_tokens: int | None = None
    system: Any = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: StopStrings | None = None
    stream: bool | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    thinking: Any = None
    service_tier: str | None = None
    cache_control: Any = None
    return_timing: bool | None = None

    refused: ClassVar[Mapping[str, tuple[str, tuple[Any, ...]]]] = {
        "thinking_token_budget": ("use thinking.budget_tokens", ()),
    }


class Placed(NamedTuple):
    """A block of content, and where it came."""

    where: str
    block: Any


def chat_body(body: MessagesBody) -> ChatBody:
    """The same request to /v1/chat/completions; ApiError 400 naming the field at fault.

    Messages of one side in a row are one turn, as with Anthropic: many templates want the sides to
    alternate. A final assistant turn is the start of the answer, which goes on behind it.
    """
    if not body.messages:
        raise _wrong("messages", "must hold at least one message")
    messages: list[dict[str, Any]] = []
    system = "" if body.system is None else _text(body.system, "system")
    if system:
        messages.append({"role": "system", "content": system})
    for role, blocks in _turns(body.messages):
        messages += (_user if role == "user" else _assistant)(blocks)
    choice, parallel = _choice(body.tool_choice)
    kind, budget = _thinking(body.thinking)
    return ChatBody(
        messages=messages,
        max_tokens=body.max_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        stop=body.stop_sequences,
        tools=[_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools or ())],
        tool_choice=choice,
        parallel_tool_calls=parallel,
        continue_final_message=bool(messages) and messages[-1]["role"] == "assistant",
        reasoning_effort="none" if kind == "disabled" else None,
        chat_template_kwargs={SWITCH: True} if kind == "enabled" else None,
        thinking_token_budget=budget,
    )


def _thinking(thinking: Any) -> tuple[str | None, int | None]:
    """Kind of `thinking` and tokens of reasoning it allows; None leaves either to the model."""
    kind = _kind(thinking)
    if kind is not None:
        _only(thinking, ("type", "budget_tokens", "display"), "thinking")
        if thinking.get("display") not in (None, "summarized"):
            raise unsupported("thinking.display", "the reasoning itself comes out, unabridged")
    if thinking is None or kind in ("adaptive", "disabled"):
        return kind, None
    if kind != "enabled":
        what = f"must be enabled, adaptive or disabled, not {shown(kind or thinking)}"
        raise _wrong("thinking.type", what)
    budget = thinking.get("budget_tokens")
    if type(budget) is not int or not 1 <= budget <= MAX_BUDGET:
        raise _wrong("thinking.budget_tokens", f"must be 1 .. {MAX_BUDGET}, not {shown(budget)}")
    return kind, budget


def _choice(choice: Any) -> tuple[Any, bool | None]:
    if choice is None:
        return None, None
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "tool":
        name = _string(choice, "name", "tool_choice")
        chosen: Any = {"type": "function", "function": {"name": name}}
    elif isinstance(kind, str) and kind in _CHOICES:
        chosen = _CHOICES[kind]
    else:
        what = f"must be auto, any, tool or none, not {shown(kind or choice)}"
        raise invalid(f"tool_choice.type {what}", "tool_choice")
    _only(choice, ("type", "name", "disable_parallel_tool_use"), "tool_choice")
    single = choice.get("disable_parallel_tool_use", False)
    if not isinstance(single, bool):
        field = "tool_choice.disable_parallel_tool_use"
        raise _wrong(field, f"must be true or false, not {shown(single)}")
    return chosen, not single


def _tool(tool: Any, where: str) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise _wrong(where, f"must be an object, not {shown(tool)}")
    if tool.get("type") not in (None, "custom"):
        raise _wrong(f"{where}.type", f"must be 'custom', not {shown(tool['type'])}")
    _only(tool, _OF_A_TOOL, where)
    function = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
    if tool.get("description") is not None:
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def _turns(messages: list[Any]) -> list[tuple[str, list[Placed]]]:
    """The side of each turn, and its blocks."""
    turns: list[tuple[str, list[Placed]]] = []
    for i, message in enumerate(messages):
        role, blocks = _said(message, f"messages[{i}]")
        if turns and turns[-1][0] == role:
            turns[-1][1].extend(blocks)
        else:
            turns.append((role, blocks))
    return turns


def _said(message: Any, where: str) -> tuple[str, list[Placed]]:
    """Who says a message, and its blocks: a text alone is one."""
    role = message.get("role") if isinstance(message, dict) else None
    if role not in ("user", "assistant"):
        raise _wrong(f"{where}.role", f"must be user or assistant, not {shown(role or message)}")
    content, where = message.get("content"), f"{where}.content"
    if isinstance(content, str):
        return role, [Placed(where, {"type": "text", "text": content})]
    if not isinstance(content, list):
        raise _wrong(where, f"must be a string or a list of blocks, not {shown(content)}")
    return role, [Placed(f"{where}[{i}]", block) for i, block in enumerate(content)]


def _user(blocks: list[Placed]) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    texts: list[str] = []
    for where, block in blocks:
        if _kind(block) == "tool_result":
            out.append(_result(block, where))
        else:
            texts.append(_block_text(block, where))
    return [*out, {"role": "user", "content": "\n".join(texts)}] if texts or not out else out


def _result(block: dict[str, Any], where: str) -> dict[str, Any]:
    content, failed = block.get("content"), block.get("is_error")
    text = "" if content is None else _text(content, f"{where}.content")
    if not isinstance(failed, bool | None):
        raise _wrong(f"{where}.is_error", f"must be true or false, not {shown(failed)}")
    call_id = _string(block, "tool_use_id", where)
    text = f"error: {text}" if failed else text
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def _assistant(blocks: list[Placed]) -> list[dict[str, Any]]:
    message: dict[str, Any] = {"role": "assistant"}
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for where, block in blocks:
        kind = _kind(block)
        if kind == "tool_use":
            calls.append(_call(block, where))
        elif kind == "thinking":
            thoughts.append(_string(block, "thinking", where))
        else:
            texts.append(_block_text(block, where))
    message["content"] = "\n".join(texts) if texts or not calls else None
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    return [message | ({"tool_calls": calls} if calls else {})]


def _call(block: dict[str, Any], where: str) -> dict[str, Any]:
    given = block.get("input", {})
    if not isinstance(given, dict):
        raise _wrong(f"{where}.input", f"must be an object, not {shown(given)}")
    arguments = json.dumps(given, ensure_ascii=False)
    function = {"name": _string(block, "name", where), "arguments": arguments}
    return {"id": _string(block, "id", where), "type": "function", "function": function}


def _kind(block: Any) -> str | None:
    return block.get("type") if isinstance(block, dict) else None


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _wrong(where, f"must be a string or a list of text blocks, not {shown(content)}")
    return "\n".join(_block_text(block, f"{where}[{i}]") for i, block in enumerate(content))


def _block_text(block: Any, where: str) -> str:
    if _kind(block) != "text" or not isinstance(block.get("text"), str):
        raise _wrong(where, f"{_NOT_TEXT}, not {shown(_kind(block) or block)}")
    return block["text"]


def _only(given: dict[str, Any], known: Sequence[str], where: str) -> None:
    """Refuse what would be overlooked, unless it is null."""
    for name, value in given.items():
        if name not in known and value is not None:
            raise _wrong(f"{where}.{name[:64]}", f"is not offered; known: {', '.join(known)}")


def _string(block: dict[str, Any], name: str, where: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise _wrong(f"{where}.{name}", f"must be a string, not {shown(value)}")
    return value


def _wrong(where: str, what: str) -> ApiError:
    return invalid(f"{where} {what}", where)
