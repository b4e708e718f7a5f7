"""On the GPU: families in float32 and bf16, SmolLM2's text, and an 8B shape under load."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from octavo.llm import LLM
from octavo.model.checkpoint.resolve import resolve_model
from octavo.sampling.flags import SamplingFlags
from octavo.sampling.params import SamplingParams
from octavo.serve.compile import ProgramKey

pytestmark = pytest.mark.gpu

DATA = Path(__file__).parent / "data"
ROOT = Path(__file__).parent.parent
FAMILIES = sorted(path.name for path in (DATA / "families").iterdir())
CLOSE = {"float32": 0.0, "bfloat16": 0.3}
"""Gap of the two best logits (in deviations of the logits) below which greedy tokens may part."""


@pytest.fixture(scope="module", autouse=True)
def gpu():
    if jax.default_backend() != "gpu":
        pytest.fail("these tests need a GPU; deselect the gpu mark elsewhere")


def close_gap(logits, std):
    """First step whose two best logits are close for bf16; all steps if none is."""
    top = np.sort(logits, axis=-1)[:, -2:]
    close = np.flatnonzero((top[:, 1] - top[:, 0]) / std < CLOSE["bfloat16"])
    return int(close[0]) if len(close) else len(logits)


def test_8b_shape_with_64_concurrent_requests():
    """Random weights; every request ends with its tokens, and a second run gives the same ones."""
    llm = LLM(
        ROOT / "configs" / "shapes" / "llama3_8b",
        load_format="dummy",
        dtype="bfloat16",
        max_num_seqs=64,
        max_model_len=2048,
        max_batch_tokens=2048,
        prefix_caching=False,
        artefact_dir="",
    )
    builder, programs = llm.engine.runner.builder, llm.engine.runner.programs
    drawing = SamplingFlags(filters=True)
    buckets = builder.settings.buckets.all()
    mixed = [bucket for bucket in buckets if not bucket.is_decode]
    keys = [ProgramKey("forward", bucket) for bucket in mixed]
    keys += [builder.decode_key(bucket, drawing) for bucket in buckets if bucket.is_decode]
    keys += [builder.sample_key(rows, drawing) for rows in {bucket.rows for bucket in mixed}]
    programs.warm(keys, workers=16)
    programs.seal()
    programs.seal()
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1000, 100000, rng.integers(5, 600)).tolist() for _ in range(64)]
    params = [
        SamplingParams(temperature=0.8, top_p=0.9, seed=i, max_tokens=16 + i, ignore_eos=True)
        for i in range(64)
    ]
    outputs = llm.generate(prompts, params)
    assert [len(o.outputs[0].token_ids) for o in outputs] == [16 + i for i in range(64)]
    again = llm.generate(prompts, params)
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in again]
    llm.engine.check()
    assert llm.engine.stats().pages_used == 0
    assert programs.stats.after_seal == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_family(name, dtype):
    reference = np.load(DATA / "families" / name / "reference.npz")
    std = float(reference["logit_std"])
    llm = LLM(
        DATA / "families" / name,
        dtype=dtype,
        page_size=16,
        num_pages=65,
        max_num_seqs=4,
        max_batch_tokens=64,
        max_model_len=128,
        artefact_dir="",
    )
    prompts = [reference[f"prompt{i}_ids"].tolist() for i in range(3)]
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True))
    for i, output in enumerate(outputs):
        expected = reference[f"prompt{i}_greedy"].tolist()
        logits = reference[f"prompt{i}_greedy_logits"]
        until = len(expected) if dtype == "float32" else close_gap(logits, std)
        assert list(output.outputs[0].token_ids[:until]) == expected[:until]
        error = llm.score(prompts[i]) - reference[f"prompt{i}_logits"]
        if dtype == "float32":
            assert np.abs(error).max() <= 1e-3 * std
        else:
            assert np.sqrt((error**2).mean()) <= 0.06 * std
    llm.engine.check()


@pytest.mark.smollm2
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_smollm2_text(dtype):
    oracle = json.loads((DATA / "real" / "smollm2-135m-instruct-q4_1.json").read_text())
    llm = LLM(
        resolve_model("smollm2"),
        dtype=dtype,
        max_num_seqs=8,
        max_batch_tokens=512,
        max_model_len=2048,
        num_pages=257,
        artefact_dir="",
    )
    params = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True, logprobs=0)
    limit = 1e-3 if dtype == "float32" else 0.3
    outputs = llm.generate([case["prompt_ids"] for case in oracle["greedy"]], params)
    for case, output in zip(oracle["greedy"], outputs, strict=True):
        close = [i for i, gap in enumerate(case["top2_gap"]) if gap < limit]
        until = close[0] if close else len(case["ids"])
        assert list(output.outputs[0].token_ids[:until]) == case["ids"][:until]
    npz = np.load(DATA / "real" / "smollm2-135m-instruct-q4_1.npz")
    ids = npz["ppl_ids"].tolist()[:1024]
    logits = llm.score(ids).astype(np.float64)[:-1]
    top = logits.max(axis=1)
    totals = top + np.log(np.exp(logits - top[:, None]).sum(axis=1))
    logprobs = logits[np.arange(len(ids) - 1), ids[1:]] - totals
    expected = npz["ppl_logprobs"][: len(ids) - 1]
    tolerance = 1e-4 if dtype == "float32" else 1e-2
    assert np.exp(-logprobs.mean()) == pytest.approx(np.exp(-expected.mean()), rel=tolerance)
