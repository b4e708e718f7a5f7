"""Octavo on two CPU cores beside Hugging Face transformers and llama.cpp: `make bench-cpu`.

SmolLM2-135M-Instruct from the packaged GGUF, greedy, after a 512-token prompt. Octavo and
transformers compute in float32 on the dequantised weights, llama.cpp on the Q4_1 blocks. Every
engine is a process of its own, loaded once, that computes only when told to; rounds visit the
engines in turn (every second one backwards), so that what else the machine does meets all of them.

prefill: prompt tokens of all rows over the time until every row has its first token.
decode: tokens of all rows after that over the time they take, no row ending before the clock does.

Prints one JSON line a figure (the median of the rounds, and the rounds) and a table.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PYTHONS = {"transformers": ".venv-bench", "octavo": ".venv", "llama.cpp": ".venv-bench"}
BATCHES = {"transformers": (1, 8), "octavo": (1, 8), "llama.cpp": (1,)}
PACKAGES = {
    "transformers": ("transformers", "torch"),
    "octavo": ("octavo", "jax", "jaxlib"),
    "llama.cpp": ("xllamacpp",),
}
Measured = dict[str, Any]
"""prefill and decode in tokens/s, and the tokens [rows][n] that were drawn."""


# Engines ----------------------------------------------------------------------------------------


class Transformers:
    """`forward` with its own key-value cache and an argmax: less work than `generate`."""

    def __init__(self, model: Path, threads: int) -> None:
        self.torch: Any = import_module("torch")
        self.torch.set_num_threads(threads)
        auto: Any = import_module("transformers")
        self.model = auto.AutoModelForCausalLM.from_pretrained(
            model.parent, gguf_file=model.name, dtype=self.torch.float32
        ).eval()

    def measure(self, prompts: list[list[int]], tokens: int) -> Measured:
        torch = self.torch
        with torch.inference_mode():
            start = time.perf_counter()
            out = self.model(torch.tensor(prompts), use_cache=True, logits_to_keep=1)
            drawn = [out.logits[:, -1].argmax(-1, keepdim=True)]
            first = time.perf_counter()
            for _ in range(tokens):
                out = self.model(drawn[-1], past_key_values=out.past_key_values, logits_to_keep=1)
                drawn.append(out.logits[:, -1].argmax(-1, keepdim=True))
            end = time.perf_counter()
        rows = len(prompts)
        return {
            "prefill": rows * len(prompts[0]) / (first - start),
            "decode": rows * tokens / (end - first),
            "tokens": torch.cat(drawn, dim=1).tolist(),
        }


class Octavo:
    """The engine as served: one engine a batch size, default settings else, no prefix cache."""

    def __init__(self, model: Path, threads: int) -> None:
        llm: Any = import_module("octavo.llm")
        self.types: Any = import_module("octavo.serve.types")
        self.params: Any = import_module("octavo.sampling.params")
        self.llms = {
            rows: llm.LLM(
                str(model),
                dtype="float32",
                max_num_seqs=rows,
                max_model_len=1024,
                prefix_caching=False,
            )
            for rows in BATCHES["octavo"]
        }
        self.serial = 0

    def measure(self, prompts: list[list[int]], tokens: int) -> Measured:
        times = self.run(prompts, 1)
        prefill = times[-1][0] - times[0][0]
        # A row runs while others are still in their prompts, so it may draw more than it needs.
        times = self.run(prompts, tokens + 8 * len(prompts))
        firsts, lasts = {}, {}
        for index, (_, found) in enumerate(times):
            for request_id, _ in found:
                firsts.setdefault(request_id, index)
                lasts[request_id] = index
        begin, end = max(firsts.values()), min(lasts.values())
        count = sum(len(ids) for _, found in times[begin + 1 : end + 1] for _, ids in found)
        drawn: dict[str, list[int]] = {}
        for _, found in times:
            for request_id, ids in found:
                drawn.setdefault(request_id, []).extend(ids)
        return {
            "prefill": len(prompts) * len(prompts[0]) / prefill,
            "decode": count / (times[end][0] - times[begin][0]),
            "tokens": [ids[: tokens + 1] for ids in drawn.values()],
        }

    def run(self, prompts: list[list[int]], tokens: int) -> list[tuple[float, list]]:
        """(time, [(request id, its new tokens)]) at the start and after each step."""
        engine = self.llms[len(prompts)].engine
        times: list[tuple[float, list]] = [(time.perf_counter(), [])]
        params = self.params.SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        for prompt in prompts:
            self.serial += 1
            engine.add(self.types.Request(str(self.serial), tuple(prompt), params))
        while engine.has_work():
            found = [(event.request_id, list(event.token_ids)) for event in engine.step()]
            times.append((time.perf_counter(), found))
        return times


class LlamaCpp:
    """llama.cpp's server loop in this process; its own timings."""

    def __init__(self, model: Path, threads: int) -> None:
        xllamacpp: Any = import_module("xllamacpp")
        params = xllamacpp.CommonParams()
        params.model.path = str(model)
        params.n_ctx, params.n_parallel, params.verbosity = 1024, 1, -1
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        self.server = xllamacpp.Server(params)

    def measure(self, prompts: list[list[int]], tokens: int) -> Measured:
        answer = self.server.handle_completions(
            {
                "prompt": prompts[0],
                "n_predict": tokens + 1,
                "temperature": 0.0,
                "ignore_eos": True,
                "cache_prompt": False,
            }
        )
        timings = answer["timings"]
        # The first token falls out of the prompt; its time is in prompt_ms.
        decode = (timings["predicted_n"] - 1) / timings["predicted_ms"] * 1e3
        return {"prefill": timings["prompt_per_second"], "decode": decode, "tokens": []}


ENGINES: dict[str, Callable[[Path, int], Any]] = {
    "transformers": Transformers,
    "octavo": Octavo,
    "llama.cpp": LlamaCpp,
}


def serve(name: str, model: Path, threads: int) -> None:
    """Worker: a JSON request a line in, a JSON answer a line out."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the engine prints goes beside the answers
    engine = ENGINES[name](model, threads)
    versions = {package: version(package) for package in PACKAGES[name]}
    print(json.dumps(versions), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(engine.measure(**json.loads(line))), file=answers, flush=True)


# Driver -----------------------------------------------------------------------------------------


class Worker:
    """An engine in its own process and Python."""

    def __init__(self, name: str, args: argparse.Namespace, model: Path) -> None:
        python = ROOT / PYTHONS[name] / "bin" / "python"
        command = [python, __file__, "--worker", name, "--model", model]
        command += ["--threads", str(args.threads)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(args.threads), "HF_HUB_OFFLINE": "1"}
        self.log = (ROOT / ".cache" / f"bench-{name}.log").open("w")
        self.process = subprocess.Popen(
            list(map(str, command)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env=environment,
        )
        self.name = name
        self.versions = self.read()

    def read(self) -> dict[str, Any]:
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended early; see {self.log.name}")
        return json.loads(line)

    def measure(self, prompts: list[list[int]], tokens: int) -> Measured:
        assert self.process.stdin
        print(json.dumps({"prompts": prompts, "tokens": tokens}), file=self.process.stdin)
        self.process.stdin.flush()
        return self.read()

    def close(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait(60)
        self.log.close()


def in_octavo(code: str) -> str:
    """What a line of Python prints in the project's own environment."""
    python = ROOT / PYTHONS["octavo"] / "bin" / "python"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def packaged_model() -> Path:
    """The GGUF file of `smollm2`."""
    module = "octavo.model.checkpoint.resolve"
    return Path(in_octavo(f"import {module} as m; print(m.resolve_model('smollm2'))"))


def make_prompts(model: Path, rows: int, length: int) -> list[list[int]]:
    """`rows` stretches of the licence's text, `length` tokens each, all different."""
    code = (
        "from octavo.serve.tokenizer_files import load_tokenizer; from pathlib import Path; "
        f"print(load_tokenizer(Path({str(model)!r})).encode(Path({str(ROOT / 'LICENSE')!r})"
        ".read_text()))"
    )
    ids = json.loads(in_octavo(code))
    stride = (len(ids) - length) // rows
    return [ids[row * stride : row * stride + length] for row in range(rows)]


def compare(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Every engine and batch size in turn; one result a figure."""
    model = Path(args.model) if args.model else packaged_model()
    prompts = make_prompts(model, 8, args.prompt)
    load = os.getloadavg()[0]
    names = args.engines.split(",")
    workers = {name: Worker(name, args, model) for name in names}
    visits = [(name, rows) for name in names for rows in BATCHES[name]]
    found: dict[tuple[str, int], list[Measured]] = {visit: [] for visit in visits}
    for turn in range(args.rounds + 1):
        for name, rows in visits if turn % 2 == 0 else reversed(visits):
            # Round 0 compiles and warms up; it is not counted.
            measured = workers[name].measure(prompts[:rows], args.tokens if turn else 8)
            if turn:
                found[name, rows].append(measured)
                speeds = {key: round(measured[key], 1) for key in ("prefill", "decode")}
                print(f"round {turn} {name} batch {rows}: {speeds}", file=sys.stderr, flush=True)
    for worker in workers.values():
        worker.close()
    common = {
        "date": datetime.date.today().isoformat(),
        "cpu": cpu_name(),
        "threads": args.threads,
        "load_before": load,
        "model": model.name,
        "prompt": args.prompt,
        "tokens": args.tokens,
    }
    results = []
    for (name, rows), rounds in found.items():
        for what in ("prefill", "decode"):
            speeds = [one[what] for one in rounds]
            results.append(
                {
                    **common,
                    "engine": name,
                    "versions": workers[name].versions,
                    "batch": rows,
                    "what": what,
                    "tok_s": round(statistics.median(speeds), 2),
                    "rounds": [round(speed, 2) for speed in speeds],
                    **agreement(found, name, rows),
                }
            )
    return results


def agreement(found: dict[tuple[str, int], list[Measured]], name: str, rows: int) -> dict[str, Any]:
    """How many of each row's tokens are transformers' before the first that differs."""
    if name != "octavo" or ("transformers", rows) not in found:
        return {}
    pairs = zip(found[name, rows][-1]["tokens"], found["transformers", rows][-1]["tokens"])
    same = []
    for ours, theirs in pairs:
        differ = [index for index, (a, b) in enumerate(zip(ours, theirs)) if a != b]
        same.append(differ[0] if differ else min(len(ours), len(theirs)))
    return {"same_tokens_as_transformers": same}


def cpu_name() -> str:
    """Model name and the vector extensions that matter here."""
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return platform.processor()
    text = path.read_text()
    name = next(line.split(": ")[1] for line in text.splitlines() if line.startswith("model name"))
    flags = set(next(line for line in text.splitlines() if line.startswith("flags")).split())
    wide = [flag for flag in ("avx2", "avx512f", "amx_tile") if flag in flags]
    return f"{name} ({' '.join(wide)})"


def table(results: list[dict[str, Any]]) -> str:
    """The figures side by side, and as multiples of transformers."""
    by = {(r["engine"], r["batch"], r["what"]): r["tok_s"] for r in results}
    lines = [f"{'engine':<14}{'batch':>6}{'prefill tok/s':>15}{'decode tok/s':>14}"]
    for engine, batch in dict.fromkeys((r["engine"], r["batch"]) for r in results):
        prefill, decode = by[engine, batch, "prefill"], by[engine, batch, "decode"]
        lines.append(f"{engine:<14}{batch:>6}{prefill:>15.1f}{decode:>14.1f}")
    ours, theirs = ("octavo", "transformers")
    if (ours, 1, "decode") in by and (theirs, 1, "decode") in by:
        base = by[theirs, 1, "decode"]
        for batch in BATCHES[ours]:
            decode = by[ours, batch, "decode"]
            prefill = by[ours, batch, "prefill"] / by[theirs, batch, "prefill"]
            lines.append(
                f"octavo batch {batch}: decode {decode / base:.2f} x transformers' batch 1, "
                f"{decode / by[theirs, batch, 'decode']:.2f} x its batch {batch}; "
                f"prefill {prefill:.2f} x"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--model", default="", help="a GGUF file; empty: the packaged SmolLM2")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=64, help="decode steps that are timed")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", default="", help="file that replaces its lines with these")
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        serve(args.worker, Path(args.model), args.threads)
        return
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.threads])
    (ROOT / ".cache").mkdir(exist_ok=True)
    results = compare(args)
    lines = "".join(json.dumps(result) + "\n" for result in results)
    print(lines, end="")
    print(table(results))
    if args.out:
        Path(args.out).parent.mkdir(parents=True, exist_ok=True)
        Path(args.out).write_text(lines, encoding="utf-8")


if __name__ == "__main__":
    main()
