"""What text a request asks for: response_format, structured_outputs and guided_* to a grammar.

All of them say the same in the words of the OpenAI API, of vLLM and of older vLLM. What can be told
without the model's tokens is refused here; the engine compiles the rest.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from octavo.sampling.shown import shown
from octavo.serve.errors import ApiError, internal, invalid
from octavo.serve.strict_json import strict_json
from octavo.serve.types import Grammar, TokenEvent

FORMATS = ("text", "json_object", "json_schema")
KINDS = ("json", "json_object", "regex", "choice", "grammar")
COMPACT = "disable_any_whitespace"
OPTIONS = "x-guidance"
GUIDED = {f"guided_{kind}": kind for kind in KINDS if kind != "json_object"}


class Structured(NamedTuple):
    """A grammar, and the request's field that asked for it."""

    grammar: Grammar
    field: str


def structured_output(body: Any) -> Structured | None:
    """The grammar that a body asks for, if any; ApiError 400 naming the field.

    `body` has the attributes of protocol.StructuredBody. At most one field may ask for one.
    """
    asked = [
        Structured(grammar, field)
        for field, read in _READERS.items()
        if (value := getattr(body, field)) is not None
        and (grammar := read(field, value)) is not None
    ]
    if len(asked) > 1:
        names = " and ".join(one.field for one in asked)
        raise invalid(f"{names} exclude each other", asked[1].field)
    if asked and body.ignore_eos:
        message = f"ignore_eos can't be true with {asked[0].field}, which says where to end"
        raise invalid(message, "ignore_eos")
    return asked[0] if asked else None


def failure(event: TokenEvent, structured: Structured | None) -> ApiError:
    """What a failed sample is to the client: its own fault (a grammar) or the server's."""
    if not event.invalid:
        return internal(event.error or "the sample failed")
    field = structured.field if structured else None
    return invalid(f"{field}: {event.error}" if field else str(event.error), field)


def _response_format(field: str, value: Any) -> Grammar | None:
    if not isinstance(value, Mapping):
        raise invalid(f"{field} must be an object with a type, not {shown(value)}", field)
    kind = value.get("type")
    if kind not in FORMATS:
        raise invalid(f"{field}.type must be one of {', '.join(FORMATS)}, not {shown(kind)}", field)
    _only(field, value, {"type", "json_schema"} if kind == "json_schema" else {"type"})
    if kind == "text":
        return None
    if kind == "json_object":
        return Grammar.json_object()
    where = f"{field}.json_schema"
    inner = value.get("json_schema")
    if not isinstance(inner, Mapping):
        raise invalid(f"{where} must be an object with a schema, not {shown(inner)}", field)
    _only(field, inner, {"name", "description", "schema", "strict"}, where)
    if not isinstance(inner.get("strict"), bool | None):
        what = f"must be true or false, not {shown(inner['strict'])}"
        raise invalid(f"{where}.strict {what}", field)
    if not isinstance(inner.get("schema"), Mapping):
        what = f"must be a JSON schema, not {shown(inner.get('schema'))}"
        raise invalid(f"{where}.schema {what}", field)
    return _made(field, "json", inner["schema"])


def _structured_outputs(field: str, value: Any) -> Grammar | None:
    if not isinstance(value, Mapping):
        raise invalid(f"{field} must be an object, not {shown(value)}", field)
    asked = {key: item for key, item in value.items() if item is not None and item is not False}
    _only(field, asked, {*KINDS, COMPACT})
    if COMPACT in asked:
        asked = _compact(field, asked)
    if len(asked) > 1:
        raise invalid(f"{field}: {' and '.join(asked)} exclude each other", field)
    return next((_made(field, kind, item) for kind, item in asked.items()), None)


def _compact(field: str, asked: dict[str, Any]) -> dict[str, Any]:
    """What is asked with COMPACT: a schema whose llguidance options forbid blanks."""
    if (flag := asked.pop(COMPACT)) is not True:
        raise invalid(f"{field}: {COMPACT} must be true or false, not {shown(flag)}", field)
    match asked:
        case {"json_object": True, **rest} if not rest:
            schema = {"type": "object"}
        case {"json": schema, **rest} if not rest:
            schema = _schema(field, schema)
        case _:
            raise invalid(f"{field}: {COMPACT} goes with json or json_object alone", field)
    options = schema.get(OPTIONS, {})
    if not isinstance(options, Mapping):
        raise invalid(f"{field}: {OPTIONS} must be an object, not {shown(options)}", field)
    return {"json": {**schema, OPTIONS: {**options, "whitespace_flexible": False}}}


def _schema(field: str, value: Any) -> Mapping[str, Any]:
    """A schema, given as an object or as text, as an object."""
    try:
        schema = strict_json(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        schema = None
    if not isinstance(schema, Mapping):
        raise invalid(f"{field}: {_WANTED['json']}, not {shown(value)}", field)
    return schema


def _guided(field: str, value: Any) -> Grammar | None:
    return _made(field, GUIDED[field], value)


def _made(field: str, kind: str, value: Any) -> Grammar:
    """The grammar of one kind of value; ApiError 400 for another type or too much of it."""
    try:
        match kind, value:
            case "json", Mapping() | str():
                return Grammar.json_schema(value)
            case "json_object", True:
                return Grammar.json_object()
            case "regex", str():
                return Grammar.regex(value)
            case "grammar", str():
                return Grammar.lark(value)
            case "choice", [_, *_] if all(isinstance(item, str) and item for item in value):
                return Grammar.choice(value)
    except (ValueError, RecursionError) as error:
        raise invalid(f"{field}: {error}", field) from None
    raise invalid(f"{field}: {_WANTED[kind]}, not {shown(value)}", field)


_WANTED = {
    "json": "json must be a JSON schema, as an object or as text",
    "json_object": "json_object must be true or false",
    "regex": "regex must be text",
    "grammar": "grammar must be text in llguidance's Lark dialect",
    "choice": "choice must be a list of at least one text, none of them empty",
}
_READERS = {
    "response_format": _response_format,
    "structured_outputs": _structured_outputs,
    **dict.fromkeys(GUIDED, _guided),
}


def _only(field: str, value: Mapping[str, Any], known: set[str], where: str | None = None) -> None:
    for key in value:
        if key not in known:
            raise _unknown(field, f"{where or field}.{key}", known)


def _unknown(field: str, path: str, known: set[str]) -> ApiError:
    return invalid(f"{path} is not offered; known: {', '.join(sorted(known))}"[:300], field)
