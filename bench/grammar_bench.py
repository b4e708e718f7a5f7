"""What grammars cost and whether texts end under them: SmolLM2, on whatever device there is.

    python bench/grammar_bench.py --out=bench/results/grammar_cpu.jsonl
        [--stages=end,masks,engine,jump] [--tekken=tekken_240911.json]

`end`: 20 nested schemas, 5 samples each, temperature 1, max_tokens 512: how many end by themselves,
and whether each of those parses and validates. `masks`: microseconds a row's mask takes along those
texts, one row alone and 32 rows at once (time of the call over rows), for SmolLM2's vocabulary and,
with --tekken, for Mistral's of 131,072 tokens (a file in the package mistral-common). `engine`:
tokens a second of 32 rows, all under a grammar beside none, in turns; and, which other work on the
machine hardly changes, processor time a token. `jump`: a row alone and 8 rows, a schema of long
keys with and without free whitespace, forced tokens taken as input beside sampled, in turns; both
must give the same tokens.
"""

import base64
import importlib.metadata
import json
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
from absl import app, flags
from llguidance import LLExecutor, LLMatcher, LLTokenizer, TokenizerWrapper
from llguidance.numpy import fill_next_token_bitmask_par

from octavo.bench.grammar_schemas import SCHEMAS
from octavo.bench.report import Results
from octavo.llm import LLM
from octavo.sampling.pack import mask_words
from octavo.sampling.params import SamplingParams
from octavo.serve.grammar_compile import compile_grammar
from octavo.serve.types import Grammar

_OUT = flags.DEFINE_string("out", "", "file that lines are added to")
_STAGES = flags.DEFINE_list("stages", ["end", "masks", "engine", "jump"], "what to run")
_SAMPLES = flags.DEFINE_integer("samples", 5, "samples a schema")
_ROWS = flags.DEFINE_integer("rows", 32, "rows of the engine stage")
_TOKENS = flags.DEFINE_integer("tokens", 64, "tokens a row of the engine stage")
_ROUNDS = flags.DEFINE_integer("rounds", 3, "rounds of the engine stage")
_STEPS = flags.DEFINE_list("decode_steps", ["8", "1"], "max_decode_steps of the engine stage")
_TEKKEN = flags.DEFINE_string("tekken", "", "vocabulary file")


def report(**fields: Any) -> None:
    """Print a line and keep it."""
    load = round(os.getloadavg()[0], 2)
    stamp = {"llguidance": importlib.metadata.version("llguidance"), "load_after": load}
    Results(_OUT.value, **stamp).say(**fields)


def sample_texts(llm: LLM) -> dict[str, list[str]]:
    """Texts that ended by themselves, by schema; reports how many did and whether they validate."""
    prompts, params, grammars, names = [], [], [], []
    for name, schema in SCHEMAS.items():
        question = f"Give me an example of a {name} as JSON."
        assert llm.tokenizer is not None
        ids = llm.tokenizer.encode_chat([{"role": "user", "content": question}])
        for seed in range(_SAMPLES.value):
            names.append(name)
            prompts.append(ids)
            params.append(SamplingParams(temperature=1.0, seed=seed, max_tokens=512))
            grammars.append(Grammar.json_schema(schema))
    start = time.perf_counter()
    outputs = [o.outputs[0] for o in llm.generate(prompts, params, grammar=grammars)]
    seconds = time.perf_counter() - start
    ended: dict[str, list[str]] = {}
    invalid, unfinished = [], []
    for name, output in zip(names, outputs, strict=True):
        if output.finish_reason != "stop":
            unfinished.append(name)
            continue
        ended.setdefault(name, []).append(output.text)
        try:
            jsonschema.validate(
                json.loads(output.text),
                SCHEMAS[name],
                format_checker=jsonschema.FormatChecker(),
            )
        except (ValueError, jsonschema.ValidationError) as error:
            invalid.append([name, output.text, str(error)[:200]])
    report(
        stage="end",
        samples=len(outputs),
        ended=len(outputs) - len(unfinished),
        unfinished=unfinished,
        invalid=invalid,
        tokens=sum(len(o.token_ids) for o in outputs),
        seconds=round(seconds, 1),
    )
    return ended


class Tekken:
    """A vocabulary of that format as llguidance wants it; encodes greedily, which masks don't mind.

    Special tokens come first, then byte strings.
    """

    def __init__(self, path: str) -> None:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        size = data["config"]["default_vocab_size"]
        special = data["config"]["default_num_special_tokens"]
        pieces = [base64.b64decode(entry["token_bytes"]) for entry in data["vocab"]]
        self.tokens = [b"\xff<special%d>" % i for i in range(special)] + pieces[: size - special]
        self.special_token_ids = list(range(special))
        self.bos_token_id, self.eos_token_id = 1, 2
        self._ids = {piece: i for i, piece in enumerate(self.tokens)}
        self._longest = max(map(len, self.tokens))

    def __call__(self, text: str | bytes) -> list[int]:
        """Ids of `text`, the longest piece first."""
        rest = text if isinstance(text, bytes) else text.encode()
        ids = []
        while rest:
            lengths = range(min(self._longest, len(rest)), 0, -1)
            length = next(n for n in lengths if rest[:n] in self._ids)
            ids.append(self._ids[rest[:length]])
            rest = rest[length:]
        return ids

    def tokenizer(self) -> LLTokenizer:
        """For grammars."""
        return LLTokenizer(TokenizerWrapper(self), len(self.tokens), self.eos_token_id)


def walk(tokenizer: LLTokenizer, matcher: LLMatcher, text: str) -> Iterator[float]:
    """Seconds of each mask along a text."""
    executor = LLExecutor()
    mask = np.zeros((1, mask_words(tokenizer.vocab_size)), np.int32)
    for token in tokenizer.tokenize_str(text):
        start = time.perf_counter()
        fill_next_token_bitmask_par(executor, [(matcher, 0)], mask)
        yield time.perf_counter() - start
        if not matcher.consume_token(token):
            raise RuntimeError(matcher.get_error())


def time_masks(name: str, tokenizer: LLTokenizer, texts: dict[str, list[str]]) -> None:
    """Report the time of a row's mask, alone and in a batch of 32."""
    alone = []
    for schema, samples in texts.items():
        template = compile_grammar(tokenizer, Grammar.json_schema(SCHEMAS[schema]))
        for text in samples:
            alone += walk(tokenizer, template.deep_copy(), text)
    rows = [(schema, text) for schema, samples in texts.items() for text in samples][:32]
    matchers = [
        compile_grammar(tokenizer, Grammar.json_schema(SCHEMAS[schema])).deep_copy()
        for schema, _ in rows
    ]
    tokens = [tokenizer.tokenize_str(text) for _, text in rows]
    executor, together = LLExecutor(), []
    mask = np.zeros((len(rows), mask_words(tokenizer.vocab_size)), np.int32)
    for step in range(max(map(len, tokens))):
        todo = [(m, i) for i, m in enumerate(matchers) if step < len(tokens[i])]
        start = time.perf_counter()
        fill_next_token_bitmask_par(executor, todo, mask)
        together.append((time.perf_counter() - start) / len(todo))
        for matcher, i in todo:
            matcher.consume_token(tokens[i][step])
    report(
        stage="masks",
        vocabulary=name,
        vocab_size=tokenizer.vocab_size,
        masks=len(alone),
        **{f"alone_us_p{p}": micros(alone, p) for p in (50, 90, 99, 100)},
        **{f"of_32_us_p{p}": micros(together, p) for p in (50, 99)},
    )


def micros(seconds: list[float], percentile: float) -> float:
    """A percentile in microseconds."""
    return round(float(np.percentile(seconds, percentile)) * 1e6, 1)


def time_engine(llm: LLM) -> None:
    """Report tokens a second with every row under a grammar, and with none, in turns."""
    rows, count = _ROWS.value, _TOKENS.value
    item = {"type": "object", "properties": {"a": {"type": "string"}, "n": {"type": "integer"}}}
    item |= {"required": ["a", "n"], "additionalProperties": False}
    grammar = Grammar.json_schema({"type": "array", "items": item, "minItems": 1000})
    prompts = [[100 + i, *range(300, 316)] for i in range(rows)]
    free = [SamplingParams(seed=i, max_tokens=count, ignore_eos=True) for i in range(rows)]
    bound = [SamplingParams(seed=i, max_tokens=count) for i in range(rows)]
    speeds: dict[str, list[float]] = {"without": [], "with": []}
    cpu: dict[str, list[float]] = {"without": [], "with": []}
    for round_ in range(_ROUNDS.value + 1):
        for kind in ("without", "with") if round_ % 2 else ("with", "without"):
            start, used = time.perf_counter(), time.process_time()
            if kind == "with":
                outputs = llm.generate(prompts, bound, grammar=grammar)
            else:
                outputs = llm.generate(prompts, free)
            seconds, used = time.perf_counter() - start, time.process_time() - used
            made = sum(len(o.outputs[0].token_ids) for o in outputs)
            if round_:  # the first one compiles
                speeds[kind].append(made / seconds)
                cpu[kind].append(used / made * 1e3)
    losses = [1 - slow / fast for fast, slow in zip(speeds["without"], speeds["with"])]
    costs = {kind: statistics.median(found) for kind, found in cpu.items()}
    report(
        stage="engine",
        rows=rows,
        tokens=count,
        max_decode_steps=llm.config.max_decode_steps,
        tokens_per_second={kind: [round(x, 1) for x in found] for kind, found in speeds.items()},
        loss_percent=round(100 * statistics.median(losses), 1),
        cpu_ms_a_token={kind: round(cost, 3) for kind, cost in costs.items()},
        cpu_loss_percent=round(100 * (1 - costs["without"] / costs["with"]), 1),
    )


LONG_KEYS = {
    "customer_account_identifier": {"type": "integer", "minimum": 0, "maximum": 9999},
    "preferred_delivery_method": {"enum": ["courier", "collection", "letter"]},
    "total_amount_in_euro_cents": {"type": "integer", "minimum": 0, "maximum": 99999},
    "has_accepted_terms_and_conditions": {"type": "boolean"},
    "name_of_the_contact_person": {"type": "string", "maxLength": 12},
    "number_of_articles_ordered": {"type": "integer", "minimum": 1, "maximum": 99},
}


def time_jumps(llm: LLM, rows: int, *, compact: bool) -> None:
    """Report seconds and steps with forced tokens taken as input beside all sampled, in turns."""
    schema = {"type": "object", "properties": LONG_KEYS, "required": list(LONG_KEYS)}
    schema |= {"additionalProperties": False, "x-guidance": {"whitespace_flexible": not compact}}
    prompts = [[100 + i, *range(300, 316)] for i in range(rows)]
    params = [SamplingParams(seed=i, max_tokens=160) for i in range(rows)]
    engine, jumping = llm.engine, llm.engine.grammars.forced
    ways = {"sampled": lambda _: (), "jumped": jumping}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    cpu: dict[str, list[float]] = {way: [] for way in ways}
    steps, texts = {}, {}
    for round_ in range(_ROUNDS.value + 1):
        for way in sorted(ways, reverse=bool(round_ % 2)):
            engine.grammars.forced = ways[way]
            before, start, used = engine.stats().steps, time.perf_counter(), time.process_time()
            outputs = llm.generate(prompts, params, grammar=Grammar.json_schema(schema))
            texts[way] = [o.outputs[0].token_ids for o in outputs]
            steps[way] = engine.stats().steps - before
            if round_:  # the first one compiles
                seconds[way].append(time.perf_counter() - start)
                cpu[way].append(time.process_time() - used)
    engine.grammars.forced = jumping
    if texts["sampled"] != texts["jumped"]:
        raise RuntimeError("forced tokens taken as input changed the answer")
    made = sum(map(len, texts["jumped"]))
    report(
        stage="jump",
        rows=rows,
        compact=compact,
        tokens=made,
        steps=steps,
        seconds={way: [round(x, 3) for x in found] for way, found in seconds.items()},
        tokens_per_second={w: round(made / statistics.median(x), 1) for w, x in seconds.items()},
        speedup=_ratio(seconds),
        cpu_speedup=_ratio(cpu),
    )


def _ratio(costs: dict[str, list[float]]) -> float:
    """How many times cheaper jumping is, the median over rounds."""
    pairs = zip(costs["sampled"], costs["jumped"], strict=True)
    return round(statistics.median(slow / fast for slow, fast in pairs), 2)


def masks_and_ends(sizes: dict[str, Any]) -> None:
    """The first two stages; the texts of one serve the other."""
    llm = LLM("smollm2", **sizes)
    texts = sample_texts(llm)
    if "masks" not in _STAGES.value:
        return
    assert llm.tokenizer is not None
    source, eos = llm.tokenizer.backend.to_str(), llm.engine.eos_ids[0]
    vocab_size = llm.engine.model_config.vocab_size
    time_masks("smollm2", LLTokenizer(source, vocab_size, eos), texts)
    if _TEKKEN.value:
        time_masks("tekken", Tekken(_TEKKEN.value).tokenizer(), texts)


def main(_: list[str]) -> None:
    """Run the stages."""
    sizes: dict[str, Any] = {"max_num_seqs": 32, "max_model_len": 1024}
    if {"end", "masks"} & set(_STAGES.value):
        masks_and_ends(sizes)
    if "engine" in _STAGES.value:
        for steps in _STEPS.value:
            time_engine(LLM("smollm2", max_decode_steps=int(steps), **sizes))
    if "jump" in _STAGES.value:
        llm = LLM("smollm2", **sizes)
        for rows in (1, 8):
            for compact in (True, False):
                time_jumps(llm, rows, compact=compact)


if __name__ == "__main__":
    app.run(main)
