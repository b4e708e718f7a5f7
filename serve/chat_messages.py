"""Messages in the form that chat templates take. No jax."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.sampling.shown import shown
from octavo.serve.strict_json import strict_json
from octavo.serve.tool_prompt import shows_calls, shows_tools, spell_out_tools

CUT_MARK = "\ue000octavo:end of the final message\ue001"
"""Stands behind the content of a message that is to be continued: where its template cuts."""

_LOOP_OVER_CONTENT = re.compile(r"\bfor\s+\w+\s+in\s+\w+(?:\.content\b|\[['\"]content['\"]\])")
_ASKS_IF_NONE = re.compile(r"\bcontent(?:['\"]\])?\s+is\s+(?:not\s+)?none\b", re.IGNORECASE)


class Arguments(dict[str, Any]):
    """Arguments of a call: an object to templates that look inside, else its JSON text.

    Templates differ in which of the two they expect.
    """

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __add__(self, after: str) -> str:
        return str(self) + after

    def __radd__(self, before: str) -> str:
        return before + str(self)


def prepare_messages(
    messages: Sequence[Mapping[str, Any]],
    template: str,
    *,
    cut: bool,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> list[dict[str, Any]]:
    """Copies of `messages` with content as the template takes it.

    Content becomes text, its parts joined by newlines (a list of one part for a template that only
    loops over parts); absent content is empty, but None beside tool calls for a template that asks
    if it is none; arguments of tool calls become `Arguments`. `cut` puts CUT_MARK behind the last
    content. For a template that shows no tools, `tools` become text, and with them, or where it
    shows no calls either, calls and their results. ValueError for no messages, a message that is
    not an object with a role, parts that are not text, and calls behind a content that is cut.
    """
    if not messages:
        raise ValueError("a chat needs at least one message")
    prepared = [_prepare(message, index) for index, message in enumerate(messages)]
    if not shows_tools(template) and (tools or not shows_calls(template)):
        prepared = spell_out_tools(prepared, tools)
    elif _ASKS_IF_NONE.search(template):
        for message in prepared:
            if message.get("tool_calls"):
                message["content"] = message["content"] or None
    if cut:
        if prepared[-1].get("tool_calls"):
            raise ValueError("the last message can't be continued: its calls stand behind its text")
        prepared[-1]["content"] = (prepared[-1]["content"] or "") + CUT_MARK
    if takes_parts_only(template):
        for message in prepared:
            if message["content"] is not None:
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
    if not isinstance(function, Mapping) or "arguments" not in function:
        return dict(call)
    arguments = function["arguments"]
    if isinstance(arguments, str):
        try:
            arguments = strict_json(arguments)
        except ValueError:
            return dict(call)
    if isinstance(arguments, dict):
        arguments = Arguments(arguments)
    return {**call, "function": {**function, "arguments": arguments}}
