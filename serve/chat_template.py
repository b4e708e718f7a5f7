"""Chat templates: Jinja in a sandbox with Hugging Face's helpers and bounds on time and size.

A template is data from a model's folder or, where the server allows it, from a request, so no
template may hang or exhaust the process: loops and macros watch a clock, text that grows is
measured, and the helpers that can blow up a short template refuse large counts.
"""

import datetime
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextvars import ContextVar
from functools import lru_cache, wraps
from typing import Any, NoReturn

import jinja2
import jinja2.nodes as nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_TEMPLATE_CHARS = 1 << 18
MAX_TEXT_CHARS = 1 << 24
MAX_COUNT = 100_000
ITEM_CHARS = 16  # what an item of a list counts for beside its own text
MAX_SECONDS = 10.0

_deadline: ContextVar[float] = ContextVar("chat_template_deadline")


class ChatTemplateError(ValueError):
    """A chat that cannot be rendered: the template's own refusal, an error in it, or a bound."""


def render_template(template: str, context: Mapping[str, Any]) -> str:
    """The template's text for `context`.

    ChatTemplateError with the reason when the template is longer than MAX_TEMPLATE_CHARS, does not
    parse, raises, takes longer than MAX_SECONDS or grows text beyond MAX_TEXT_CHARS.
    """
    if len(template) > MAX_TEMPLATE_CHARS:
        raise ChatTemplateError(
            f"chat template has {len(template)} characters; at most {MAX_TEMPLATE_CHARS} are taken"
        )
    token = _deadline.set(time.monotonic() + MAX_SECONDS)
    try:
        pieces, size = [], 0
        for piece in _compiled(template).generate(dict(context)):
            _tick()
            size += len(piece)
            _check_size(size)
            pieces.append(piece)
        return "".join(pieces)
    except ChatTemplateError:
        raise
    except (RecursionError, MemoryError):
        raise ChatTemplateError("chat template: nested too deeply or too large") from None
    except Exception as error:  # whatever a template provokes is its author's error, not ours
        raise ChatTemplateError(f"chat template: {_explain(error)}") from error
    finally:
        _deadline.reset(token)


def _explain(error: Exception) -> str:
    if isinstance(error, jinja2.TemplateSyntaxError):
        return f"syntax error in line {error.lineno}: {error.message}"
    if isinstance(error, jinja2.TemplateError):
        return str(error)
    return f"{type(error).__name__}: {error}"


@lru_cache(maxsize=32)
def _compiled(template: str) -> jinja2.Template:
    return _environment().from_string(template)


@lru_cache(maxsize=1)
def _environment() -> "_BoundedEnvironment":
    # The optimiser would fold constant calls such as "x"|center(10**9) while compiling, unwatched.
    environment = _BoundedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        optimized=False,
        finalize=_measured,
        extensions=["jinja2.ext.loopcontrols", _Generation],
    )
    environment.filters["tojson"] = _to_json
    for name, function in environment.filters.items():
        environment.filters[name] = _checked(function, _FILTER_CHECKS.get(name))
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        _TICK: _tick,
        _CONCAT: _concat,
    }
    return environment


def _raise_exception(message: str) -> NoReturn:
    raise ChatTemplateError(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    _check_count(indent or 0)
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


class _Generation(Extension):
    """`{% generation %}` marks the assistant's tokens for training; here its body is just text."""

    tags = frozenset(("generation",))  # type: ignore[assignment]

    def parse(self, parser: Any) -> list[nodes.Node]:
        """The body's nodes."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


# Names no template can write, called from places that the parser put them in.
_TICK, _CONCAT = "__octavo_tick", "__octavo_concat"


def _tick() -> None:
    if time.monotonic() > _deadline.get():
        raise ChatTemplateError(f"chat template ran for more than {MAX_SECONDS:g} s")


def _concat(*values: Any) -> str:
    for value in values:
        _measured(value)
    texts = [str(value) for value in values]
    _check_size(sum(map(len, texts)))
    return "".join(texts)


def _check_size(size: int) -> None:
    if size > MAX_TEXT_CHARS:
        raise ChatTemplateError(f"chat template made more than {MAX_TEXT_CHARS} characters")


def _measured(value: Any) -> Any:
    """`value` itself once its text is known to be within bounds, however it is nested.

    A list may hold one large string a thousand times: small until it is printed.
    """
    size, waiting = 0, [value]
    while waiting:
        item = waiting.pop()
        size += len(item) if isinstance(item, str) else ITEM_CHARS
        _check_size(size)
        if isinstance(item, Mapping):
            waiting += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple):
            _check_size(size + ITEM_CHARS * len(item))
            waiting += item
    return value


def _check_count(*values: Any) -> None:
    for value in values:
        if isinstance(value, int) and abs(value) > MAX_COUNT:
            raise ChatTemplateError(f"chat template asked for {value}; {MAX_COUNT} is the most")


class _Watch(NodeTransformer):
    """Puts a clock test into each loop and macro body, and measures every `~`."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        return self._ticking(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._ticking(node)

    def _ticking(self, node: nodes.For | nodes.Macro) -> nodes.Node:
        self.generic_visit(node)
        call = nodes.Call(nodes.Name(_TICK, "load"), [], [], None, None, lineno=node.lineno)
        node.body.insert(0, nodes.ExprStmt(call, lineno=node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        name = nodes.Name(_CONCAT, "load")
        return nodes.Call(name, node.nodes, [], None, None, lineno=node.lineno)


class _BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox that also bounds what calls and operators may build."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        if _TICK in source or _CONCAT in source:
            raise ChatTemplateError("chat template uses a reserved name")
        return _Watch().visit(super()._parse(source, name, filename))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """`left operator right`, refused where the result could be huge."""
        if operator == "+" and isinstance(left, Sequence) and isinstance(right, Sequence):
            _check_size((len(left) + len(right)) * _weight(left))
        elif operator == "*":
            _check_repeat(left, right)
        elif operator == "**":
            raise SecurityError("the operator ** is not available")
        elif operator == "%" and isinstance(left, str):
            _check_widths(left)
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """str.format in the sandbox, refused with widths beyond MAX_COUNT."""
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _check_widths(value.__self__)
        return wrapped

    def concat(self, pieces: Iterable[str]) -> str:
        """Joins what a macro or a `{% set %}` block printed."""
        pieces = list(pieces)
        _check_size(sum(map(len, pieces)))
        return "".join(pieces)

    def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        """A call from a template: no huge count, no multiplying string method."""
        _tick()
        method, target = getattr(obj, "__name__", ""), getattr(obj, "__self__", None)
        if not _only_passes_on(obj, target):
            _check_count(*args, *kwargs.values())
        if isinstance(target, str) and method in _METHOD_CHECKS:
            _METHOD_CHECKS[method](target, *args, **kwargs)
        return super().call(context, obj, *args, **kwargs)


def _only_passes_on(function: Any, target: Any) -> bool:
    """Whether a call can't make much of a large number: a date or a schema's bound may be one."""
    kept = function is _concat or function is dict or function is Namespace
    return kept or isinstance(function, Macro) or isinstance(target, Mapping)


def _weight(value: Sequence[Any]) -> int:
    return 1 if isinstance(value, str) else ITEM_CHARS


def _check_repeat(left: Any, right: Any) -> None:
    for value, times in ((left, right), (right, left)):
        if isinstance(value, Sequence) and isinstance(times, int):
            _check_size(len(value) * times * _weight(value))
    if isinstance(left, int) and isinstance(right, int):
        _check_size(left.bit_length() + right.bit_length())


_WIDE_FORMAT = re.compile(r"%[^a-zA-Z%]*(?:\*|\d{6})|\{[^{}]*:[^{}]*(?:\{|\d{6})")


MAX_PATTERN = 4096
"""Characters of a format string: the search for wide fields takes quadratic time."""


def _check_widths(pattern: str) -> None:
    if len(pattern) > MAX_PATTERN:
        raise ChatTemplateError(f"chat template formats with more than {MAX_PATTERN} characters")
    if _WIDE_FORMAT.search(pattern):
        raise ChatTemplateError("chat template formats with a computed or very large width")


def _check_replace(text: Any, old: Any, new: Any, *rest: Any, **options: Any) -> None:
    text, old, new = str(text), str(old), str(new)
    _check_size(len(text) + text.count(old) * len(new))


def _check_join(values: Any, separator: Any = "", *rest: Any, **options: Any) -> None:
    _check_size(len(values) * (len(str(separator)) + ITEM_CHARS))
    _measured(values)


def _check_sum(values: Any, attribute: Any = None, start: Any = 0) -> None:
    if not isinstance(start, int | float):
        raise ChatTemplateError("chat template sums what is not a number")


def _check_arguments(value: Any, *rest: Any, **options: Any) -> None:
    _check_count(*rest, *options.values())


def _check_format(pattern: Any, *rest: Any, **options: Any) -> None:
    _check_widths(str(pattern))


_METHOD_CHECKS: dict[str, Callable[..., None]] = {
    "replace": _check_replace,
    "join": lambda separator, values: _check_join(values, separator),
}
_FILTER_CHECKS: dict[str, Callable[..., Any]] = {
    "replace": _check_replace,
    "join": _check_join,
    "sum": _check_sum,
    "string": _measured,
    "tojson": lambda value, *rest, **options: _measured(value),
    "format": _check_format,
    **dict.fromkeys(("center", "indent", "batch", "slice", "wordwrap"), _check_arguments),
}


def _checked(function: Callable[..., Any], check: Callable[..., Any] | None) -> Callable[..., Any]:
    """A filter that first runs `check` on what it gets and gives no unmeasured iterator back."""
    skip = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)  # keeps jinja's mark that an evaluation context is passed first
    def run(*args: Any, **options: Any) -> Any:
        if check:
            check(*args[skip:], **options)
        result = function(*args, **options)
        return _drained(result) if isinstance(result, Iterator) else result

    return run


class _Made(list[Any]):
    """What a filter made of a list: true also when empty, as the generator that it stands for."""

    def __bool__(self) -> bool:
        return True


def _drained(values: Iterator[Any]) -> list[Any]:
    """The values as a list, measured while they are made."""
    out, size = _Made(), 0
    for value in values:
        _tick()
        size += ITEM_CHARS + (len(value) if isinstance(value, Sized) else 0)
        _check_size(size)
        out.append(value)
    return out
