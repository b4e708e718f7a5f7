"""What every benchmark shares: percentiles, the line that says where it ran, results and tables."""

import datetime
import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from absl import flags

import octavo.serve

VERSIONED = ("octavo", "jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "numpy")


def flag_values(values: flags.FlagValues) -> dict[str, Any]:
    """Every flag's value by name."""
    return {name: values[name].value for name in values}


def percentile(values: Sequence[float], q: float) -> float | None:
    """The q-th percentile, linear between neighbours; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    place = (len(ordered) - 1) * q / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def spread(name: str, values: Sequence[float], digits: int = 3) -> dict[str, float | None]:
    """P50, P90 and P99 as {name}_p50 ...."""
    return {f"{name}_p{q}": rounded(percentile(values, q), digits) for q in (50, 90, 99)}


def rounded(value: float | None, digits: int = 3) -> float | None:
    """`value` rounded; None stays None."""
    return None if value is None else round(value, digits)


@cache
def hardware() -> dict[str, Any]:
    """The machine: GPU, driver, processor. Asks nvidia-smi, so that jax need not be loaded."""
    found: dict[str, Any] = {"device": _cpu(), "cores": os.cpu_count()}
    if shutil.which("nvidia-smi"):
        command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        gpus = [line.split(", ") for line in done.stdout.splitlines() if ", " in line]
        if done.returncode == 0 and gpus:
            found |= {"device": gpus[0][0], "gpus": len(gpus), "driver": gpus[0][1]}
    return found


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return "CPU"
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "CPU"


@cache
def versions() -> dict[str, str]:
    """Versions of the packages that matter, of those that are installed."""
    found = {}
    for name in VERSIONED:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def source_digest() -> str:
    """Digest of the package's Python files: which code made a figure."""
    root = Path(octavo.serve.__path__[0]).parent
    digest = hashlib.sha256()
    for path in sorted(root.glob("*/**/*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:12]


class Results:
    """Lines of one run: printed, kept for the table, appended to a file if there is one.

    Every line begins with date, hardware and versions, then `stamp`.
    """

    def __init__(self, out: str, date: str = "", **stamp: Any) -> None:
        self._out = out
        date = date or datetime.date.today().isoformat()
        self._stamp = {"date": date, **hardware(), "versions": versions(), **stamp}
        self.rows: list[dict[str, Any]] = []

    def say(self, **fields: Any) -> None:
        """One measurement."""
        line = json.dumps({**self._stamp, **fields})
        print(line, flush=True)
        self.rows.append(fields)
        if self._out:
            Path(self._out).parent.mkdir(parents=True, exist_ok=True)
            with open(self._out, "a", encoding="utf-8") as file:
                file.write(line + "\n")

    def table(self, columns: Sequence[str]) -> None:
        """The measurements so far as a table on standard error."""
        print(table(self.rows, columns), file=sys.stderr, flush=True)


def table(rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> str:
    """Aligned columns; a column that no row has is left out."""
    columns = [name for name in columns if any(row.get(name) is not None for row in rows)]
    cells = [list(columns), *([_cell(row.get(name)) for name in columns] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells)]
    return "\n".join("  ".join(c.rjust(w) for c, w in zip(row, widths)) for row in cells)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:,.6g}" if isinstance(value, float) else str(value)
