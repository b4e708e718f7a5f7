"""Every family against transformers' float32 logits: full, chunked, step by step, in company."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from family_data import FOLDER, NAMES, TOLERANCE, config_of, params_of, reference_of
from paged_model import PagedModel

from octavo.attention.contract import AttentionMeta
from octavo.cache.layout import init_cache
from octavo.model.checkpoint.assemble import assemble
from octavo.model.checkpoint.hf import HFSource
from octavo.model.families import family_of
from octavo.model.forward import forward
from octavo.model.params import init_params, is_spec, param_bytes, shape_dtypes
from octavo.model.sharding import (
    cache_sharding,
    device_bytes,
    kv_replicas_for,
    make_mesh,
    sharding_tree,
)

CHUNKS = (7, 5, 13, 1, 3)
MAX_LEN = 96


def assert_close(logits, expected, std):
    assert logits.shape == expected.shape
    assert np.abs(logits - expected).max() <= TOLERANCE * std


def generate(model, prompts, width):
    """Greedy continuations of rows that are prefilled in odd chunks while others decode."""
    fed = [list(prompt.ids) for prompt in prompts]
    done = [0] * len(prompts)
    logits = [[] for _ in prompts]
    turn = 0
    while any(at < len(ids) for at, ids in zip(done, fed)):
        chunks = []
        for row, ids in enumerate(fed):
            size = CHUNKS[(turn + row) % len(CHUNKS)]
            chunks.append(ids[done[row] : done[row] + size])
        for row, out in enumerate(model.step(chunks, width)):
            done[row] += len(chunks[row])
            logits[row].extend(out)
            wanted = len(prompts[row].ids) + len(prompts[row].greedy) - 1
            if chunks[row] and done[row] == len(fed[row]) and done[row] < wanted:
                fed[row].append(int(out[-1].argmax()))
        turn += 1
    continuations = [
        [*ids[len(prompt.ids) :], int(out[-1].argmax())]
        for ids, prompt, out in zip(fed, prompts, logits)
    ]
    return continuations, [np.stack(out) for out in logits]


@pytest.mark.parametrize("name", NAMES)
def test_full_forward(name):
    prompts, std = reference_of(name)
    tokens = np.zeros((3, 70), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt.ids)] = prompt.ids
    run = jax.jit(forward, static_argnums=0)
    logits = np.asarray(run(config_of(name), params_of(name), jnp.asarray(tokens)))
    for row, prompt in zip(logits, prompts):
        assert_close(row[: len(prompt.ids)], prompt.logits, std)


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("name", NAMES)
def test_chunked_prefill_and_greedy_in_a_batch(name, page_size):
    prompts, std = reference_of(name)
    model = PagedModel(
        config_of(name), params_of(name), rows=3, max_len=MAX_LEN, page_size=page_size
    )
    continuations, logits = generate(model, prompts, width=32)
    for prompt, continuation, out in zip(prompts, continuations, logits):
        assert continuation == prompt.greedy
        assert_close(out, prompt.all_logits, std)


@pytest.mark.parametrize("name", NAMES)
def test_step_by_step_decode(name):
    """Each token of prompt and continuation through the decode program, rows ending one by one."""
    prompts, std = reference_of(name)
    model = PagedModel(config_of(name), params_of(name), rows=3, max_len=MAX_LEN, page_size=16)
    rows = [[*prompt.ids, *prompt.greedy[:-1]] for prompt in prompts]
    steps = [
        model.step([row[at : at + 1] for row in rows], width=3)
        for at in range(max(len(row) for row in rows))
    ]
    for index, prompt in enumerate(prompts):
        out = np.concatenate([step[index] for step in steps])
        assert_close(out, prompt.all_logits, std)
        assert out[len(prompt.ids) - 1 :].argmax(-1).tolist() == prompt.greedy


@pytest.mark.parametrize(("name", "size"), [("llama_untied", 4), ("qwen2", 2)])
def test_tensor_parallel_gives_the_same_tokens(name, size):
    """llama_untied has 2 KV heads, so 4 devices need each of them twice."""
    prompts, std = reference_of(name)
    mesh = make_mesh(size)
    config = config_of(name)
    config = config.with_kv_replicas(kv_replicas_for(config, size))
    shardings = sharding_tree(family_of(config).abstract_params(config), mesh)
    params = assemble(HFSource(FOLDER / name), config, shardings, progress=False)
    held = [leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(params)]
    assert device_bytes(family_of(config).abstract_params(config), mesh) == sum(held)
    assert sum(held) * size > sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    model = PagedModel(config, params, rows=3, max_len=MAX_LEN, page_size=16, mesh=mesh)
    continuations, logits = generate(model, prompts, width=32)
    for prompt, continuation, out in zip(prompts, continuations, logits):
        assert continuation == prompt.greedy
        assert_close(out, prompt.all_logits, std)


def test_tensor_parallel_moves_activations_only():
    """No device gathers a weight or a cache: what is exchanged is of the step's size."""
    config, mesh = config_of("llama_untied"), make_mesh(2)
    family = family_of(config)
    specs = family.abstract_params(config)
    params = shape_dtypes(specs, sharding_tree(specs, mesh))
    text = lower_decode(config, params, mesh).compile().as_text()
    assert "all-reduce" in text
    moved = re.findall(r"= f32\[([\d,]+)\]\S* all-(?:gather|to-all)\(", text)
    sizes = [math.prod(int(size) for size in shape.split(",")) for shape in moved]
    assert max(sizes, default=0) <= 4 * config.vocab_size


def test_decode_step_copies_no_weight_and_updates_the_cache_in_place():
    config = config_of("llama_untied")
    specs = family_of(config).abstract_params(config)
    memory = lower_decode(config, shape_dtypes(specs), None).compile().memory_analysis()
    layout = config.cache_layout(65, 16)
    assert memory.alias_size_in_bytes == layout.page_bytes * layout.num_pages
    assert memory.temp_size_in_bytes < param_bytes(specs) / 4


@pytest.mark.parametrize("name", ["llama_untied", "gemma3_text"])
def test_layers_alike_are_lowered_once(name):
    """What a program costs to trace and lower grows with the kinds of its layers only."""
    config = config_of(name)
    kinds = set(config.layers)
    specs = family_of(config).abstract_params(config)
    text = lower_decode(config, shape_dtypes(specs), None).as_text()
    count = len(config.layers)
    for name, functions, calls in (
        ("_through_attention", len(kinds), count),
        ("_after_attention", 1, count - 1),
    ):
        assert len(re.findall(rf"func private @{name}\w*\(", text)) == functions
        assert len(re.findall(rf"call @{name}\w*\(", text)) == calls > functions
    # Products: qkv's and two of attention; three after it, which the last layer has to itself.
    assert text.count("dot_general") == 3 * len(kinds) + 2 * 3 + 1


def lower_decode(config, params, mesh):
    family, layout = family_of(config), config.cache_layout(65, 16)
    cache = jax.eval_shape(lambda: init_cache(layout))
    if mesh is not None:
        cache = jax.tree.map(
            lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
            cache,
            cache_sharding(layout, mesh),
        )
    shapes = ((4, 8), (4,), (5,), (4,), ())
    meta = AttentionMeta(*(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes))
    ids = jax.ShapeDtypeStruct((4,), jnp.int32)

    def step(params, tokens, positions, cache, meta):
        hidden, cache = family.forward(params, config, tokens, positions, cache, meta, mesh=mesh)
        return family.unembed(params, config, hidden), cache

    return jax.jit(step, donate_argnums=3).lower(params, ids, ids, cache, meta)


@pytest.mark.parametrize("name", NAMES)
def test_specs_and_names_describe_the_same_tree(name):
    config = config_of(name)
    family = family_of(config)
    specs, names = family.abstract_params(config), family.hf_names(config)
    paths = jax.tree.flatten_with_path(specs, is_leaf=is_spec)[0]
    assert {
        tuple(getattr(key, "idx", getattr(key, "key", None)) for key in path) for path, _ in paths
    } == set(names)
    stored = HFSource(FOLDER / name)
    assert param_bytes(specs) == sum(stored.read(tensor).nbytes for tensor in stored.names())
    made = jax.eval_shape(lambda: init_params(specs, jax.random.key(0)))
    assert jax.tree.map(lambda leaf: leaf.shape, made) == jax.tree.map(
        lambda spec: spec.shape, specs, is_leaf=is_spec
    )


def test_the_last_layer_is_left_out_for_tokens_without_logits():
    """One token of 64 wanted: a tiny model of two layers is spared most of one layer's products."""
    config = config_of("llama_untied")
    family, layout = family_of(config), config.cache_layout(65, 16)
    tokens, cache = 64, jax.eval_shape(lambda: init_cache(layout))
    shapes = ((1, 8), (1,), (2,), (tokens,), ())
    abstract = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes]
    meta = AttentionMeta(*abstract, max_query_len=tokens)
    ids = jax.ShapeDtypeStruct((tokens,), jnp.int32)

    def early(params, ids, cache, meta):
        attended, _ = family.attend_through(params, config, ids, ids, cache, meta)
        return family.finish(params, config, jax.tree.map(lambda array: array[-1:], attended))

    def late(params, ids, cache, meta):
        return family.forward(params, config, ids, ids, cache, meta)[0][-1:]

    def operations(function):
        args = (shape_dtypes(family.abstract_params(config)), ids, cache, meta)
        return jax.jit(function).lower(*args).compile().cost_analysis()["flops"]

    heads, embed = config.num_heads * config.head_dim, config.hidden_size
    products = heads * embed + 3 * embed * config.intermediate_size
    assert operations(late) - operations(early) > 2 * products * (tokens - 1) * 0.95
