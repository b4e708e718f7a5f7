"""`octavo bench kernel`: the kernels' own benchmarks, each a script beside this file."""

import subprocess
from pathlib import Path
from typing import Any, NamedTuple

from absl import flags

from octavo.bench.report import flag_values
from octavo.serve.command import command_of
from octavo.serve.flags import UsageError

HELP = """[NAME ...] [--flags] [-- flags of the script]

  check       every kernel against plain XLA, each in a process with a time limit
  attention   paged decode and prefill against bytes read or operations done
  prefill     of these the three prefills of 8k tokens and less
  step        norm, rope, write and attention of a decode step, apart and in one kernel
  block       what lies between two attentions against one read of the weights, and XLA's graph
  few_rows    what lies between two attentions as four Triton kernels, and each of these alone
  matmul      products of many rows against what tensor cores and memory give, and XLA's graph
  sampling    sampling programs against one read of the logits
  sampling_bars  of these the ones with a bar: 256 rows, greedy, filtered, log-probabilities

  --sweep     attention, prefill, block, few_rows: other tunings too
  --out=FILE  append the scripts' lines to a file"""


class Script(NamedTuple):
    """A module of this folder, flags it is always given, and whether it knows --sweep."""

    module: str
    options: tuple[str, ...] = ()
    sweeps: bool = False


PREFILLS = "--only=prefill_2k_on_30k,prefill_8k,prefill_4x2k"
KERNELS = {
    "check": Script("kernel_check"),
    "attention": Script("attention_bench", sweeps=True),
    "prefill": Script("attention_bench", (PREFILLS,), sweeps=True),
    "step": Script("decode_step_bench"),
    "block": Script("block_bench", sweeps=True),
    "few_rows": Script("few_rows_bench", sweeps=True),
    "matmul": Script("matmul_bench"),
    "sampling": Script("sampling_bench"),
    "sampling_bars": Script("sampling_bench", ("--rows=256", "--only=greedy,filters")),
}
DEFAULT = ("check", "attention", "step", "block", "few_rows", "matmul", "sampling")


def define(values: flags.FlagValues) -> None:
    """The command's flags."""
    flags.DEFINE_string("out", "", "file to append to", flag_values=values)
    flags.DEFINE_bool("sweep", False, "other tunings too", flag_values=values)


def run(config: Any, values: flags.FlagValues, rest: list[str]) -> int:
    """Run the named scripts (all by default); the exit code of the first that fails."""
    flag = flag_values(values)
    names = [word for word in rest if not word.startswith("-")] or list(DEFAULT)
    unknown = sorted(set(names) - set(KERNELS))
    if unknown:
        raise UsageError(f"{unknown[0]!r} is none of {', '.join(KERNELS)}")
    fixed = [name for name in names if not KERNELS[name].sweeps]
    if flag["sweep"] and fixed:
        raise UsageError(f"--sweep: {fixed[0]} has one setting only")
    options = [word for word in rest if word.startswith("-")]
    for name in names:
        script = KERNELS[name]
        command = [*command_of(f"octavo.bench.{script.module}"), *script.options]
        command += ["--sweep"] * flag["sweep"]
        code = tee([*command, *options], flag["out"])
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
