"""Figures from recorded results: what is drawn, and only what was measured."""

import json
import re

import pytest

from octavo.bench import plots
from octavo.serve import cli


def served(**fields):
    return {"what": "serve", "date": "2026-12-01", "device": "NVIDIA H200", **fields}


ROWS = [
    served(rate="inf", concurrency=8, out_tok_s=100.0),
    served(rate="inf", concurrency=64, out_tok_s=900.0),
    served(rate="inf", concurrency=8, out_tok_s=120.0, date="2026-12-02"),
    served(rate=4.0, ttft_ms_p50=20.0, ttft_ms_p99=50.0, tpot_ms_p50=5.0, label="x"),
    served(rate=4.0, warmup=True),
    {"what": "decode", "rows": 8, "share": 0.8, "model": "llama3_8b", "attention": "auto"},
    {"what": "decode", "scenario": "b8", "share": 0.9, "attention": "mosaic"},
]


def test_series_hold_the_latest_of_each_point_in_order():
    assert plots.by_crowd(ROWS) == {"": [(8, 120.0), (64, 900.0)]}
    assert plots.by_rate(ROWS) == {
        "x TTFT P50": [(4.0, 20.0)],
        "x TTFT P99": [(4.0, 50.0)],
        "x TPOT P50": [(4.0, 5.0)],
    }
    assert plots.by_rows(ROWS) == {"llama3_8b, auto": [(8, 0.8)]}


def test_only_figures_with_data_are_drawn_and_twice_the_same(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    results, out = tmp_path / "results", tmp_path / "figures"
    results.mkdir()
    args = ["bench", "plots", f"--results={results}", f"--out={out}"]
    assert cli.main(args) == 1
    assert "no results to draw" in capsys.readouterr().out
    (results / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[:3]))
    assert cli.main([*args, "--device=H100"]) == 1
    assert cli.main([*args, "--device=H200"]) == 0
    (figure,) = out.iterdir()
    assert figure.name == "throughput.svg"
    text = figure.read_text()
    assert re.search(r"<svg\b", text)
    assert "requests in flight" in text
    assert cli.main([*args, "--device=H200"]) == 0
    assert figure.read_text() == text
