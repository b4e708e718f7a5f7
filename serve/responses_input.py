"""Input items of /v1/responses to the messages of a chat."""

from typing import Any

from octavo.sampling.shown import shown
from octavo.serve.errors import ApiError, invalid
from octavo.serve.strict_json import strict_json

_ROLES = ("user", "assistant", "system", "developer")
_TYPES = ("message", "function_call", "function_call_output", "reasoning")
_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}


def input_messages(value: Any) -> list[dict[str, Any]]:
    """Messages of a chat that say the same; ApiError 400 naming the item at fault."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        what = f"input must be a string or a list of at least one item, not {shown(value)}"
        raise invalid(what, "input")
    history = _History()
    for i, item in enumerate(value):
        history.add(item, f"input[{i}]")
    return history.finished()


class _History:
    """Messages in the making. Reasoning, text and calls in a row are one assistant message."""

    def __init__(self) -> None:
        self._messages: list[dict[str, Any]] = []
        self._turn: dict[str, Any] | None = None

    def add(self, item: Any, where: str) -> None:
        kind = item.get("type", "message") if isinstance(item, dict) else None
        match kind:
            case "message":
                self._message(item, where)
            case "function_call":
                self._call(item, where)
            case "function_call_output":
                output = _text(item.get("output"), f"{where}.output")
                call_id = _string(item, "call_id", where)
                self._append({"role": "tool", "tool_call_id": call_id, "content": output})
            case "reasoning":
                self._reasoning(item, where)
            case _:
                raise _wrong(
                    f"{where}.type",
                    f"must be one of {', '.join(_TYPES)}, not {shown(kind or item)}",
                )

    def finished(self) -> list[dict[str, Any]]:
        self._end_turn()
        return self._messages

    def _message(self, item: dict[str, Any], where: str) -> None:
        role = item.get("role")
        if role not in _ROLES:
            raise _wrong(f"{where}.role", f"must be one of {', '.join(_ROLES)}, not {shown(role)}")
        text = _text(item.get("content"), f"{where}.content")
        if role != "assistant":
            self._append({"role": role, "content": text})
            return
        if self._turn is not None and ("content" in self._turn or "tool_calls" in self._turn):
            self._end_turn()
        self._open_turn()["content"] = text

    def _call(self, item: dict[str, Any], where: str) -> None:
        arguments = _string(item, "arguments", where)
        try:
            strict_json(arguments or "{}")
        except (ValueError, RecursionError):
            raise _wrong(f"{where}.arguments", f"must be JSON, not {shown(arguments)}") from None
        function = {"name": _string(item, "name", where), "arguments": arguments}
        call = {"id": _string(item, "call_id", where), "type": "function", "function": function}
        self._open_turn().setdefault("tool_calls", []).append(call)

    def _reasoning(self, item: dict[str, Any], where: str) -> None:
        parts = item.get("content")
        if parts is None and item.get("encrypted_content") is not None:
            what = "can't be read here: send the item with its content, or leave it out"
            raise _wrong(f"{where}.encrypted_content", what)
        text = "" if parts is None else _text(parts, f"{where}.content", {"reasoning_text": "text"})
        self._end_turn()
        if text:  # a summary is for people to read
            self._open_turn()["reasoning_content"] = text

    def _append(self, message: dict[str, Any]) -> None:
        self._end_turn()
        self._messages.append(message)

    def _open_turn(self) -> dict[str, Any]:
        if self._turn is None:
            self._turn = {"role": "assistant"}
        return self._turn

    def _end_turn(self) -> None:
        turn, self._turn = self._turn, None
        if turn is not None:
            self._messages.append({"content": None if "tool_calls" in turn else "", **turn})


def _text(content: Any, where: str, kinds: dict[str, str] = _TEXTS) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _wrong(where, f"must be a string or a list of text parts, not {shown(content)}")
    texts: list[str] = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        field = kinds.get(kind) if isinstance(kind, str) else None
        if field is None:
            what = f"only {', '.join(kinds)} parts are accepted, not {shown(kind or part)}"
            raise _wrong(f"{where}[{i}]", what)
        texts.append(_string(part, field, f"{where}[{i}]"))
    return "\n".join(texts)


def _string(item: dict[str, Any], name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise _wrong(f"{where}.{name}", f"must be a string, not {shown(value)}")
    return value


def _wrong(where: str, what: str) -> ApiError:
    return invalid(f"{where} {what}", where)
