"""`octavo bench` on the engine: floors by hand, steady steps, a tiny model end to end, stages."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from absl import flags
from family_data import FOLDER
from tiny import ARTEFACTS, tiny_config

from octavo.bench import (
    context,
    engine,
    kernel,
    kernel_check,
    pace,
    plan,
    shapes,
    stages,
    startup,
    trace,
)
from octavo.bench.floors import Ceilings, ModelCost
from octavo.bench.plain_tokenizer import write_tokenizer
from octavo.bench.report import Results
from octavo.serve import cli
from octavo.serve.flags import define_settings, parse_settings
from octavo.serve.tokenizer_files import load_tokenizer

GGUF = FOLDER.parent / "gguf" / "tiny-llama-q8_0.gguf"
SIZES = [
    "--max_num_seqs=2",
    "--max_batch_tokens=32",
    "--max_model_len=128",
    "--num_pages=20",
    f"--artefact_dir={ARTEFACTS}",
]


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_floors_are_bytes_over_rate_or_operations_over_rate():
    device = Ceilings(read=100.0, matrix=1000.0)
    cost = ModelCost(tiny_config(), weight_bytes=200, weights=90, head=10, token_bytes=4)
    assert cost.decode_floor(device, 1, 50.0) == pytest.approx(2.0 + 2.0)
    assert cost.decode_floor(device, 20, 50.0) == pytest.approx(4.0 + 40.0)
    # 2 layers, 4 heads of 8: 4 operations a key that a query sees.
    assert cost.attention_operations(3) == 2 * 4 * 4 * 8 * 6
    assert cost.prefill_floor(device, 3) == pytest.approx((540 + 20 + 1536) / 1000)


def test_a_window_bounds_the_attention_floor():
    config = tiny_config(
        architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=2
    )
    cost = ModelCost(config, 1, 1, 1, 1)
    assert cost.attention_operations(5) == 2 * 4 * 4 * 8 * (1 + 2 * 4)


def test_steady_gaps_leave_out_prefill_partial_steps_and_the_turn():
    times = [(0.0, 0), (1.0, 0), (3.0, 2), (3.5, 2), (4.5, 4), (5.5, 4), (5.75, 1), (6.0, 0)]
    assert engine.steady_gaps(times, 2) == [0.5, 0.5]


def test_a_tiny_engine_is_measured(tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    mix = tmp_path / "mix.json"
    mix.write_text('{"seed": 1, "prompt_lens": [5, 9], "output_lens": [3, 4], "gaps": [1, 1]}')
    code = cli.main(
        [
            *("bench", "decode", "prefill", "throughput", f"--model={GGUF}", f"--out={out}"),
            *("--load_format=auto", "--dtype=float32", "--rows=1,2", "--prompt=6"),
            *("--generated=40", "--prompts=8", "--repeats=1", f"--workload={mix}", *SIZES),
        ]
    )
    assert code == 0
    lines = lines_of(out)
    assert [line["what"] for line in lines] == [
        *("start", "decode", "decode", "prefill", "throughput", "throughput"),
        *("throughput_median", "programs"),
    ]
    assert [line["rows"] for line in lines[1:3]] == [1, 2]
    assert all(line["ms"] > 0 and "share" not in line for line in lines[1:4])
    assert [line["warm"] for line in lines[4:6]] == [False, True]
    assert lines[5]["out_tokens"] == 7
    assert lines[0]["model"] == GGUF.name
    assert lines[0]["settings"]["max_num_seqs"] == 2
    assert "output_tok_s" in capsys.readouterr().err


def test_waiting_for_one_another_is_measured(tmp_path, capsys, monkeypatch):
    for name, value in {"NEWCOMERS": 5, "NEWCOMER_EVERY": 0.01, "LONG_EVERY": 0.01}.items():
        monkeypatch.setattr(pace, name, value)
    out = tmp_path / "out.jsonl"
    args = ["--load_format=auto", "--dtype=float32", "--rows=1", "--prompt=6", "--long=40", *SIZES]
    command = ["bench", "pace", f"--model={GGUF}", f"--out={out}", *args]
    assert cli.main([*command, "--max_step_ms=40"]) == 0
    newcomers, limits = lines_of(out)[1:3], lines_of(out)[3:5]
    assert [line["max_decode_steps"] for line in newcomers] == [1, 8]
    assert newcomers[0]["added_ms"] == 0
    assert all(line["ttft_ms_p50"] > 0 < line["step_ms"] for line in newcomers)
    assert [line["max_step_ms"] for line in limits] == [40, None]
    assert all(line["gap_ms_p99"] <= line["gap_ms_max"] for line in limits)
    assert limits[0]["kept"] == (limits[0]["gap_ms_p99"] <= 44)
    assert cli.main(command) == 1
    assert "needs max_step_ms" in capsys.readouterr().err


def test_a_trace_without_a_gpu_claims_nothing(tmp_path):
    out = tmp_path / "out.jsonl"
    args = [
        "--load_format=auto",
        "--dtype=float32",
        "--trace_rows=1",
        "--prompt=6",
        "--max_decode_steps=2",
        *SIZES,
    ]
    asked = ["bench", "trace", "trace_prefill", f"--model={GGUF}", f"--out={out}", "--prompts=5"]
    assert cli.main([*asked, *args]) == 0
    _, line, prefill, _ = lines_of(out)
    assert (line["what"], line["idle"], line["kernels"]) == ("trace", None, {})
    assert (prefill["what"], prefill["prompt"], prefill["busy_ms"]) == ("trace_prefill", 5, 0.0)


def test_idle_is_what_no_event_covers():
    events = [(0, 10, "a"), (5, 8, "b"), (12, 20, "a"), (30, 40, "c")]
    assert trace.window_ns(events) == 40
    assert trace.busy_ns(events) == 28
    found = trace.kernels(events, steps=2)
    assert found["launches_a_step"] == 2.0
    assert next(iter(found["kernels"].items())) == ("a", [0.01, 1.0])
    assert trace.busy_ns([]) == trace.window_ns([]) == 0


def test_one_long_prompt_on_random_weights(tmp_path, monkeypatch):
    """The shape's 64 positions are stretched to what is asked."""
    monkeypatch.setattr(context, "FIRST_LINE", 64)
    out = tmp_path / "out.jsonl"
    shape = FOLDER / "llama_tied"
    given = [f"--model={shape}", f"--out={out}", "--dtype=float32", "--max_batch_tokens=32"]
    store = f"--artefact_dir={ARTEFACTS}"
    args = ["--tokens=300", "--generated=40", "--num_pages=60", "--warmup=lazy", store, *given]
    assert cli.main(["bench", "context", *args]) == 0
    _, *parts, line, _ = lines_of(out)
    assert [part["computed"] for part in parts] == [64, 128, 256]
    assert all(part["what"] == "context_part" for part in parts)
    assert (line["what"], line["prompt"]) == ("context", 300)
    assert line["prefill_s"] > parts[-1]["seconds"] > 0 < line["decode_ms"]
    assert line["floor_gb"] >= line["cache_gb"]


def test_starts_are_timed_stage_by_stage_and_two_builds_from_nothing_have_the_same_kernels(
    tmp_path,
):
    out = tmp_path / "out.jsonl"
    args = [f"--model={GGUF}", "--load_format=auto", "--dtype=float32", "--prompt=4", *SIZES]
    assert cli.main(["bench", "startup", "--starts=cold,warm,cold", f"--out={out}", *args]) == 0
    first, warm, second, builds = lines_of(out)
    for line in (first, warm, second):
        ends = [line[f"{stage}_s"] for stage in startup.STAGES]
        assert ends == sorted(ends)
        assert ends[0] > 0
    assert [line["start"] for line in (first, warm, second)] == ["cold", "warm", "cold"]
    assert first["compiled"] == second["compiled"] == warm["loaded"] > 0
    assert warm["compiled"] == first["loaded"] == 0
    assert (builds["what"], builds["same"]) == ("builds", True)
    assert "0 of" in builds["report"]


@pytest.mark.parametrize("compiled", [0, 1])
def test_a_warm_start_that_compiles_is_a_failure(compiled, tmp_path, monkeypatch):
    made = {"cold": 3, "warm": compiled}
    starts = iter(made.values())
    monkeypatch.setattr(startup, "start_once", lambda *_: {"compiled": next(starts)})
    out = tmp_path / "out.jsonl"
    assert cli.main(["bench", "startup", f"--starts={','.join(made)}", f"--out={out}"]) == compiled
    assert [line["ok"] for line in lines_of(out)] == [True, not compiled]


def test_a_start_that_is_refused_says_why_in_a_line(capsys):
    assert cli.main(["bench", "startup", "--starts=cold", "--model=/no/such"]) == 1
    reason = "the engine did not start: no model at '/no/such': that path does not exist"
    assert capsys.readouterr().err == f"octavo bench startup: {reason}\n"


def test_builds_that_differ_are_a_failure(tmp_path, monkeypatch):
    monkeypatch.setattr(startup, "start_once", lambda *_: {"compiled": 3})
    differ = {"same": False, "report": "1 of 3 programs differ"}
    monkeypatch.setattr(startup, "compared", lambda *_: differ)
    out = tmp_path / "out.jsonl"
    assert cli.main(["bench", "startup", "--starts=cold,cold", f"--out={out}"]) == 1
    assert [line["ok"] for line in lines_of(out)] == [True, True, False]


def test_what_a_measurement_will_run_is_known_before(tmp_path, monkeypatch):
    """Programs are compiled at once, those alone that are used."""
    mix = tmp_path / "mix.json"
    mix.write_text('{"seed": 1, "prompt_lens": [5, 90, 9], "output_lens": [3, 9, 4], "gaps": []}')
    found = {}

    class Watched(engine.EngineBench):
        def __init__(self, config, values, measures):
            super().__init__(config, values, measures)
            self.measures = measures

        def finish(self):
            used = {key for key, _ in self.engine.runner.programs.items()}
            found[self.measures] = (used, plan.keys_for(self, self.measures))

    monkeypatch.setattr(engine, "EngineBench", Watched)
    args = [
        *(f"--model={GGUF}", "--load_format=auto", "--dtype=float32", "--rows=1,2", "--prompt=40"),
        *("--generated=40", "--prompts=8", "--repeats=1", f"--workload={mix}", *SIZES),
    ]
    for measures in (("decode", "prefill"), ("throughput",)):
        assert cli.main(["bench", *measures, *args]) == 0
        used, planned = found[measures]
        assert set(planned) == used
        assert len(planned) == len(used)
    # Prompts alike share their pages then: what runs depends on more than lengths.
    alike = ["--prompts=20,40", "--max_batch_tokens=128", "--prefix_caching"]
    assert cli.main(["bench", "prefill", *args, *alike]) == 0
    used, planned = found["prefill",]
    assert used <= set(planned)


def test_benches_of_the_engine_need_no_server_installed():
    absent = "import sys; sys.modules.update(dict.fromkeys(('uvicorn', 'fastapi', 'zmq')));"
    subprocess.run([sys.executable, "-c", f"{absent} import octavo.bench.commands"], check=True)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["decode", "serve"], "'serve' is none of"),
        (["context", "decode"], "no arguments"),
        (["startup", "--starts=hot"], "cold or warm"),
        (["kernel", "softmax"], "'softmax' is none of"),
        (["kernel", "sampling", "--sweep"], "sampling has one setting only"),
        (["all", "--only=decode,x"], "'x' is none of"),
    ],
)
def test_bad_words_are_one_line(args, words, capsys):
    assert cli.main(["bench", *args]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith(f"octavo bench {args[0]}: ")
    assert words in line


def test_a_made_up_tokenizer_has_a_text_for_each_id(tmp_path):
    write_tokenizer(tmp_path, 1000)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.vocab_size == 1000
    assert tokenizer.decode(tokenizer.encode("Grüße, 3")) == "Grüße, 3"
    words = [tokenizer.decode([i]) for i in range(256, 1000)]
    assert len(set(words)) == 744
    assert all(word.strip().isalpha() for word in words)


# Stages ------------------------------------------------------------------------------------------


def staged_as(*names, **fields):
    return tuple(stages.Stage(name, (name,), 60, **fields) for name in names)


@pytest.fixture
def staged(monkeypatch):
    """Stages of nothing in place of benchmarks; returns what they ran."""
    ran = []

    def bounded(command, ending):
        stage = command[command.index("bench") + 1]
        ran.append(stage)
        if stage == "slow":
            raise TimeoutError("ended by its time limit")
        return int(stage == "bad")

    monkeypatch.setattr(stages, "bounded", bounded)
    monkeypatch.setattr(stages, "STAGES", staged_as("good", "bad", "slow"))
    return ran


def test_stages_that_ended_well_are_not_run_again(tmp_path, staged, monkeypatch, capsys):
    run = ["bench", "all", f"--results={tmp_path}"]
    assert cli.main(run) == 1
    assert cli.main(run) == 1
    assert staged == ["good", "bad", "slow", "bad", "slow"]
    said = capsys.readouterr().err
    assert "bad: failed: exit code 1" in said
    assert "slow: failed: ended by its time limit" in said
    assert "good: done before, see " in said
    assert cli.main([*run, "--only=good", "--redo"]) == 0
    assert staged[-1] == "good"
    # Figures of other engine settings, or of other code, are others.
    assert cli.main([*run, "--only=good", "--decode_block=mosaic"]) == 0
    monkeypatch.setattr(stages, "source_digest", lambda: "other code")
    assert cli.main([*run, "--only=good"]) == 0
    assert len(staged) == 8
    (path,) = tmp_path.glob("slow_*.jsonl")
    assert [line["problem"] for line in lines_of(path)] == ["ended by its time limit"] * 2


def test_a_line_that_was_cut_off_hides_no_other(tmp_path, staged):
    run = ["bench", "all", f"--results={tmp_path}", "--only=good"]
    assert cli.main(run) == 0
    (path,) = tmp_path.glob("good_*.jsonl")
    path.write_text('{"what": "dec\n' + path.read_text() + '{"what"')
    assert cli.main(run) == 0
    assert staged == ["good"]


def test_a_stage_that_would_not_fit_is_left_for_the_next_run(tmp_path, staged, monkeypatch, capsys):
    small = stages.Stage("small", ("small",), 0)
    monkeypatch.setattr(stages, "STAGES", (*staged_as("good"), small))
    run = ["bench", "all", f"--results={tmp_path}", "--budget_minutes=0.5"]
    assert cli.main(run) == 0
    assert staged == ["small"]
    assert "good: left out: takes 60 s, " in capsys.readouterr().err


def test_stages_of_a_kernel_that_failed_its_check_are_left_out(
    tmp_path, staged, monkeypatch, capsys
):
    monkeypatch.setattr(
        stages, "STAGES", (*staged_as("x", kernel="x"), *staged_as("y", kernel="y"))
    )
    checks = Results(str(stages.results_of(tmp_path, "check")), source=stages.source_digest())
    for name, ok in (("x", True), ("y", False), ("x", False), ("y", True)):
        checks.say(what="check", kernel=name, ok=ok)
    assert cli.main(["bench", "all", f"--results={tmp_path}"]) == 0
    assert staged == ["y"]
    assert "x: left out: kernel x failed its check" in capsys.readouterr().err


def test_a_stage_that_takes_too_long_is_ended():
    with pytest.raises(TimeoutError, match="ended by its time limit"):
        stages.bounded([sys.executable, "-c", "import time; time.sleep(60)"], -1e9)


def test_every_stage_fits_its_limit_and_names_a_kernel_that_is_checked():
    for stage in stages.STAGES:
        assert stage.seconds <= stage.limit <= stages.LIMIT_SECONDS
        assert stage.kernel in ("", *kernel_check.KERNELS)


TRIED = '{"tried": "a", "error": %s, "steady": %s}'


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        (f"print({TRIED % ('0.001', 'true')!r})", None),
        (f"print({TRIED % ('0.5', 'true')!r})", "a: error 0.5, steady True"),
        (f"print({TRIED % ('NaN', 'true')!r})", "a: error nan, steady True"),
        (f"print({TRIED % ('0.001', 'false')!r})", "a: error 0.001, steady False"),
        (f"print({TRIED % ('0.001', 'true')!r}); raise SystemExit('lost')", "lost"),
        (
            f"import time; print({TRIED % ('0.001', 'true')!r}, flush=True); time.sleep(60)",
            "no end within 8 s",
        ),
        ("pass", "nothing was tried"),
    ],
)
def test_a_kernel_is_good_if_its_process_ends_and_its_results_are_close_and_steady(code, problem):
    found = kernel_check.judged([sys.executable, "-c", code], 8 if "sleep" in code else 60)
    assert (found["ok"], found["problem"]) == (problem is None, problem)
    assert len(found["tried"]) == (code != "pass")


def test_without_a_gpu_no_kernel_is_good(tmp_path):
    out = tmp_path / "check.jsonl"
    args = ["--kernels=write", "--limit=200"]
    assert cli.main(["bench", "kernel", "check", f"--out={out}", "--", *args]) == 1
    (line,) = lines_of(out)
    assert (line["what"], line["kernel"], line["ok"]) == ("check", "write", False)
    assert "needs a Hopper GPU" in line["problem"]
    assert line["source"] == stages.source_digest()


def test_every_stage_names_flags_that_its_commands_have():
    from octavo.bench.commands import COMMANDS

    for stage in stages.STAGES:
        parsed([*stage.args, "--out=x"], COMMANDS[stage.args[0]])
        parsed(["serve", *stage.server, "--attention=auto", "--port=1"], cli.COMMANDS["serve"])


def parsed(words, command):
    """Raises for a flag that the command doesn't have, or a setting out of its range."""
    values = flags.FlagValues()
    define_settings(values, command.settings, command.without)
    command.define(values)
    assert not [word for word in values(words)[1:] if word.startswith("-")]
    parse_settings(values, command.settings)


def test_shapes_are_found_wherever_a_bench_is_run(tmp_path, monkeypatch):
    root = shapes.FOLDER.parent.parent
    monkeypatch.chdir(root)
    assert shapes.shape("llama3_8b") == "configs/shapes/llama3_8b"
    monkeypatch.chdir(tmp_path)
    for name in ("llama3_8b", "llama32_1b"):
        assert (Path(shapes.shape(name)) / "config.json").is_file()


def test_stage_names_flags_and_devices():
    assert stages.slug("NVIDIA H200") == "h200"
    assert stages.slug("AMD EPYC 9B14") == "amd_epyc_9b14"
    from octavo.bench.commands import COMMANDS

    assert all(stage.args[0] in COMMANDS for stage in stages.STAGES)


def test_a_scripts_lines_are_kept(tmp_path, capfd):
    out = tmp_path / "kernels.jsonl"
    code = "print('{\"a\": 1}'); print('note'); raise SystemExit(3)"
    assert kernel.tee([sys.executable, "-c", code], str(out)) == 3
    assert lines_of(out) == [{"a": 1}]
    assert "note" in capfd.readouterr().out
