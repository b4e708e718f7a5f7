"""JSON as RFC 8259 has it: Python's reader also takes NaN and Infinity, which nobody else reads."""

import json
import math
from typing import Any, NoReturn


def strict_json(text: str) -> Any:
    """The value of a JSON text; ValueError for any other text, and for a number beyond a double.

    RecursionError for one that is nested too deeply.
    """
    return json.loads(text, parse_constant=_refuse, parse_float=_finite)


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"{word} is not JSON")


def _finite(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise ValueError(f"{digits[:40]} is too large a number")
    return value
