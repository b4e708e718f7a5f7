"""Tools for chat templates that show none: described in the system message, in Hermes' form.

Calls and results of the history are written as text too, since such a template shows only roles and
content.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

_TOOLS, _CALLS = re.compile(r"\btools\b"), re.compile(r"\btool_calls\b")

_INTRODUCTION = """You can call functions. Each line between <tools> and </tools> describes one:
<tools>
{tools}
</tools>
To call a function, write its name and arguments as a JSON object between tags:
<tool_call>
{{"name": "FUNCTION", "arguments": {{"ARGUMENT": "VALUE"}}}}
</tool_call>
Its result follows between <tool_response> and </tool_response>. If no function helps, answer \
in words."""


def shows_tools(template: str) -> bool:
    """Whether a chat template's source mentions tools."""
    return bool(_TOOLS.search(template))


def shows_calls(template: str) -> bool:
    """Whether it mentions the calls of earlier answers."""
    return bool(_CALLS.search(template))


def spell_out_tools(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
) -> list[dict[str, Any]]:
    """The conversation without tool messages and calls, which are text now, and with `tools`.

    `messages` are as `prepare_messages` leaves them, their content being text.
    """
    spelled: list[dict[str, Any]] = []
    for before, message in zip([{"role": ""}, *messages], messages):
        written = _spelled(message)
        if before["role"] == "tool" and written["role"] == "user":
            # Many templates want the roles to alternate.
            spelled[-1]["content"] += "\n" + written["content"]
        else:
            spelled.append(written)
    if not tools:
        return spelled
    lines = (json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    text = _INTRODUCTION.format(tools="\n".join(lines))
    if spelled and spelled[0]["role"] == "system":
        first = {**spelled[0], "content": f"{spelled[0]['content']}\n\n{text}"}
        return [first, *spelled[1:]]
    return [{"role": "system", "content": text}, *spelled]


def _spelled(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message["content"] or ""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    parts = [content] if content else []
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        shown = {key: function.get(key) for key in ("name", "arguments")}
        body = json.dumps(shown, ensure_ascii=False)
        parts.append(f"<tool_call>\n{body}\n</tool_call>")
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": "\n".join(parts)}
