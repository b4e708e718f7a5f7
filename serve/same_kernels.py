"""Whether two builds of an engine chose the same kernels: their programs' HLO, compared.

XLA picks tilings and library algorithms by timing them, and writes its choice into the optimised
HLO. Names of source files and lines are left out.
"""

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

_ORIGIN = re.compile(r", metadata=\{[^{}]*\}")
_TABLE = re.compile(r"^(\d+ |FileNames|FunctionNames|FileLocations|StackFrames)")


def instructions(program: Any) -> Counter[str]:
    """The instructions of a compiled program, each with how often it occurs."""
    lines = (_ORIGIN.sub("", line).strip() for line in program.as_text().splitlines())
    return Counter(line for line in lines if line and not _TABLE.match(line))


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, str]:
    """Of compiled programs by name: those that only one side has or that differ, and in what."""
    found = {}
    for name in sorted({*ours, *theirs}):
        if name not in ours or name not in theirs:
            found[name] = "only here" if name in ours else "only there"
            continue
        here, there = instructions(ours[name]), instructions(theirs[name])
        if here != there:
            extra = sorted((here - there) or (there - here))
            found[name] = f"{(here - there).total()} instructions differ: {extra[0][:300]}"
    return found
