"""Grouped-query attention over a paged context and the rows of the current pass."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec.model.layers.basic import Linear, RMSNorm, product
from jaxspec.model.layers.batch import LayerRows
from jaxspec.model.layers.rope import RopeConfig
from jaxspec.sharding.collectives import device_index, sum_over_devices
from jaxspec.sharding.layout import Layout

SCORE_BYTES = 1 << 28  # of float32 scores at a time, but for blocks of the least size
LEAST_BLOCK = 1024  # context tokens

Sums = tuple[jax.Array, jax.Array, jax.Array]


def rotary_tables(positions: jax.Array, rope: RopeConfig, head_dim: int) -> tuple[jax.Array, jax.Array]:
    """cos and sin of each position's angles; int32 [batch, rows] → two float32 [batch, rows, 1, head_dim / 2]."""
    angles = positions[..., None, None].astype(jnp.float32) * jnp.asarray(rope.inverse_frequencies(head_dim))
    return jnp.cos(angles) * rope.amplitude, jnp.sin(angles) * rope.amplitude


def rotate(x: jax.Array, tables: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotary embedding of x [batch, rows, heads, head_dim]; dimension i pairs with i + head_dim / 2."""
    cos, sin = tables
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)


def attend(
    queries: jax.Array,
    context: LayerRows,
    context_mask: jax.Array,
    rows: LayerRows,
    visibility: jax.Array,
    scale: float,
) -> jax.Array:
    """Softmax attention over context rows and new rows, scored apart and joined by their common maximum and sum.

    Joining the two parts costs no concatenation, so the context is read once and never copied. Where the scores of the
    whole context would take too much memory, it is walked in blocks.

    Args:
      queries: [batch, rows, kv_heads * group, head_dim].
      context: keys [batch, context, kv_heads, head_dim] and values [batch, context, kv_heads, value_dim].
      context_mask: bool [batch, rows or 1, context].
      rows: keys and values of this pass, [batch, rows, kv_heads, …].
      visibility: bool [batch or 1, rows, rows].
      scale: multiplies the scores.
    Returns:
      [batch, rows, kv_heads * group, value_dim] in the dtype of `queries`; softmax in float32.
    """
    batch, count, heads, head_dim = queries.shape
    kv_heads = rows[0].shape[2]
    grouped = queries.reshape(batch, count, kv_heads, heads // kv_heads, head_dim)

    def scores(keys: jax.Array, mask: jax.Array) -> jax.Array:  # [batch, kv_heads, group, rows, keys]
        raw = product("brkgd,bckd->bkgrc", grouped, keys, jnp.float32) * scale
        return jnp.where(mask[:, None, None], raw, -jnp.inf)

    def mixed(weights: jax.Array, values: jax.Array) -> jax.Array:  # [batch, kv_heads, group, rows, value_dim]
        return product("bkgrc,bckd->bkgrd", weights.astype(values.dtype), values, jnp.float32)

    new = scores(rows[0], visibility)
    length = context[0].shape[1]
    block = max(LEAST_BLOCK, SCORE_BYTES // (4 * batch * heads * count))
    if length <= block:
        old = scores(context[0], context_mask)
        # A row always sees itself, so the maximum is finite. The result does not depend on it, nor does any gradient.
        peak = jax.lax.stop_gradient(jnp.maximum(old.max(-1, keepdims=True), new.max(-1, keepdims=True)))
        old, new = jnp.exp(old - peak), jnp.exp(new - peak)
        total = old.sum(-1) + new.sum(-1)  # [batch, kv_heads, group, rows]
        result = mixed(old, context[1]) + mixed(new, rows[1])
    else:
        peak = new.max(-1)
        new = jnp.exp(new - peak[..., None])
        sums = (peak, new.sum(-1), mixed(new, rows[1]))

        def add(sums: Sums, start: jax.Array | int, size: int) -> Sums:
            """Adds a block of context to the running maximum, sum of weights and mixture of values."""
            peak, total, result = sums
            part = functools.partial(jax.lax.dynamic_slice_in_dim, start_index=start, slice_size=size)
            old = scores(part(context[0], axis=1), part(context_mask, axis=2))
            highest = jnp.maximum(peak, old.max(-1))
            shrink, old = jnp.exp(peak - highest), jnp.exp(old - highest[..., None])
            result = result * shrink[..., None] + mixed(old, part(context[1], axis=1))
            return highest, total * shrink + old.sum(-1), result

        blocks, rest = divmod(length, block)
        starts = jnp.arange(blocks) * block
        sums, _ = jax.lax.scan(lambda sums, start: (add(sums, start, block), None), sums, starts)
        _, total, result = add(sums, blocks * block, rest) if rest else sums
    result = (result / total[..., None]).transpose(0, 3, 1, 2, 4)  # [batch, rows, kv_heads, group, value_dim]
    return result.reshape(batch, count, heads, -1).astype(queries.dtype)


class Attention(nnx.Module):
    """The projections of grouped-query attention, and which heads this device owns.

    Query heads are split over the mesh where they divide it; K/V heads likewise, otherwise every device computes and
    caches all of them and picks those that its query heads belong to.
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        layout: Layout,
        dtype: Any,
        *,
        qk_norm_eps: float | None,
    ):
        self.head_dim = head_dim
        self.group = heads // kv_heads
        self.split = layout.splits("heads")
        self.kv_split = layout.splits("kv_heads")
        self.q_proj = Linear(heads * head_dim, hidden, ("heads", None), dtype)
        self.k_proj = Linear(kv_heads * head_dim, hidden, ("kv_heads", None), dtype)
        self.v_proj = Linear(kv_heads * head_dim, hidden, ("kv_heads", None), dtype)
        self.o_proj = Linear(hidden, heads * head_dim, (None, "heads"), dtype)
        self.qk_norm = qk_norm_eps is not None
        if qk_norm_eps is not None:
            self.q_norm = RMSNorm(head_dim, qk_norm_eps, dtype)
            self.k_norm = RMSNorm(head_dim, qk_norm_eps, dtype)

    def queries(self, x: jax.Array, tables: tuple[jax.Array, jax.Array]) -> jax.Array:
        """[batch, rows, hidden] → normed and rotated queries [batch, rows, heads / devices, head_dim]."""
        q = self._heads(self.q_proj(x))
        return rotate(self.q_norm(q) if self.qk_norm else q, tables)

    def keys_values(self, x: jax.Array, tables: tuple[jax.Array, jax.Array]) -> LayerRows:
        """[batch, rows, hidden] → cache rows: normed, rotated keys and values, [batch, rows, kv_heads, head_dim]."""
        k = self._heads(self.k_proj(x))
        return rotate(self.k_norm(k) if self.qk_norm else k, tables), self._heads(self.v_proj(x))

    def attend(
        self,
        queries: jax.Array,
        context: LayerRows,
        context_mask: jax.Array,
        rows: LayerRows,
        visibility: jax.Array,
    ) -> jax.Array:
        """Attention and its output projection, [batch, rows, hidden], the same on every device."""
        context, rows = self._own(context, queries), self._own(rows, queries)
        mixed = attend(queries, context, context_mask, rows, visibility, self.head_dim**-0.5)
        return sum_over_devices(self.o_proj(mixed.reshape(*mixed.shape[:2], -1)), self.split)

    def _heads(self, x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:2], -1, self.head_dim)

    def _own(self, rows: LayerRows, queries: jax.Array) -> LayerRows:
        """The K/V heads that this device's query heads read, where every device holds all K/V heads."""
        if self.split == self.kv_split:
            return rows
        heads = queries.shape[2]
        wanted = (device_index(True) * heads + jnp.arange(heads)) // self.group
        return tuple(jnp.take(array, wanted, axis=2) for array in rows)
