"""Request bodies: bytes to checked models, bounded before they are parsed.

A parser holds the interpreter's lock, so what it may take is bounded by what makes it slow, the
number of values and not of bytes; and whatever is large is read in a thread, so that the streams of
others go on.
"""

import logging
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import msgspec
import numpy as np
from fastapi import Request
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from octavo.sampling.shown import shown
from octavo.serve.context import context_of, read_body
from octavo.serve.errors import ApiError, invalid, unsupported
from octavo.serve.protocol import HARMLESS, UNSUPPORTED

MAX_VALUES = 8 << 20
"""Values of a body: 16 MiB of token ids. An id takes 20 ns to parse."""
MAX_CONTAINERS = 1 << 17
"""Objects and lists of a body: each takes as long as ten numbers, and as much memory."""
MAX_TEXTS = 1 << 20
"""Strings of a body, names of fields included."""
MAX_FIELDS = 256

log = logging.getLogger("octavo.server")


async def take[T](request: Request, read: Callable[[bytes], T]) -> T:
    """What `read` makes of the request's body; ApiError 400, 408 or 413.

    `read` runs in a thread when the body is large.
    """
    context = context_of(request)
    raw = await read_body(request, context.config)
    return await context.off_loop(len(raw), partial(read, raw))


def parse_body[Body: BaseModel](kind: type[Body], raw: bytes, *, any_extra: bool = False) -> Body:
    """The validated body; ApiError 400 naming the field, its value and what is accepted.

    Unknown fields are refused (ignoring one would answer another question than was asked) unless
    they are null, harmless, or `any_extra` says that the endpoint has nothing they could change.
    `kind.refused`, if it has one, goes before UNSUPPORTED and HARMLESS.
    """
    check_json_size(raw)
    try:
        fields = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise invalid(f"the request body is not valid JSON: {error}") from None
    if not isinstance(fields, dict):
        raise invalid("the request body must be a JSON object")
    if len(fields) > MAX_FIELDS:
        raise invalid(f"the request body has {len(fields)} fields, at most {MAX_FIELDS}")
    if not any_extra:
        _refuse_unsupported(kind, fields)
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise _first_problem(error) from None


def check_json_size(raw: bytes) -> None:
    """Refuse JSON of more values than may be parsed at once; ApiError 400."""
    if _within(raw.count(b","), raw.count(b"[") + raw.count(b"{"), raw.count(b'"') // 2):
        return
    # Much punctuation: most of it may stand in texts, so those are left out now.
    outside, texts = _outside_texts(raw)
    commas, lists, objects = (int(np.count_nonzero(outside == ord(char))) for char in ",[{")
    if not _within(commas, lists + objects, texts):
        limits = f"{MAX_VALUES} values, {MAX_CONTAINERS} objects and lists, {MAX_TEXTS} strings"
        raise invalid(f"the request body holds too much: at most {limits}")


def _within(commas: int, containers: int, texts: int) -> bool:
    values = commas + containers
    return values <= MAX_VALUES and containers <= MAX_CONTAINERS and texts <= MAX_TEXTS


def _outside_texts(raw: bytes) -> tuple[np.ndarray, int]:
    """The bytes of JSON that stand in no string, u8[N], and the number of strings."""
    plain = raw.replace(b"\\\\", b"  ").replace(b'\\"', b"  ")
    data = np.frombuffer(plain, np.uint8)
    quotes = data == ord('"')
    inside = np.cumsum(quotes, dtype=np.uint8) & 1  # only whether the count is odd matters
    return data[inside == 0], int(quotes.sum()) // 2


def _refuse_unsupported(kind: type[BaseModel], fields: dict[str, Any]) -> None:
    own: Mapping[str, tuple[str, tuple[Any, ...]]] = getattr(kind, "refused", {})
    for name, value in fields.items():
        if name in kind.model_fields or value is None:
            continue
        if name in HARMLESS and name not in own:
            _note_ignored(name)
            continue
        if name not in own and name not in UNSUPPORTED:
            raise invalid(f"unknown field {shown(name)}", name[:64])
        reason, neutral = own.get(name) or UNSUPPORTED[name]
        if not any(value == option and type(value) is type(option) for option in neutral):
            raise unsupported(name, reason)


@cache
def _note_ignored(name: str) -> None:
    """Log a harmless field, the first time that it is sent."""
    log.info("request field %r is accepted and has no effect", name)


def _first_problem(error: ValidationError) -> ApiError:
    problems = error.errors(include_url=False)
    field = problems[0]["loc"][:1]
    # A field of several types has a problem with each; the type that fits best says what is wrong.
    ranks = [_fit(problem) if problem["loc"][:1] == field else (False, -1) for problem in problems]
    best = [problem for problem, rank in zip(problems, ranks) if rank == max(ranks)]
    problem, param = best[0], str(field[0]) if field else None
    path = ".".join(map(str, [*field, *filter(_is_place, problem["loc"][1:])]))
    if problem["type"] == "missing":
        return invalid(f"{path}: this field is required", param)
    if problem["type"] == "too_long":
        most = problem.get("ctx", {}).get("max_length")
        return invalid(f"{path} has {len(problem['input'])} entries, at most {most}", param)
    wanted = " or ".join(dict.fromkeys(one["msg"].lower() for one in best))
    return invalid(f"{path}: {wanted}, not {shown(problem['input'])}", param)


def _fit(problem: ErrorDetails) -> tuple[bool, int]:
    """How far the value got with this type: too long is of the type, then what went deepest."""
    return problem["type"] == "too_long", len(problem["loc"])


def _is_place(part: int | str) -> bool:
    """Whether a part of a location is an index or a name; types of a union are neither."""
    return isinstance(part, int) or (part.isidentifier() and part not in ("str", "int", "float"))
