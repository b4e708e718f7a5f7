"""`octavo bench all`: every recorded figure, in stages of at most nine minutes that resume.

A stage that ended well leaves a line in its results file, with the digest of the package's source;
the next run skips it on the same device and source. --redo runs it all the same.
"""

import hashlib
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

import octavo.serve
from octavo.bench.plain_tokenizer import write_tokenizer
from octavo.bench.report import Results, flag_values, hardware
from octavo.serve.flags import UsageError

LIMIT_SECONDS = 540
READY_SECONDS = 300
SHAPE_8B, SHAPE_1B = "configs/shapes/llama3_8b", "configs/shapes/llama32_1b"
DUMMY = ("--load_format=dummy", "--dtype=bfloat16")
HELP = """[--flags]

  --only=decode,serve   stages to run; all by default (--list names them)
  --results=bench/results
  --redo                run stages that are done too
  --attention=auto      of every engine"""


@dataclass(frozen=True)
class Stage:
    """One `octavo bench` command; with `server` flags, against an `octavo serve` of its own."""

    name: str
    args: tuple[str, ...]
    server: tuple[str, ...] = ()


SERVED = (
    *("serve", "--n=1000", "--processes=8"),
    *("--ttft_limit_ms=200", "--tpot_limit_ms=20"),
)
VOCABULARY = 128256
SERVER = (f"--model={SHAPE_8B}", *DUMMY, "--no-prefix_caching", "--max_model_len=8320")

STAGES = (
    Stage("kernel", ("kernel", "attention", "sampling")),
    Stage("block", ("kernel", "block")),
    Stage("decode", ("decode", "prefill", "trace", f"--model={SHAPE_8B}")),
    Stage("pace", ("pace", f"--model={SHAPE_8B}", "--rows=32", "--max_step_ms=20")),
    Stage("throughput", ("throughput", f"--model={SHAPE_8B}", "--max_num_seqs=1024")),
    Stage("serve", (*SERVED, "--rates=4,16,32", "--concurrency=256"), SERVER),
    Stage("crowds", (*SERVED, "--concurrency=1,8,32,64,128", "--rounds=16"), SERVER),
    Stage("small", ("decode", "prefill", "trace", f"--model={SHAPE_1B}")),
    Stage("small_mix", ("throughput", f"--model={SHAPE_1B}", "--max_num_seqs=1024")),
    Stage("startup", ("startup", f"--model={SHAPE_8B}", "--warmup=all")),
    Stage("builds", ("startup", f"--model={SHAPE_8B}", "--warmup=all", "--starts=cold,cold")),
    Stage("context", ("context", f"--model={SHAPE_1B}", "--tokens=1000000")),
)


def define(values: flags.FlagValues) -> None:
    """The command's flags."""
    flags.DEFINE_list("only", [], "stages", flag_values=values)
    flags.DEFINE_bool("list", False, "name the stages", flag_values=values)
    flags.DEFINE_bool("redo", False, "also what is done", flag_values=values)
    flags.DEFINE_string("results", "bench/results", "folder", flag_values=values)
    flags.DEFINE_string("attention", "auto", "implementation", flag_values=values)


def run(config: Any, values: flags.FlagValues, rest: list[str]) -> int:
    """Run the stages that are not done; 1 if one of them failed."""
    flag = flag_values(values)
    only, known = flag["only"], [stage.name for stage in STAGES]
    unknown = sorted(set(only) - set(known))
    if rest or unknown:
        raise UsageError(f"--only: {(rest or unknown)[0]!r} is none of {', '.join(known)}")
    if flag["list"]:
        print("\n".join(f"{stage.name:<12}{' '.join(stage.args)}" for stage in STAGES))
        return 0
    failed = False
    for stage in STAGES:
        if only and stage.name not in only:
            continue
        out = Path(flag["results"]) / f"{stage.name}_{slug(hardware()['device'])}.jsonl"
        if is_done(out, stage.name) and not flag["redo"]:
            print(f"{stage.name}: done, see {out}", file=sys.stderr)
            continue
        failed |= not run_stage(stage, out, (f"--attention={values['attention'].value}",))
    return int(failed)


def slug(device: str) -> str:
    """A device's name as part of a file name: "NVIDIA H200" is h200."""
    words = device.lower().replace("nvidia", "").split()
    return "".join(c if c.isalnum() else "_" for c in "_".join(words))[:40]


def source_digest() -> str:
    """Digest of the package's Python files: which code made a figure."""
    root = Path(octavo.serve.__path__[0]).parent
    digest = hashlib.sha256()
    for path in sorted(root.glob("*/**/*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def is_done(out: Path, name: str) -> bool:
    """Whether a stage has ended well with this source on this device."""
    if not out.exists():
        return False
    wanted = {"what": "stage", "stage": name, "ok": True, "source": source_digest()}
    lines = (json.loads(line) for line in out.read_text(encoding="utf-8").splitlines() if line)
    return any(
        wanted.items() <= line.items() and line.get("device") == hardware()["device"]
        for line in lines
    )


def run_stage(stage: Stage, out: Path, engine: tuple[str, ...]) -> bool:
    """Run one stage within its time; whether it ended well."""
    start = time.monotonic()
    takes_engine = stage.args[0] not in ("serve", "kernel")
    args = [*stage.args, f"--out={out}", *(engine if takes_engine else ())]
    command = [sys.executable, "-m", "octavo.serve.cli", "bench", *args]
    problem = ""
    try:
        if stage.server:
            with server([*stage.server, *engine]) as url:
                code = bounded([*command, f"--url={url}"], start)
        else:
            code = bounded(command, start)
        problem = f"exit code {code}" if code else ""
    except (TimeoutError, OSError, ValueError) as error:
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
    return not problem


def bounded(command: list[str], start: float) -> int:
    """Run a command until LIMIT_SECONDS after `start`; its exit code, or TimeoutError."""
    left = max(1.0, start + LIMIT_SECONDS - time.monotonic())
    with subprocess.Popen(command, start_new_session=True) as process:
        try:
            return process.wait(left)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"longer than {LIMIT_SECONDS} s") from None
        finally:
            end(process)


def end(process: subprocess.Popen[Any]) -> None:
    """End a process and what it started, if it still runs."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextmanager
def server(args: list[str]) -> Iterator[str]:
    """The URL of an `octavo serve` of random weights that is ready; ended with the block."""
    from octavo.bench.load import Target
    from octavo.bench.serve import reach

    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    folder = tempfile.TemporaryDirectory()
    write_tokenizer(Path(folder.name), VOCABULARY)
    given = (f"--port={port}", f"--tokenizer={folder.name}", *args)
    command = [sys.executable, "-m", "octavo.serve.cli", "serve", *given]
    process = subprocess.Popen(command, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        reach(Target(url), READY_SECONDS, alive=lambda: process.poll() is None)
        yield url
        process.terminate()
        process.wait(30)
    except subprocess.TimeoutExpired:
        raise TimeoutError("the server did not stop") from None
    finally:
        end(process)
        folder.cleanup()
