"""`octavo bench plots`: the recorded results as SVG figures.

Nothing is drawn that was not measured: a figure without lines in --results is left out. Where a
point was measured several times on one device, the latest line counts.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from absl import flags

from octavo.bench.report import flag_values
from octavo.serve.flags import UsageError

HELP = """[--flags]

  --results=bench/results  folder of .jsonl files
  --out=docs/figures       folder for the SVG files
  --device=H200            only lines whose device contains this; empty: any"""

INK, GRID = "#222222", "#dddddd"
COLOURS = ("#1b6ca8", "#d1495b", "#3c8d5a", "#8e6bbf", "#c98a1b")
Rows = list[dict[str, Any]]
Series = dict[str, list[tuple[float, float]]]


def define(values: flags.FlagValues) -> None:
    """The command's flags."""
    flags.DEFINE_string("results", "bench/results", "folder", flag_values=values)
    flags.DEFINE_string("out", "docs/figures", "folder", flag_values=values)
    flags.DEFINE_string("device", "", "part of the device's name", flag_values=values)


def run(config: Any, values: flags.FlagValues, rest: list[str]) -> int:
    """Draw what can be drawn; 1 if nothing can."""
    if rest:
        raise UsageError(f"bench plots takes no arguments besides flags, got {rest}")
    flag = flag_values(values)
    rows = [row for row in read(Path(flag["results"])) if flag["device"] in row.get("device", "")]
    drawn = draw(rows, Path(flag["out"]))
    print("\n".join(map(str, drawn)) or f"no results to draw in {flag['results']}")
    return 0 if drawn else 1


def read(folder: Path) -> Rows:
    """Every line of the result files; by date, then in the files' order."""
    rows = []
    for path in sorted(folder.glob("*.jsonl")):
        lines = path.read_text(encoding="utf-8").splitlines()
        rows += [json.loads(line) for line in lines if line.strip()]
    return sorted(rows, key=lambda row: row.get("date", ""))


def draw(rows: Rows, out: Path) -> list[Path]:
    """Write the figures that `rows` have data for; their paths."""
    out.mkdir(parents=True, exist_ok=True)
    figures = {
        "throughput": (
            by_crowd(rows),
            {"x": "requests in flight", "y": "output tokens a second", "log": True, "zero": True},
        ),
        "latency": (
            by_rate(rows),
            {"x": "requests a second (Poisson)", "y": "ms", "log": False, "zero": True},
        ),
        "roofline": (
            by_rows(rows),
            {"x": "rows of the batch", "y": "share of the floor", "log": True, "zero": True},
        ),
    }
    return [
        chart(out / f"{name}.svg", series, **axes)
        for name, (series, axes) in figures.items()
        if series
    ]


def by_crowd(rows: Rows) -> Series:
    """Served tokens a second against the requests in flight."""
    closed = [row for row in rows if row.get("what") == "serve" and row.get("concurrency")]
    return latest((name_of(row), row["concurrency"], row["out_tok_s"]) for row in closed)


def by_rate(rows: Rows) -> Series:
    """TTFT and TPOT of served requests against their rate."""
    opened = [
        row
        for row in rows
        if row.get("what") == "serve" and isinstance(row.get("rate"), int | float)
    ]
    kinds = (("TTFT P50", "ttft_ms_p50"), ("TTFT P99", "ttft_ms_p99"), ("TPOT P50", "tpot_ms_p50"))
    return latest(
        (f"{name_of(row)}{label}", row["rate"], row[key])
        for label, key in kinds
        for row in opened
        if row.get(key) is not None
    )


def by_rows(rows: Rows) -> Series:
    """Decode steps' share of their floor against the batch."""
    shared = [row for row in rows if row.get("what") == "decode" and "share" in row]
    return latest(
        (f"{row.get('model') or row.get('shape')}, {row['attention']}", row["rows"], row["share"])
        for row in shared
        if "rows" in row
    )


def name_of(row: dict[str, Any]) -> str:
    """What a served line is called; nothing when it has no label."""
    return f"{row['label']} " if row.get("label") else ""


def latest(points: Iterable[tuple[str, float, float | None]]) -> Series:
    """(name, x, y) as sorted series; of equal x the last y counts."""
    found: dict[str, dict[float, float]] = {}
    for name, x, y in points:
        if y is not None:
            found.setdefault(name, {})[x] = y
    return {name: sorted(series.items()) for name, series in found.items()}


def chart(path: Path, series: Series, *, x: str, y: str, log: bool, zero: bool) -> Path:
    """A line chart with its points marked and labelled at the end."""
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.ticker import ScalarFormatter

    with mpl.rc_context({"svg.hashsalt": "octavo", "svg.fonttype": "none", "font.size": 10}):
        figure = Figure(figsize=(6.4, 3.6), layout="constrained")
        axes = figure.subplots()
        for number, (name, points) in enumerate(series.items()):
            colour = COLOURS[number % len(COLOURS)]
            axes.plot(*zip(*points), marker="o", markersize=4, color=colour, label=name.strip())
        if log:
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter(ScalarFormatter())
        if zero:
            axes.set_ylim(bottom=0)
        axes.set_xlabel(x, color=INK)
        axes.set_ylabel(y, color=INK)
        axes.grid(visible=True, color=GRID, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        if any(name.strip() for name in series):
            axes.legend(frameon=False, fontsize=8)
        figure.savefig(path, metadata={"Date": None})
    return path
