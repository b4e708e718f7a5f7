"""Engine benchmarks on random weights: decode step, time to first token, offline throughput.

    python bench/engine_bench.py --shape=configs/shapes/llama3_8b --only=decode,ttft,offline

Prints one JSON line a measurement and appends it to --out, with the floor it is judged by. Prompts
are random ids, sampling is greedy, end-of-sequence is ignored, the prefix cache is off.

decode: B prompts of 1,024 tokens, 144 generated each; the time of a step is the steady time
between dispatches while all B rows decode, over the steps of a dispatch. Its floor is weights plus
the KV read at the mean context, over the measured HBM read rate.
ttft: add() to the first token's event, one request, median of several.
offline: the mix of --workload, all submitted at once.
"""

import argparse
import datetime
import json
import statistics
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import numpy as np

from octavo.llm import LLM
from octavo.sampling.params import SamplingParams
from octavo.serve.types import Request

HBM_READ = 4.48e12
"""Bytes a second, measured on the H200 (docs/kernels.md)."""


class Bench:
    """An engine on random weights and its measurements."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.rng = np.random.default_rng(0)
        self.serial = 0
        start = time.perf_counter()
        self.llm = LLM(
            args.shape,
            load_format="dummy",
            dtype=args.dtype,
            attention=args.attention,
            max_num_seqs=args.max_num_seqs,
            max_model_len=args.max_model_len,
            max_batch_tokens=args.max_batch_tokens,
            max_decode_steps=args.max_decode_steps,
            overlap=not args.no_overlap,
            prefix_caching=False,
            artefact_dir=args.artefact_dir,
        )
        self.engine = self.llm.engine
        self.config = self.engine.model_config
        self.say(what="start", seconds=round(time.perf_counter() - start, 2))

    def say(self, **fields: Any) -> None:
        row = {
            "date": datetime.date.today().isoformat(),
            "device": jax.devices()[0].device_kind,
            "jax": jax.__version__,
            "shape": Path(self.args.shape).name,
            "attention": self.args.attention,
            "overlap": not self.args.no_overlap,
            "max_decode_steps": self.args.max_decode_steps,
            **fields,
        }
        line = json.dumps(row)
        print(line, flush=True)
        if self.args.out:
            with open(self.args.out, "a", encoding="utf-8") as file:
                file.write(line + "\n")

    def add(self, prompt_len: int, max_tokens: int, prompt: list[int] | None = None) -> None:
        vocab = self.config.vocab_size
        ids = prompt or self.rng.integers(vocab // 8, vocab, prompt_len).tolist()
        self.serial += 1
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        self.engine.add(Request(str(self.serial), tuple(ids), params))

    def drain(self) -> list[tuple[float, int]]:
        """(time, tokens) of each step until idle."""
        times = []
        while self.engine.has_work():
            tokens = sum(len(event.token_ids) for event in self.engine.step())
            times.append((time.perf_counter(), tokens))
        return times

    def decode(self, rows: int) -> None:
        steps = self.decode_once(rows)
        if len(steps) < 2:
            steps = self.decode_once(rows)
        ms = statistics.median(steps) * 1e3
        context = self.args.prompt + self.args.generated / 2
        page = self.engine.runner.layout.page_bytes / self.engine.runner.layout.page_size
        floor = (self.engine.runner.weight_bytes_streamed + rows * context * page) / HBM_READ * 1e3
        self.say(
            what="decode",
            rows=rows,
            ms=round(ms, 4),
            floor_ms=round(floor, 4),
            share=round(floor / ms, 3),
            p10=round(float(np.quantile(steps, 0.1)) * 1e3, 4),
        )

    def decode_once(self, rows: int) -> list[float]:
        """Seconds of each decode step while all rows decode, once everything is compiled."""
        times: list[tuple[float, int]] = []
        for _ in range(2):
            for _ in range(rows):
                self.add(self.args.prompt, self.args.generated)
            times = self.drain()
        gaps = []
        for (before, _), (after, tokens) in pairwise(times):
            if tokens and tokens % rows == 0:
                gaps.append((after - before) / (tokens // rows))
        return gaps[2:]

    def ttft(self, tokens: int) -> None:
        found = []
        for _ in range(7):
            self.add(tokens, 1)
            start = time.perf_counter()
            self.drain()
            found.append((time.perf_counter() - start) * 1e3)
        self.say(what="ttft", prompt=tokens, ms=round(statistics.median(found[2:]), 3))

    def offline(self) -> None:
        mix = json.loads(Path(self.args.workload).read_text())
        vocab = self.config.vocab_size
        for attempt in range(self.args.repeats + 1):
            start = time.perf_counter()
            for i, (p, o) in enumerate(zip(mix["prompt_lens"], mix["output_lens"])):
                ids = [token(i, j, vocab) for j in range(p)]
                self.add(p, o, ids)
            added = time.perf_counter()
            self.drain()
            seconds = time.perf_counter() - added
            self.say(
                what="offline",
                warm=attempt > 0,
                seconds=round(seconds, 2),
                add_seconds=round(added - start, 2),
                output_tok_s=round(sum(mix["output_lens"]) / seconds, 1),
            )


def token(i: int, j: int, vocab: int) -> int:
    """Token j of prompt i of the workload; prompts differ from the first token on."""
    return 1000 + (i * 1000003 + j * 7919 + (i * j) % 104729 * 31) % (min(vocab, 121000) - 1000)


def main() -> None:
    parser = argparse.ArgumentParser(description="Engine benchmarks on random weights.")
    parser.add_argument("--shape", default="configs/shapes/llama3_8b")
    parser.add_argument("--only", default="decode,ttft")
    parser.add_argument("--rows", default="1,8,32,64,128,256")
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--generated", type=int, default=144)
    parser.add_argument("--prompts", default="128,1024,8192")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--max_num_seqs", type=int, default=256)
    parser.add_argument("--max_model_len", type=int, default=8320)
    parser.add_argument("--max_batch_tokens", type=int, default=8192)
    parser.add_argument("--max_decode_steps", type=int, default=8)
    parser.add_argument("--no_overlap", action="store_true")
    parser.add_argument("--workload", default="bench/workload.json")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--artefact_dir", default="auto")
    parser.add_argument("--out", default="")
    args = parser.parse_args()
    bench = Bench(args)
    stages = args.only.split(",")
    if "decode" in stages:
        for rows in map(int, args.rows.split(",")):
            bench.decode(rows)
    if "ttft" in stages:
        for tokens in map(int, args.prompts.split(",")):
            bench.ttft(tokens)
    if "offline" in stages:
        bench.offline()
    stats = bench.engine.runner.programs.stats
    bench.say(
        what="programs",
        compiled=stats.compiled,
        loaded=stats.loaded,
        compile_seconds=round(stats.compile_seconds, 1),
    )


if __name__ == "__main__":
    main()
