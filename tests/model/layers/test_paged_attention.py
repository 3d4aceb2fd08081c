"""Attention over pages is attention over the rows in them, whatever the blocks, the window and the table's width."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.model.layers import paged_attention
from jaxspec.model.layers.paged_attention import ContextRows, NewRows, PagedContext, attend, attend_paged
from jaxspec.sharding.arithmetic import cdiv

SCALE = 0.3


def arguments(seed, batch=2, rows=3, kv_heads=2, group=2, context=21, window=0):
    """Queries, a context at hand and new rows; the first sequence has no context at all."""
    draw = np.random.default_rng(seed)

    def normal(*shape):
        return jnp.asarray(draw.normal(size=shape), jnp.float32)

    length = draw.integers(0, context + 1, batch).astype(np.int32)
    length[0] = 0
    queries = 3 * normal(batch, rows, kv_heads * group, 8)
    held = (normal(batch, context, kv_heads, 8), normal(batch, context, kv_heads, 6))
    new = (normal(batch, rows, kv_heads, 8), normal(batch, rows, kv_heads, 6))
    visibility = jnp.broadcast_to(jnp.tril(jnp.ones((rows, rows), bool)), (batch, rows, rows))
    positions = jnp.asarray(length[:, None] + np.arange(rows, dtype=np.int32))
    return (
        queries,
        ContextRows(held, jnp.arange(context), jnp.asarray(length), window),
        NewRows(new, positions, visibility),
    )


def by_hand(queries, context, new):
    """[batch, rows, heads, value width] in float64, one softmax over all that a row attends to."""
    keys, values = (np.concatenate([old, fresh], axis=1) for old, fresh in zip(context.rows, new.rows, strict=True))
    group = queries.shape[2] // keys.shape[2]
    out = np.zeros((*queries.shape[:3], values.shape[-1]))
    for b, r, h in np.ndindex(queries.shape[:3]):
        position = int(new.positions[b, r])
        seen = np.asarray(context.places) < int(context.length[b])
        if context.window:
            seen &= position - np.asarray(context.places) < context.window
        seen = np.concatenate([seen, np.asarray(new.visibility[b, r])])
        scores = keys[b, seen, h // group].astype(np.float64) @ np.asarray(queries[b, r, h], np.float64) * SCALE
        weights = np.exp(scores - scores.max())
        out[b, r, h] = weights @ values[b, seen, h // group] / weights.sum()
    return out


def paged(context, page_size, spare=2):
    """The same rows in pages that lie in no order, the table longer than the context."""
    draw = np.random.default_rng(1)
    batch, length = context.rows[0].shape[:2]
    width = cdiv(length, page_size) + 1
    table = draw.permutation(batch * width + spare)[: batch * width].reshape(batch, width).astype(np.int32)
    pools = []
    for rows in context.rows:
        pool = draw.normal(size=(batch * width + spare, page_size, *rows.shape[2:])).astype(np.float32)
        padded = np.zeros((batch, width * page_size, *rows.shape[2:]), np.float32)
        padded[:, :length] = rows
        pool[table] = padded.reshape(batch, width, page_size, *rows.shape[2:])
        pools.append(jnp.asarray(pool))
    return PagedContext(tuple(pools), jnp.asarray(table), context.length, context.window)


@pytest.mark.parametrize("window", [0, 1, 6])
def test_rows_in_pages_are_attended_as_rows_at_hand(window):
    queries, context, new = arguments(4, batch=4, window=window)
    expected = by_hand(queries, context, new)
    np.testing.assert_allclose(attend(queries, context, new, SCALE), expected, rtol=1e-5, atol=1e-5)
    for page_size in (1, 4, 8):
        found = attend_paged(queries, paged(context, page_size), new, SCALE)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_a_single_pool_is_key_and_value_of_one_head():
    queries, context, new = arguments(5, kv_heads=1, group=3)
    rows, fresh = context.rows[0][:, :, 0], new.rows[0][:, :, 0]
    alone = ContextRows((rows,), context.places, context.length)
    found = attend_paged(queries, paged(alone, 4), NewRows((fresh,), new.positions, new.visibility), SCALE)
    twice = ContextRows((rows[:, :, None],) * 2, context.places, context.length)
    expected = by_hand(queries, twice, NewRows((fresh[:, :, None],) * 2, new.positions, new.visibility))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_rows_that_lie_otherwise_are_expanded():
    queries, context, new = arguments(6)
    doubled = ContextRows(tuple(2 * x for x in context.rows), context.places, context.length)
    fresh = NewRows(tuple(2 * x for x in new.rows), new.positions, new.visibility)
    found = attend_paged(queries, paged(context, 4), new, SCALE, lambda rows: tuple(2 * x for x in rows))
    np.testing.assert_allclose(found, by_hand(queries, doubled, fresh), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("block", [1, 5, 7, 20])  # of 21 tokens
def test_blocks_of_any_size_give_the_same(monkeypatch, block):
    whole = attend(*arguments(block), SCALE)
    monkeypatch.setattr(paged_attention, "LEAST_BLOCK", block)
    monkeypatch.setattr(paged_attention, "SCORE_BYTES", 0)
    np.testing.assert_allclose(attend(*arguments(block), SCALE), whole, rtol=1e-5, atol=1e-6)


def test_memory_does_not_grow_with_the_context(monkeypatch):
    monkeypatch.setattr(paged_attention, "SCORE_BYTES", 1 << 20)

    def bytes_needed(context):
        shapes = jax.eval_shape(lambda: arguments(0, batch=1, rows=64, context=context))
        compiled = jax.jit(lambda *arrays: attend(*arrays, SCALE)).lower(*shapes).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert bytes_needed(16 * 1024) == pytest.approx(bytes_needed(4 * 1024), rel=0.2)
