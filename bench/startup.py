"""`octavo bench startup`: from process start to the first token, with nothing compiled and again.

Each start is a process of its own. `cold` begins with an empty artefact folder; `warm` finds what
the cold one before it left, and fails if it compiles anything. Of two cold ones the kernels are
compared: `same` says that no program of the second differs from the first's, and it fails if one
does. A timeline line gives the seconds at which each stage had
ended:

import    Python and the engine's modules
device    jax has met its devices
weights   parameters are on the device
sizes     temporaries measured, cache allocated
programs  with --warmup=all, every program compiled or loaded
first     first token of a --prompt token prompt

All but the first and the last are the engine's own timeline, which `octavo serve` logs too. Beside
it stand sums over programs: lower_s (traced and lowered, `lowered_apart` of them in processes of
their own), compile_s and load_s (in parallel threads).
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, replace
from typing import Any

from absl import flags

from octavo.bench import engine as engine_bench
from octavo.bench.report import Results, flag_values, rounded
from octavo.serve.command import command_of
from octavo.serve.config import EngineConfig
from octavo.serve.configfile import LoadedConfig
from octavo.serve.flags import UsageError, reason_of

STAGES = ("import", "device", "weights", "sizes", "programs", "first")
HELP = """[--flags]

  --prompt=128            tokens of the first prompt
  --starts=cold,warm      in this order; of two cold ones the kernels are compared
  --limit=540             seconds a start may take
  --out=FILE --label=TEXT --date"""


def define(values: flags.FlagValues) -> None:
    """The command's flags, beside the engine's settings."""
    number, text = flags.DEFINE_integer, flags.DEFINE_string
    number("prompt", 128, "prompt tokens", lower_bound=1, flag_values=values)
    flags.DEFINE_list("starts", ["cold", "warm"], "cold, warm", flag_values=values)
    number("limit", 540, "seconds a start", lower_bound=1, flag_values=values)
    text("out", "", "file to append to", flag_values=values)
    text("label", "", "what is measured", flag_values=values)
    text("date", "", "written into the lines", flag_values=values)


def run(config: LoadedConfig, values: flags.FlagValues, rest: list[str]) -> int:
    """Start the engine as often as --starts says; 1 if a line is not ok."""
    flag = flag_values(values)
    starts = flag["starts"]
    if rest or not set(starts) <= {"cold", "warm"}:
        raise UsageError(f"starts must be cold or warm, not {rest or starts}")
    engine = engine_bench.settings(config, values)
    results = Results(
        flag["out"],
        flag["date"],
        label=flag["label"],
        model=os.path.basename(engine.model),
        warmup=engine.warmup,
    )
    folders: list[str] = []
    with ExitStack() as stack:
        for kind in starts:
            if kind == "cold":
                folders.append(stack.enter_context(tempfile.TemporaryDirectory()))
                engine = replace(engine, artefact_dir=folders[-1])
            timeline = start_once(engine, flag["prompt"], flag["limit"])
            ok = kind == "cold" or not (folders and timeline["compiled"])
            results.say(what="startup", start=kind, ok=ok, **timeline)
        for other in folders[1:]:
            found = compared(folders[0], other, flag["limit"])
            results.say(what="builds", ok=found["same"], **found)
    results.table(("start", "ok", *(f"{name}_s" for name in STAGES), "compiled", "loaded"))
    return int(not all(line["ok"] for line in results.rows))


def start_once(config: EngineConfig, prompt: int, limit: int) -> dict[str, Any]:
    """The timeline of one start in a process of its own; ValueError if it fails."""
    begun = time.time()
    order = json.dumps({"begun": begun, "prompt": prompt, "config": asdict(config)})
    command = command_of("octavo.bench.startup")
    done = subprocess.run(
        command, input=order, capture_output=True, text=True, timeout=limit, check=False
    )
    if done.returncode:
        reason = done.stdout.strip() or done.stderr.strip()[-500:]
        raise ValueError(f"the engine did not start: {reason}")
    return json.loads(done.stdout.splitlines()[-1])


def compared(one: str, other: str, limit: int) -> dict[str, Any]:
    """Whether two artefact folders hold the same kernels, and the differences."""
    words = ["build", f"--artefact_dir={one}", f"--same_as={other}"]
    command = [*command_of("octavo.serve.cli"), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
    return {"same": done.returncode == 0, "report": (done.stdout or done.stderr)[-2000:]}


def main() -> None:
    """The started process: reads its order from standard input, prints its timeline.

    A model or settings that are refused: the reason instead, and exit code 1.
    """
    order = json.load(sys.stdin)
    ends: dict[str, float] = {}

    def elapsed() -> float:
        return time.time() - order["begun"]

    from octavo.sampling.params import SamplingParams
    from octavo.serve.launch import build_engine
    from octavo.serve.types import Request

    end = elapsed()
    ends["import_s"] = rounded(end) or 0.0
    try:
        engine = build_engine(EngineConfig(**order["config"]))
    except (ValueError, OSError, NotImplementedError) as error:
        print(reason_of(error))
        sys.exit(1)
    assert engine.timeline
    for stage, seconds in engine.timeline.seconds.items():
        end += seconds
        ends[f"{stage}_s"] = rounded(end) or 0.0
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    ids = tuple(range(1, 1 + order["prompt"]))
    vocab = engine.model_config.vocab_size
    engine.add(Request("first", tuple(i % vocab for i in ids), params))
    while not any(event.token_ids for event in engine.step()):
        pass
    ends["first_s"] = rounded(elapsed()) or 0.0
    while engine.has_work():
        engine.step()
    stats = engine.runner.programs.stats
    ends |= {"lower_s": rounded(stats.lower_seconds) or 0.0}
    ends |= {"compile_s": rounded(stats.compile_seconds) or 0.0}
    ends |= {"load_s": rounded(stats.load_seconds) or 0.0}
    counts = {name: getattr(stats, name) for name in ("compiled", "lowered_apart", "loaded")}
    print(json.dumps({**ends, **counts}))


if __name__ == "__main__":
    main()
