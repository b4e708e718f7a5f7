"""Values as error messages show them: their beginning, however large they are."""

import reprlib
from itertools import islice
from typing import Any

MOST = 80


class _Short(reprlib.Repr):
    """reprlib's, but a large mapping is not sorted first and a huge integer not spelled out."""

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        """The first items."""
        if level <= 0:
            return "{...}"
        items = [
            f"{self.repr1(key, level - 1)}: {self.repr1(value, level - 1)}"
            for key, value in islice(x.items(), self.maxdict)
        ]
        return "{" + ", ".join(items + ["..."] * (len(x) > self.maxdict)) + "}"

    def repr_int(self, x: int, level: int) -> str:
        """All digits of one that people write."""
        return repr(x) if x.bit_length() <= 128 else f"an integer of {x.bit_length()} bits"


_SHORT = _Short(maxlevel=4, maxlist=8, maxtuple=8, maxdict=8, maxstring=MOST, maxother=MOST)


def shown(value: Any) -> str:
    """repr(value), of at most MOST characters."""
    return cut(_SHORT.repr(value))


def cut(text: str, most: int = MOST) -> str:
    """The text, or its beginning if it has more than `most` characters."""
    return text if len(text) <= most else text[: most - 3] + "..."
