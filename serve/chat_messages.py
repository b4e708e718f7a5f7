"""Messages in the form that chat templates take. No jax."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.sampling.shown import shown
from octavo.serve.strict_json import strict_json
from octavo.serve.tool_prompt import knows_tools, spell_out_tools

CUT_MARK = "\ue000octavo:end of the final message\ue001"
"""Stands behind the content of a message that is to be continued: where its template cuts."""

_LOOP_OVER_CONTENT = re.compile(r"\bfor\s+\w+\s+in\s+\w+(?:\.content\b|\[['\"]content['\"]\])")


def prepare_messages(
    messages: Sequence[Mapping[str, Any]],
    template: str,
    *,
    cut: bool,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> list[dict[str, Any]]:
    """Copies of `messages` with content as the template takes it.

    Content becomes text, its parts joined by newlines (a list of one part for a template that only
    loops over parts); absent content is empty; the arguments of tool calls become objects. `cut`
    puts CUT_MARK behind the last content. For a template that mentions no tools, calls, results and
    `tools` become text. ValueError for no messages, a message that is not an
    object with a role, and parts that are not text.
    """
    if not messages:
        raise ValueError("a chat needs at least one message")
    prepared = [_prepare(message, index) for index, message in enumerate(messages)]
    if not knows_tools(template):
        prepared = spell_out_tools(prepared, tools)
    if cut:
        prepared[-1]["content"] += CUT_MARK
    if takes_parts_only(template):
        for message in prepared:
            message["content"] = [{"type": "text", "text": message["content"]}]
    return prepared


def takes_parts_only(template: str) -> bool:
    """Whether a template loops over content without asking if it is a string."""
    return bool(_LOOP_OVER_CONTENT.search(template)) and "is string" not in template


def _prepare(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ValueError(f"messages[{index}] must be an object with a role")
    prepared = {**message, "content": _text(message.get("content"), index)}
    if message.get("tool_calls"):
        prepared["tool_calls"] = [_call(call) for call in message["tool_calls"]]
    return prepared


def _text(content: Any, index: int) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, Sequence):
        raise ValueError(f"messages[{index}].content must be text or a list of text parts")
    return "\n".join(_part(part, index) for part in content)


def _part(part: Any, index: int) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    text = part.get("text") if isinstance(part, Mapping) else None
    if kind != "text" or not isinstance(text, str):
        raise ValueError(
            f"messages[{index}].content has a part of type {shown(kind)}; only text is read"
        )
    return text


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return dict(call)
    try:
        arguments = strict_json(function["arguments"])
    except ValueError:
        return dict(call)
    return {**call, "function": {**function, "arguments": arguments}}
