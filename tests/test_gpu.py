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


IMPLEMENTATIONS = ("mosaic", "xla")


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


def resized(name, head_dim, folder):
    """A family's shape with heads of that width, for random weights; its folder."""
    shape = json.loads((DATA / "families" / name / "config.json").read_text())
    shape |= {"head_dim": head_dim, "num_attention_heads": 8, "num_key_value_heads": 2}
    shape |= {"hidden_size": 512, "intermediate_size": 1024, "max_position_embeddings": 1024}
    if "query_pre_attn_scalar" in shape:
        shape["query_pre_attn_scalar"] = head_dim
    target = folder / name
    target.mkdir()
    (target / "config.json").write_text(json.dumps(shape))
    return target


@pytest.mark.parametrize("head_dim", [128, 256])
@pytest.mark.parametrize("name", FAMILIES)
def test_kernels_give_the_plain_paths_tokens(name, head_dim, tmp_path):
    """Random weights, bfloat16: equal up to the first position whose two best logits are close.

    Both paths round to the same type, so they are far closer than either is to float32.
    """
    model = resized(name, head_dim, tmp_path)
    assert_same_tokens(model, [{"attention": name} for name in IMPLEMENTATIONS])


@pytest.mark.parametrize("name", ["llama_untied", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("block", ["mosaic", "triton"])
def test_kernels_between_attentions_give_the_graphs_tokens(block, name, tmp_path):
    """As above; decode steps of 1 to 4 rows, and of up to 64."""
    model = resized(name, 128, tmp_path)
    blocks = [{"decode_block": name} for name in (block, "xla")]
    assert_same_tokens(model, blocks)
    assert_same_tokens(model, blocks, max_num_seqs=64)


@pytest.mark.parametrize("name", ["llama_untied", "qwen2", "gemma3_text"])
def test_products_of_many_rows_give_the_graphs_tokens(name, tmp_path):
    """As above; prompts in a step of 1,024 tokens (above in steps of 256)."""
    model = resized(name, 128, tmp_path)
    settings = [{"matmul": name} for name in IMPLEMENTATIONS]
    assert_same_tokens(model, settings, max_batch_tokens=1024, max_num_seqs=16)


def assert_same_tokens(model, settings, **sizes):
    """The first settings' tokens are the second's as far as those are clear; scores are close."""
    rng = np.random.default_rng(1)
    prompts = [
        rng.integers(3, 300, size).tolist()
        for size in (2, 16, 17, 63, 64, 65, 100, 130, 200, 257, 300, 330)
    ]
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=2)
    outputs, scores = [], []
    for setting in settings:
        llm = LLM(
            model,
            load_format="dummy",
            dtype="bfloat16",
            page_size=16,
            num_pages=129,
            max_model_len=512,
            artefact_dir="",
            **({"max_num_seqs": 4, "max_batch_tokens": 256} | setting | sizes),
        )
        outputs.append(llm.generate(prompts, params))
        scores.append(llm.score(prompts[-1]))
        llm.engine.check()
    ours, plain = scores
    std = plain.std()
    assert np.sqrt(((ours - plain) ** 2).mean()) <= 0.03 * std
    compared = 0
    for ours, plain in zip(*outputs, strict=True):
        best = [step.top[:2] for step in plain.outputs[0].logprobs]
        close = [i for i, (a, b) in enumerate(best) if (a[1] - b[1]) / std < 0.1]
        until = close[0] if close else len(best)
        assert ours.outputs[0].token_ids[:until] == plain.outputs[0].token_ids[:until]
        compared += until
    assert compared >= len(prompts)


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
