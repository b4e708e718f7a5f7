"""`octavo bench all`: every recorded figure, in stages of at most nine minutes that resume.

A stage is a process of its own: one that fails, hangs or takes longer than its limit is ended, what
it has measured is kept, and the next one runs. The first holds every kernel against plain XLA;
stages whose kernel it found wrong are left out. A stage that ended well leaves a line in its
results file, with the digest of the package's source; the next run skips it on the same device,
source and engine settings. --redo runs it all the same.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from absl import flags

from octavo.bench.plain_tokenizer import write_tokenizer
from octavo.bench.report import Results, flag_values, hardware, source_digest, table
from octavo.bench.shapes import shape
from octavo.serve.command import command_of
from octavo.serve.flags import UsageError

LIMIT_SECONDS = 540
READY_SECONDS = 420
SHAPE_8B, SHAPE_1B = shape("llama3_8b"), shape("llama32_1b")
DUMMY = ("--load_format=dummy", "--dtype=bfloat16")
HELP = """[--flags]

  --only=decode,serve   stages to run; all by default (--list names them, in their order)
  --budget_minutes=25   ends by then: a stage that would not fit is left for the next run
  --results=bench/results
  --redo                run stages that are done too
  --attention=auto --decode_block=auto --matmul=auto  of every engine"""


@dataclass(frozen=True)
class Stage:
    """One `octavo bench` command; with `server` flags, against an `octavo serve` of its own.

    Attributes:
        seconds: what it takes on an H200 when programs must be compiled first, about.
        limit: seconds after which it is ended.
        kernel: what `check` must not have found wrong.
    """

    name: str
    args: tuple[str, ...]
    seconds: int
    server: tuple[str, ...] = ()
    limit: int = LIMIT_SECONDS
    kernel: str = ""


SERVED = (
    *("serve", "--n=1000", "--processes=8", "--warmup=256"),
    *("--ttft_limit_ms=200", "--tpot_limit_ms=20"),
)
VOCABULARY = 128256
SERVER = (
    *(f"--model={SHAPE_8B}", *DUMMY, "--noprefix_caching", "--max_model_len=8320"),
    "--warmup=plain",
)
MIX = ("throughput", "--max_num_seqs=1024")
START = ("startup", f"--model={SHAPE_8B}")

STAGES = (
    Stage("check", ("kernel", "check"), 60, limit=240),
    Stage("block", ("kernel", "block"), 90, limit=300, kernel="block"),
    Stage("step", ("kernel", "step"), 120, limit=300, kernel="raw"),
    Stage("prefill", ("kernel", "prefill"), 30, limit=240, kernel="prefill"),
    Stage("matmul", ("kernel", "matmul"), 120, limit=240, kernel="matmul"),
    Stage("decode", ("decode", "prefill", "trace", "trace_prefill", f"--model={SHAPE_8B}"), 160),
    Stage("pace", ("pace", f"--model={SHAPE_8B}", "--rows=32", "--max_step_ms=20"), 130),
    Stage("throughput", (*MIX, f"--model={SHAPE_8B}"), 190),
    Stage("serve", (*SERVED, "--rates=4,16,32", "--concurrency=256"), 350, SERVER),
    Stage("small", ("decode", "prefill", "trace", f"--model={SHAPE_1B}"), 90),
    Stage("small_mix", (*MIX, f"--model={SHAPE_1B}"), 90),
    Stage("startup", (*START, "--warmup=plain", "--starts=cold,warm,cold"), 400),
    Stage("context", ("context", f"--model={SHAPE_1B}", "--tokens=1000000"), 260),
    Stage("sampling", ("kernel", "sampling_bars"), 40),
    Stage("kernel", ("kernel", "attention"), 90, limit=300),
    Stage("crowds", (*SERVED, "--concurrency=1,8,32,64,128", "--rounds=16"), 150, SERVER),
    Stage("startup_all", (*START, "--warmup=all"), 420),
    Stage("block_sweep", ("kernel", "block", "--sweep"), 300, kernel="block"),
    Stage("prefill_sweep", ("kernel", "prefill", "--sweep"), 200, kernel="prefill"),
)
"""In the order of their run: what decides most for its time comes first."""


def define(values: flags.FlagValues) -> None:
    """The command's flags."""
    flags.DEFINE_list("only", [], "stages", flag_values=values)
    flags.DEFINE_bool("list", False, "name the stages", flag_values=values)
    flags.DEFINE_bool("redo", False, "also what is done", flag_values=values)
    flags.DEFINE_float("budget_minutes", 0.0, "0: no end", lower_bound=0, flag_values=values)
    flags.DEFINE_string("results", "bench/results", "folder", flag_values=values)
    flags.DEFINE_string("attention", "auto", "implementation", flag_values=values)
    flags.DEFINE_string("decode_block", "auto", "between attentions", flag_values=values)
    flags.DEFINE_string("matmul", "auto", "products of many rows", flag_values=values)


def run(config: Any, values: flags.FlagValues, rest: list[str]) -> int:
    """Run the stages that are not done; 1 if one of them failed."""
    flag = flag_values(values)
    only, known = flag["only"], [stage.name for stage in STAGES]
    unknown = sorted(set(only) - set(known))
    if rest or unknown:
        raise UsageError(f"--only: {(rest or unknown)[0]!r} is none of {', '.join(known)}")
    if flag["list"]:
        words = ((stage.name, stage.seconds, " ".join(stage.args)) for stage in STAGES)
        print("\n".join(f"{name:<14}{seconds:>4} s  {args}" for name, seconds, args in words))
        return 0
    ending = time.monotonic() + flag["budget_minutes"] * 60 if flag["budget_minutes"] else None
    names = ("attention", "decode_block", "matmul")
    engine = tuple(f"--{name}={flag[name]}" for name in names)
    folder, ends = Path(flag["results"]), []
    for stage in STAGES:
        if not only or stage.name in only:
            end, seconds = run_next(stage, folder, engine, ending, redo=flag["redo"])
            ends.append({"stage": stage.name, "end": end, "seconds": seconds})
            print(f"{stage.name}: {end}", file=sys.stderr, flush=True)
    print(table(ends, ("stage", "end", "seconds")), file=sys.stderr)
    return int(any(end["end"].startswith("failed") for end in ends))


def run_next(
    stage: Stage, folder: Path, engine: tuple[str, ...], ending: float | None, *, redo: bool
) -> tuple[str, float | None]:
    """How a stage ended, or why it was not run; and its seconds."""
    out = results_of(folder, stage.name)
    if is_done(out, stage.name, engine) and not redo:
        return f"done before, see {out}", None
    if stage.kernel and stage.kernel in wrong_kernels(results_of(folder, "check")):
        return f"left out: kernel {stage.kernel} failed its check", None
    left = float(stage.limit) if ending is None else ending - time.monotonic()
    if left < stage.seconds:
        return f"left out: takes {stage.seconds} s, {max(left, 0):.0f} are left", None
    print(f"{stage.name}: about {stage.seconds} s ...", file=sys.stderr, flush=True)
    problem, seconds = run_stage(stage, out, engine, min(stage.limit, left))
    return (f"failed: {problem}" if problem else "done"), seconds


def results_of(folder: Path, name: str) -> Path:
    """A stage's results file for this machine's device."""
    return folder / f"{name}_{slug(hardware()['device'])}.jsonl"


def slug(device: str) -> str:
    """A device's name as part of a file name: "NVIDIA H200" is h200."""
    words = device.lower().replace("nvidia", "").split()
    return "".join(c if c.isalnum() else "_" for c in "_".join(words))[:40]


def lines_here(out: Path, **wanted: Any) -> list[dict[str, Any]]:
    """The lines of a results file with these fields, of this source and device, oldest first."""
    if not out.exists():
        return []
    wanted |= {"source": source_digest(), "device": hardware()["device"]}
    found = []
    for line in out.read_text(encoding="utf-8").splitlines():
        try:
            fields = json.loads(line)
        except ValueError:  # a line whose writer was ended in its middle
            continue
        if wanted.items() <= fields.items():
            found.append(fields)
    return found


def is_done(out: Path, name: str, engine: tuple[str, ...]) -> bool:
    """Whether a stage has ended well with this source and engine settings on this device."""
    return bool(lines_here(out, what="stage", stage=name, ok=True, engine=list(engine)))


def wrong_kernels(out: Path) -> set[str]:
    """Kernels that the latest check with this source on this device found wrong."""
    latest = {line["kernel"]: line["ok"] for line in lines_here(out, what="check")}
    return {name for name, good in latest.items() if not good}


def run_stage(stage: Stage, out: Path, engine: tuple[str, ...], limit: float) -> tuple[str, float]:
    """Run one stage within `limit` seconds; what went wrong ("" if nothing), and its seconds."""
    start = time.monotonic()
    takes_engine = stage.args[0] not in ("serve", "kernel")
    args = [*stage.args, f"--out={out}", *(engine if takes_engine else ())]
    command = [*command_of("octavo.serve.cli"), "bench", *args]
    problem = ""
    try:
        if stage.server:
            with server([*stage.server, *engine], min(READY_SECONDS, limit)) as url:
                code = bounded([*command, f"--url={url}"], start + limit)
        else:
            code = bounded(command, start + limit)
        problem = f"exit code {code}" if code else ""
    except (OSError, ValueError) as error:
        problem = str(error)
    seconds = round(time.monotonic() - start, 1)
    Results(str(out)).say(
        what="stage",
        stage=stage.name,
        ok=not problem,
        problem=problem or None,
        seconds=seconds,
        source=source_digest(),
        engine=list(engine),
    )
    return problem, seconds


def bounded(command: list[str], ending: float) -> int:
    """Run a command until the clock says `ending`; its exit code, or TimeoutError."""
    left = max(1.0, ending - time.monotonic())
    with subprocess.Popen(command, start_new_session=True) as process:
        try:
            return process.wait(left)
        except subprocess.TimeoutExpired:
            raise TimeoutError("ended by its time limit") from None
        finally:
            end(process)


def end(process: subprocess.Popen[Any]) -> None:
    """End a process and what it started, if it still runs."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextmanager
def server(args: list[str], ready: float) -> Iterator[str]:
    """The URL of an `octavo serve` of random weights, up within `ready` s; ended with the block."""
    from octavo.bench.load import Target
    from octavo.bench.serve import reach

    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    folder = tempfile.TemporaryDirectory()
    write_tokenizer(Path(folder.name), VOCABULARY)
    given = (f"--port={port}", f"--tokenizer={folder.name}", *args)
    command = [*command_of("octavo.serve.cli"), "serve", *given]
    process = subprocess.Popen(command, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        reach(Target(url), ready, alive=lambda: process.poll() is None)
        yield url
        process.terminate()
        process.wait(30)
    except subprocess.TimeoutExpired:
        raise TimeoutError("the server did not stop") from None
    finally:
        end(process)
        folder.cleanup()
