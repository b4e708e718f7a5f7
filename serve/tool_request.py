"""`tools`, `tool_choice` and `parallel_tool_calls` of a chat: checked, and what they ask for."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from octavo.sampling.shown import shown
from octavo.serve.errors import ApiError, invalid

MAX_TOOLS = 128
MAX_TOOLS_BYTES = 1 << 20
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_CHOICES = 'tool_choice must be "none", "auto", "required" or name a function'


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a request and how they may be called.

    Attributes:
        tools: as given, for the chat template.
        schemas: parameters by function name.
        required: an answer is nothing but calls.
        forced: the function that is called, if the choice names one.
        parallel: several calls may be made.
    """

    tools: tuple[dict[str, Any], ...]
    schemas: Mapping[str, Mapping[str, Any]]
    required: bool = False
    forced: str | None = None
    parallel: bool = True


def tool_use(tools: Any, choice: Any, parallel: bool | None) -> ToolUse | None:
    """What the three fields ask for; None when no tool may be called. ApiError 400."""
    schemas = _schemas(tools)
    name = _named(choice)
    if name is None and choice not in (None, "none", "auto", "required"):
        raise invalid(f"{_CHOICES}, not {shown(choice)}", "tool_choice")
    if name is not None and name not in schemas:
        known = ", ".join(schemas) or "none are given"
        raise invalid(f"tool_choice: no tool is named {shown(name)}; tools: {known}", "tool_choice")
    if choice == "required" and not schemas:
        raise invalid("tool_choice: required needs at least one tool", "tool_choice")
    if choice == "none" or not schemas:
        return None
    return ToolUse(tuple(tools), schemas, choice == "required", name, parallel is not False)


def _named(choice: Any) -> str | None:
    if not isinstance(choice, dict) or choice.get("type") != "function":
        return None
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def _schemas(tools: Any) -> dict[str, Mapping[str, Any]]:
    if tools is None:
        return {}
    if not isinstance(tools, list):
        raise invalid(f"tools must be a list, not {shown(tools)}", "tools")
    if len(tools) > MAX_TOOLS:
        raise invalid(f"tools: at most {MAX_TOOLS}, not {len(tools)}", "tools")
    size = len(msgspec.json.encode(tools))
    if size > MAX_TOOLS_BYTES:
        raise invalid(f"tools: at most {MAX_TOOLS_BYTES} bytes of JSON, not {size}", "tools")
    schemas: dict[str, Mapping[str, Any]] = {}
    for i, tool in enumerate(tools):
        name, schema = _function(tool, f"tools[{i}]")
        if name in schemas:
            raise _wrong(f"tools[{i}].function.name", f"must be unique: {shown(name)} comes twice")
        schemas[name] = schema
    return schemas


def _function(tool: Any, where: str) -> tuple[str, Mapping[str, Any]]:
    if not isinstance(tool, dict):
        raise _wrong(where, f"must be an object, not {shown(tool)}")
    if tool.get("type") != "function":
        raise _wrong(f"{where}.type", f"must be 'function', not {shown(tool.get('type'))}")
    function, where = tool.get("function"), f"{where}.function"
    if not isinstance(function, dict):
        raise _wrong(where, f"must be an object, not {shown(function)}")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        what = "must be 1 .. 64 of the characters a-z A-Z 0-9 _ -"
        raise _wrong(f"{where}.name", f"{what}, not {shown(name)}")
    description = function.get("description")
    if description is not None and not isinstance(description, str):
        raise _wrong(f"{where}.description", f"must be a string, not {shown(description)}")
    if function.get("strict") not in (None, True, False):
        raise _wrong(f"{where}.strict", f"must be a boolean, not {shown(function['strict'])}")
    return name, _parameters(function.get("parameters"), f"{where}.parameters")


def _parameters(schema: Any, where: str) -> Mapping[str, Any]:
    if schema is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    if not isinstance(schema, dict):
        raise _wrong(where, f"must be a JSON schema, not {shown(schema)}")
    if schema.get("type", "object") != "object":
        raise _wrong(f"{where}.type", f"must be 'object', not {shown(schema['type'])}")
    return {"type": "object", **schema}


def _wrong(where: str, what: str) -> ApiError:
    return invalid(f"{where} {what}", where)
