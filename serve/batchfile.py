"""Files of the OpenAI batch format: requests one a line, and results that a killed run left."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

URLS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/embeddings",
    "/v1/score",
)
MAX_CUSTOM_ID = 512
RESULT_ID = "batch_req_"
RESULT_START = f'{{"id":"{RESULT_ID}'.encode()


@dataclass(frozen=True, slots=True)
class Line:
    """One request of the input file.

    Attributes:
        number: of the line, from 1.
        custom_id: the caller's name for it; None if there is none to be read.
        url, body: endpoint and JSON body.
        problem: why it can't be sent, else empty.
    """

    number: int
    custom_id: str | None
    url: str = ""
    body: bytes = b""
    problem: str = ""

    @property
    def key(self) -> str | int:
        """What a result is known by: the custom_id, or the line where there is none of its own."""
        return self.number if self.custom_id is None or self.problem else self.custom_id


class _Written(msgspec.Struct):
    custom_id: str
    url: str
    body: dict[str, Any]
    method: str = "POST"


class _Named(msgspec.Struct):
    custom_id: str | None


class _Result(_Named):
    id: str
    line: int | None = None
    error: Any = None


def read_lines(path: Path) -> Iterator[Line]:
    """The requests of a file in order, blank lines left out; each problem is its line's own."""
    seen: set[str] = set()
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            if raw.strip():
                yield _line(number, raw, seen)


def _line(number: int, raw: bytes, seen: set[str]) -> Line:
    try:
        written = msgspec.json.decode(raw, type=_Written)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return Line(number, _id_of(raw), problem=f"not a batch request: {error}")
    problem = _problem(written)
    if not problem and written.custom_id in seen:
        problem = f"custom_id {written.custom_id!r} is not unique"
    if not problem:
        seen.add(written.custom_id)
    body = msgspec.json.encode(written.body)
    return Line(number, written.custom_id, written.url, body, problem)


def _problem(written: _Written) -> str:
    if not 0 < len(written.custom_id) <= MAX_CUSTOM_ID:
        return f"custom_id must have 1 .. {MAX_CUSTOM_ID} characters"
    if written.method != "POST":
        return f"method must be POST, not {written.method!r}"
    if written.url not in URLS:
        return f"url must be one of {', '.join(URLS)}, not {written.url!r}"
    if written.body.get("stream"):
        return "stream must be false in a batch"
    return ""


def _id_of(raw: bytes) -> str | None:
    """The custom_id of a line that is otherwise wrong."""
    try:
        return msgspec.json.decode(raw, type=_Named).custom_id
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def resume(path: Path) -> dict[str | int, bool]:
    """Keys of the results in a file, and whether each is a failure.

    The last line is cut off if it was not written whole. Raises ValueError for a file that holds
    anything but results.
    """
    done: dict[str | int, bool] = {}
    if not path.exists():
        return done
    if not path.is_file():
        raise ValueError(f"{path} is no file that results can be kept in")
    whole = 0
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            whole_line = raw.endswith(b"\n")
            if not whole_line and raw.startswith(RESULT_START[: len(raw)]):
                break
            try:
                if not whole_line:
                    raise msgspec.DecodeError("no line break, and not the start of a result")
                result = msgspec.json.decode(raw, type=_Result)
                if not result.id.startswith(RESULT_ID):
                    raise msgspec.DecodeError(f"its id does not begin with {RESULT_ID}")
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise ValueError(f"{path}, line {number} is no batch result: {error}") from None
            key = result.custom_id if result.line is None else result.line
            done[key] = result.error is not None  # type: ignore[index]
            whole += len(raw)
    with path.open("r+b") as file:
        file.truncate(whole)
    return done


def result(line: Line, request_id: str, status: int, body: bytes) -> bytes:
    """The result of a request as one line of the output file."""
    failed = None
    if status != 200:
        failed = {"code": str(status), "message": _message(body)}
    fields = {
        "id": request_id,
        "custom_id": line.custom_id,
        "response": {
            "status_code": status,
            "request_id": request_id,
            "body": msgspec.Raw(body or b"null"),
        },
        "error": failed,
    }
    return msgspec.json.encode(fields) + b"\n"


def refusal(line: Line, request_id: str) -> bytes:
    """The record of a line that was not sent."""
    fields = {
        "id": request_id,
        "custom_id": line.custom_id,
        "line": line.number,
        "response": None,
        "error": {"code": "invalid_line", "message": f"line {line.number}: {line.problem}"},
    }
    return msgspec.json.encode(fields) + b"\n"


def _message(body: bytes) -> str:
    try:
        return msgspec.json.decode(body)["error"]["message"]
    except (msgspec.DecodeError, KeyError, TypeError):
        return body.decode("utf-8", "replace")[:500]
