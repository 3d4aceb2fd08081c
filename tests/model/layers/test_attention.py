"""Attention over a long context is walked in blocks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.model.layers import attention
from jaxspec.model.layers.attention import attend


def arguments(seed, batch=2, rows=3, kv_heads=2, group=2, context=21):
    """Queries, context, its mask, new rows and what they see; the first sequence has no context at all."""
    draw = np.random.default_rng(seed)

    def normal(*shape):
        return jnp.asarray(draw.normal(size=shape), jnp.float32)

    length = draw.integers(0, context + 1, batch)
    length[0] = 0
    return (
        3 * normal(batch, rows, kv_heads * group, 8),
        (normal(batch, context, kv_heads, 8), normal(batch, context, kv_heads, 6)),
        jnp.arange(context) < length[:, None, None],
        (normal(batch, rows, kv_heads, 8), normal(batch, rows, kv_heads, 6)),
        jnp.broadcast_to(jnp.tril(jnp.ones((rows, rows), bool)), (batch, rows, rows)),
        0.3,
    )


@pytest.mark.parametrize("block", [1, 5, 7, 20])  # of 21 tokens
def test_blocks_of_any_size_give_the_same(monkeypatch, block):
    whole = attend(*arguments(block))
    monkeypatch.setattr(attention, "LEAST_BLOCK", block)
    monkeypatch.setattr(attention, "SCORE_BYTES", 0)
    np.testing.assert_allclose(attend(*arguments(block)), whole, rtol=1e-5, atol=1e-6)


def test_memory_does_not_grow_with_the_context(monkeypatch):
    monkeypatch.setattr(attention, "SCORE_BYTES", 1 << 20)

    def bytes_needed(context):
        shapes = jax.eval_shape(lambda: arguments(0, batch=1, rows=64, context=context)[:5])
        compiled = jax.jit(lambda *arrays: attend(*arrays, 0.3)).lower(*shapes).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert bytes_needed(16 * 1024) == pytest.approx(bytes_needed(4 * 1024), rel=0.2)
