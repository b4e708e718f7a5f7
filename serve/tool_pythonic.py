"""Tool calls written as a Python list of calls: `[f(a=1, b="x"), g()]`, as Llama 4 writes them."""

import ast
import json
import re
import warnings
from typing import Any

from octavo.serve.answer_reader import Malformed, Waiting, json_more
from octavo.serve.tool_formats import LineStartParser

_NAME_CHARS = re.compile(r"[-\w]*", re.ASCII)
_OTHERS = re.compile(r"[^\"'()\[\]{}]*")
_IN_STRING = {quote: re.compile(rf"[^{quote}\\]*") for quote in "\"'"}
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_JSON_NAMES = {"true": True, "false": False, "null": None}
MAX_DEPTH = 64


class PythonicParser(LineStartParser):
    """Reads lists of Python calls with keyword arguments that are literals.

    A call goes out when its bracket closes, since its arguments have to be turned into JSON.
    """

    opener = "["

    def _first(self) -> Waiting[None]:
        yield from self._reader.expect(self.opener)
        yield from self._reader.spaces()
        more = True
        while more:
            yield from self._python_call()
            more = yield from json_more(self._reader, "]")

    def _next(self) -> Waiting[None]:
        yield from self._reader.spaces()
        yield from self._first()

    def _python_call(self) -> Waiting[None]:
        reader = self._reader
        name = yield from reader.run(_NAME_CHARS)
        start = reader.at
        if name not in self._names or (yield from reader.char()) != "(":
            raise Malformed
        yield from self._bracketed()
        arguments = python_arguments(reader.text[start : reader.at])
        self._open_call(name)
        self._whole_arguments(arguments)

    def _bracketed(self) -> Waiting[None]:
        """Consume a bracketed stretch, minding strings."""
        reader = self._reader
        waiting: list[str] = []
        while True:
            yield from reader.run(_OTHERS)
            char = yield from reader.char()
            if char in _IN_STRING:
                if reader.text[reader.at - 1] in "fF":  # no literal, and slow to parse
                    raise Malformed
                yield from self._python_string(char)
                continue
            if char in _CLOSING and len(waiting) < MAX_DEPTH:
                waiting.append(_CLOSING[char])
            elif not char or char != waiting.pop():
                raise Malformed
            reader.at += 1
            if not waiting:
                return

    def _python_string(self, quote: str) -> Waiting[None]:
        reader = self._reader
        triple = yield from reader.literal(quote * 3)
        end = quote * 3 if triple else quote
        reader.at += 0 if triple else 1
        while True:
            yield from reader.run(_IN_STRING[quote])
            if (yield from reader.literal(end)):
                return
            char = yield from reader.char()
            if not char:
                raise Malformed
            reader.at += 1
            if char == "\\":
                if not (yield from reader.char()):
                    raise Malformed
                reader.at += 1


def python_arguments(bracketed: str) -> str:
    """JSON text of `(a=1, b="x")`; Malformed for anything but keywords with literal values."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an odd escape is the model's business
            call = ast.parse(f"f{bracketed}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            raise Malformed
        values = {word.arg: _literal(word.value) for word in call.keywords}
        if None in values or len(values) < len(call.keywords):
            raise Malformed
        return _json_text(values)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise Malformed from None


def _json_text(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate can only be spelled as an escape
        return json.dumps(value)
    return text


def _literal(node: ast.expr) -> Any:
    """The value of a literal that JSON has, too; JSON's own names count."""
    match node:
        case ast.Constant(value=str() | int() | float() | None):
            return node.value
        case ast.Name(id=name) if name in _JSON_NAMES:
            return _JSON_NAMES[name]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_literal(item) for item in items]
        case ast.Dict():
            return {_key(key): _literal(value) for key, value in zip(node.keys, node.values)}
    raise Malformed


def _key(node: ast.expr | None) -> str:
    if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
        raise Malformed
    return node.value
