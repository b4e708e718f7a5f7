"""octavo.forward: a pure function of params and tokens, with a gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from family_data import TOLERANCE, config_of, params_of, reference_of

from octavo.model import forward as model_forward
from octavo.model.params import cast

forward = jax.jit(model_forward.forward, static_argnums=0)


def test_one_row_equals_a_batch_of_rows():
    prompts, std = reference_of("llama_tied")
    config, params = config_of("llama_tied"), params_of("llama_tied")
    ids = jnp.asarray(prompts[1].ids, jnp.int32)
    alone = forward(config, params, ids)
    both = forward(config, params, jnp.stack([ids[::-1], ids]))
    assert alone.shape == (17, config.vocab_size)
    assert both.shape == (2, 17, config.vocab_size)
    assert both.dtype == jnp.float32
    assert np.abs(np.asarray(alone) - prompts[1].logits).max() <= TOLERANCE * std
    assert np.abs(np.asarray(both[1] - alone)).max() <= TOLERANCE * std
    with pytest.raises(ValueError, match=r"\(1, 1, 17\)"):
        forward(config, params, ids[None, None])


def test_gradient_agrees_with_finite_differences():
    config, params = config_of("gemma3_text"), params_of("gemma3_text")
    tokens = jnp.asarray([[5, 9, 2, 77, 31, 8], [4, 4, 19, 300, 1, 6]], jnp.int32)

    def loss(params):
        logprobs = jax.nn.log_softmax(forward(config, params, tokens)[:, :-1])
        return -jnp.take_along_axis(logprobs, tokens[:, 1:, None], axis=-1).mean()

    value_and_grad = jax.jit(jax.value_and_grad(loss))
    _, grads = value_and_grad(params)
    assert all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves(grads))
    assert all(float(jnp.abs(leaf).max()) > 0 for leaf in jax.tree.leaves(grads))
    norm = sum(float(jnp.vdot(leaf, leaf)) for leaf in jax.tree.leaves(grads)) ** 0.5

    def moved(size):
        step = jnp.float32(size / norm)
        return value_and_grad(jax.tree.map(lambda p, g: p + step * g, params, grads))[0]

    slope = float(moved(1e-2) - moved(-1e-2)) / 2e-2
    assert slope == pytest.approx(norm, rel=1e-2)


def test_bfloat16_stays_near_the_reference():
    prompts, std = reference_of("qwen3")
    config = config_of("qwen3").with_dtype("bfloat16")
    params = cast(params_of("qwen3"), "bfloat16")
    logits = forward(config, params, jnp.asarray(prompts[2].ids, jnp.int32))
    assert logits.dtype == jnp.float32
    error = np.asarray(logits) - prompts[2].logits
    assert np.sqrt((error**2).mean()) <= 0.05 * std


def test_outside_of_a_jit_nothing_is_compiled_twice():
    """As README has it: the logits, and a gradient."""
    config, params = config_of("llama_tied"), params_of("llama_tied")
    tokens = jnp.asarray([5, 9, 2, 77], jnp.int32)
    spread = jax.grad(lambda params: model_forward.forward(config, params, tokens).std())

    def both():
        model_forward.forward(config, params, tokens)
        spread(params)

    both()
    compiled: list[str] = []

    def noted(event, *_, **__):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(noted)
    try:
        jax.jit(lambda x: x + 1)(jnp.float32(1))
        assert compiled, "compiles are seen"
        compiled.clear()
        both()
    finally:
        jax.monitoring.unregister_event_duration_listener(noted)
    assert compiled == []
