"""What the device does while an engine decodes: its idle share, and the kernels by time.

    python bench/device_trace.py --shape=configs/shapes/llama3_8b --rows=1,8,64,256

Records a profiler trace of steady decode steps and sums the GPU's events in it. `idle` is the share
of the traced window in which no kernel or copy runs; `step_ms` the window over its decode steps.
The profiler slows the host, so times compare within a trace only; `octavo bench` has the others.
"""

import argparse
import json
import tempfile
from collections import Counter
from pathlib import Path

import jax

from octavo.llm import LLM
from octavo.sampling.params import SamplingParams
from octavo.serve.types import Request

WARM_DISPATCHES, TRACED_DISPATCHES = 6, 8


def device_events(folder: Path) -> list[tuple[int, int, str]]:
    """(start ns, end ns, name) of everything that ran on the first GPU, by start."""
    (path,) = folder.rglob("*.xplane.pb")
    data = jax.profiler.ProfileData.from_file(str(path))
    events = []
    for plane in data.planes:
        if plane.name != "/device:GPU:0":
            continue
        for line in plane.lines:
            if line.name.startswith("Stream"):
                for event in line.events:
                    start = int(event.start_ns)
                    events.append((start, start + int(event.duration_ns), event.name))
    return sorted(events)


def busy_ns(events: list[tuple[int, int, str]]) -> int:
    """Nanoseconds covered by at least one event."""
    total, until = 0, 0
    for start, end, _ in events:
        total += max(0, end - max(start, until))
        until = max(until, end)
    return total


def summary(events: list[tuple[int, int, str]], steps: int, most: int) -> dict:
    """Idle share, milliseconds a step, and the `most` kernels that take longest, per step."""
    window = max(end for _, end, _ in events) - events[0][0]
    times, counts = Counter(), Counter()
    for start, end, name in events:
        times[name] += end - start
        counts[name] += 1
    kernels = {
        name: [round(ns / steps / 1e3, 2), round(counts[name] / steps, 1)]
        for name, ns in times.most_common(most)
    }
    return {
        "steps": steps,
        "step_ms": round(window / steps / 1e6, 4),
        "idle": round(1 - busy_ns(events) / window, 4),
        "kernels_a_step": round(len(events) / steps, 1),
        "us_and_launches_a_step": kernels,
    }


def trace_decode(llm: LLM, rows: int, prompt: int, most: int) -> dict:
    """Runs `rows` requests into steady decode, traces some dispatches, drains the rest."""
    engine, per_dispatch = llm.engine, llm.config.max_decode_steps
    tokens = (WARM_DISPATCHES + TRACED_DISPATCHES + 4) * per_dispatch
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    for row in range(rows):
        ids = tuple((row * 7919 + 31 * i) % 100_000 + 1000 for i in range(prompt))
        engine.add(Request(f"{rows}-{row}", ids, params))
    while engine.has_work() and engine.stats().waiting:
        engine.step()
    for _ in range(WARM_DISPATCHES):
        engine.step()
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            steps = sum(len(e.token_ids) for _ in range(TRACED_DISPATCHES) for e in engine.step())
        found = summary(device_events(Path(folder)), max(steps // rows, 1), most)
    while engine.has_work():
        engine.step()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shape", default="configs/shapes/llama3_8b")
    parser.add_argument("--rows", default="1,8,64,256")
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--max_decode_steps", type=int, default=8)
    parser.add_argument("--kernels", type=int, default=16)
    parser.add_argument("--out", default="")
    args = parser.parse_args()
    llm = LLM(
        args.shape,
        load_format="dummy",
        dtype="bfloat16",
        attention=args.attention,
        max_num_seqs=256,
        max_model_len=8320,
        max_batch_tokens=8192,
        max_decode_steps=args.max_decode_steps,
        prefix_caching=False,
    )
    for rows in map(int, args.rows.split(",")):
        found = trace_decode(llm, rows, args.prompt, args.kernels)
        line = {"what": "trace", "shape": Path(args.shape).name, "rows": rows, **found}
        line |= {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
        print(json.dumps(line), flush=True)
        if args.out:
            with open(args.out, "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
