"""`octavo bench kernel`: the kernels' own benchmarks, each a script beside this file."""

import subprocess
import sys
from pathlib import Path
from typing import Any

from absl import flags

from octavo.bench.report import flag_values
from octavo.serve.flags import UsageError

HELP = """[NAME ...] [-- flags of the script]

  attention   paged decode and prefill against bytes read or operations done
  sampling    sampling programs against one read of the logits
  block       what lies between two attentions against one read of the weights, and XLA's graph

  --out=FILE  append the scripts' lines to a file"""
KERNELS = {
    "attention": "attention_bench",
    "sampling": "sampling_bench",
    "block": "block_bench",
}


def define(values: flags.FlagValues) -> None:
    """The command's flags."""
    flags.DEFINE_string("out", "", "file to append to", flag_values=values)


def run(config: Any, values: flags.FlagValues, rest: list[str]) -> int:
    """Run the named scripts (all by default); the exit code of the first that fails."""
    names = [word for word in rest if not word.startswith("-")] or list(KERNELS)
    unknown = sorted(set(names) - set(KERNELS))
    if unknown:
        raise UsageError(f"{unknown[0]!r} is none of {', '.join(KERNELS)}")
    options = [word for word in rest if word.startswith("-")]
    for name in names:
        command = [sys.executable, "-m", f"octavo.bench.{KERNELS[name]}", *options]
        code = tee(command, flag_values(values)["out"])
        if code:
            return code
    return 0


def tee(command: list[str], out: str) -> int:
    """Run a command; its JSON lines are printed and appended to `out`. Its exit code."""
    if out:
        Path(out).parent.mkdir(parents=True, exist_ok=True)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            if out and line.startswith("{"):
                with open(out, "a", encoding="utf-8") as file:
                    file.write(line)
    return process.returncode
