"""What of an answer must be the same each time, however it comes, and whether it is.

`content` takes it from a whole answer and from a stream alike: texts, calls, ends and counts, which
must be equal, and numbers (log-probabilities, scores, vectors), which move by rounding with who
shares a batch. Another request's numbers are nowhere near.
"""

import json
from collections.abc import Iterator
from typing import Any

from octavo.bench.soak_cases import Case

TOLERANCE = 1e-3
"""Far above float32's rounding, far below what tells two requests apart."""


def content(case: Case, data: bytes, *, streamed: bool) -> Any:
    """What of an answer's body must be the same each time; ValueError if it isn't whole."""
    if case.status != 200:
        return json.loads(data)["error"]["type"]
    if case.path == "/v1/messages":
        return _message(_last_of(case, data) if streamed else json.loads(data))
    if case.path == "/v1/responses":
        return _response(_response_of(case, data) if streamed else json.loads(data))
    if streamed:
        return _joined(case, data)
    found = json.loads(data)
    if "choices" in found:
        choices = {choice["index"]: _whole(choice) for choice in found["choices"]}
        return [choices[i] for i in range(len(choices))], _count(found["usage"])
    return [_row(row) for row in found["data"]]


def same(found: Any, wanted: Any) -> bool:
    """Whether two contents are equal, numbers within TOLERANCE."""
    if isinstance(wanted, float) and isinstance(found, float):
        return abs(found - wanted) <= TOLERANCE
    if isinstance(wanted, list | tuple) and isinstance(found, list | tuple):
        return len(found) == len(wanted) and all(map(same, found, wanted))
    return type(found) is type(wanted) and found == wanted


def _row(row: dict[str, Any]) -> list[Any]:
    """A vector, or a continuation's tokens with their log-probabilities."""
    if "embedding" in row:
        return [float(value) for value in row["embedding"]]
    logprobs = [float(value) for value in row["token_logprobs"]]
    return [row["token_ids"], row["is_greedy"], float(row["score"]), logprobs]


def _message(found: dict[str, Any]) -> list[Any]:
    usage = found["usage"]
    counts = [usage["input_tokens"] + usage["cache_read_input_tokens"], usage["output_tokens"]]
    return [[block.get("text") for block in found["content"]], found["stop_reason"], counts]


def _response(found: dict[str, Any]) -> list[Any]:
    parts = [part["text"] for item in found["output"] for part in item["content"]]
    usage = found["usage"]
    return [parts, found["status"], [usage["input_tokens"], usage["output_tokens"]]]


def _events(case: Case, data: bytes, end: str) -> list[dict[str, Any]]:
    """Named events up to one whose name begins with `end`, and none behind it."""
    *pieces, rest = data.split(b"\n\n")
    events = [json.loads(piece.partition(b"\ndata: ")[2]) for piece in pieces]
    if rest or not events or not events[-1]["type"].startswith(end):
        raise ValueError(f"{case.name}: the stream did not end: {data[-300:]!r}")
    return events


def _last_of(case: Case, data: bytes) -> dict[str, Any]:
    """The message that a stream's events make."""
    message: dict[str, Any] = {}
    for event in _events(case, data, "message_stop"):
        match event["type"]:
            case "message_start":
                message = event["message"]
            case "content_block_start":
                message["content"].append(event["content_block"])
            case "content_block_delta":
                message["content"][event["index"]]["text"] += event["delta"]["text"]
            case "message_delta":
                message |= event["delta"]
                message["usage"] |= event["usage"]
    return message


def _response_of(case: Case, data: bytes) -> dict[str, Any]:
    """The response a stream ends with; ValueError unless its deltas say the same."""
    events = _events(case, data, "response.")
    if "response" not in events[-1]:
        raise ValueError(f"{case.name}: the stream did not end: {data[-300:]!r}")
    response = events[-1]["response"]
    told = "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta")
    if told != "".join(_response(response)[0]):
        raise ValueError(f"{case.name}: the deltas say {told!r}, the response {response}")
    return response


def _count(usage: dict[str, Any]) -> list[int]:
    return [usage["prompt_tokens"], usage["completion_tokens"]]


def _whole(choice: dict[str, Any]) -> list[Any]:
    """[text, calls, log-probabilities, how it ended] of a choice."""
    message = choice.get("message", {})
    calls = [_call(call["function"]) for call in message.get("tool_calls") or ()]
    text = choice.get("text", message.get("content")) or ""
    return [text, calls, list(_logprobs(choice)), choice["finish_reason"]]


def _call(function: dict[str, Any]) -> list[str]:
    return [function.get("name", ""), function.get("arguments", "")]


def _logprobs(choice: dict[str, Any]) -> Iterator[float]:
    """The log-probabilities of a choice's tokens, in a completion's form or a chat's."""
    found = choice.get("logprobs") or {}
    values = found.get("token_logprobs") or [one["logprob"] for one in found.get("content") or ()]
    return (float(value) for value in values if value is not None)


def _joined(case: Case, data: bytes) -> Any:
    """The same of a stream of chunks."""
    *events, done, rest = data.split(b"\n\n")
    if done != b"data: [DONE]" or rest:
        raise ValueError(f"{case.name}: the stream did not end: {data[-300:]!r}")
    choices: dict[int, list[Any]] = {}
    usage = None
    for event in events:
        found = json.loads(event.removeprefix(b"data: "))
        if "error" in found:
            raise ValueError(f"{case.name}: {found['error']}")
        usage = found.get("usage") or usage
        for choice in found["choices"]:
            _grow(choices.setdefault(choice["index"], ["", [], [], None]), choice)
    if usage is None or any(ended is None for *_, ended in choices.values()):
        raise ValueError(f"{case.name}: a part of the stream is missing")
    return [choices[i] for i in range(len(choices))], _count(usage)


def _grow(out: list[Any], choice: dict[str, Any]) -> None:
    """Add a chunk's choice to what `_whole` would say of it."""
    delta = choice.get("delta", {})
    out[0] += choice.get("text", delta.get("content")) or ""
    for call in delta.get("tool_calls", ()):
        if call["index"] == len(out[1]):
            out[1].append(["", ""])
        name, arguments = _call(call["function"])
        out[1][call["index"]][0] += name
        out[1][call["index"]][1] += arguments
    out[2] += _logprobs(choice)
    out[3] = choice["finish_reason"] or out[3]
