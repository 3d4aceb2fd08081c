"""Attention over a paged context and the rows of the current pass.

`attend_paged` is the one entry: models hand it a layer's pools and page table, and a kernel over pages takes the place
of what it does. Its plain form gathers the context's rows and hands them to `attend`, which serves a context at hand
(training) as well.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from jaxspec.model.layers.basic import product
from jaxspec.model.layers.batch import LayerRows
from jaxspec.model.layers.cache import context_positions, context_rows
from jaxspec.sharding.collectives import (
    device_index,
    gather_over_devices,
    max_over_devices,
    sum_to_owners,
)

SCORE_BYTES = 1 << 28  # of float32 scores at a time, but for blocks of the least size
LEAST_BLOCK = 1024  # context tokens

Sums = tuple[jax.Array, jax.Array, jax.Array]
# Turns cache rows into keys and values [batch, rows, kv_heads, …].
Expand = Callable[[LayerRows], LayerRows]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class NewRows:
    """The rows of a pass as one layer attends to them.

    Attributes:
      rows: their cache rows, [batch, rows, …].
      positions: int32 [batch, rows], absolute.
      visibility: bool [batch or 1, rows, rows]; row i attends to row j.
    """

    rows: LayerRows
    positions: jax.Array
    visibility: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ContextRows:
    """A layer's context with its rows at hand.

    Attributes:
      rows: cache rows, [batch, context, …].
      places: int32 [context], the position of each.
      length: int32 [batch], tokens of context; rows of later positions are not attended to.
      window: the sliding window in positions, or 0 for all of the context.
    """

    rows: LayerRows
    places: jax.Array
    length: jax.Array
    window: int = field(default=0, metadata={"static": True})

    def mask(self, positions: jax.Array) -> jax.Array:
        """bool [batch, rows or 1, context]: what rows at `positions`, int32 [batch, rows], attend to."""
        mask = self.places < self.length[:, None, None]
        return mask & (positions[..., None] - self.places < self.window) if self.window else mask


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PagedContext:
    """A layer's context in the pages of its pools.

    Attributes:
      pools: [pages, page_size / shares, …] each: keys and values, or one whose rows are both.
      page_table: int32 [batch, width], the pages that hold each sequence's context.
      length, window: as in `ContextRows`.
      shares: devices that the rows of a page are split over.
    """

    pools: tuple[jax.Array, ...]
    page_table: jax.Array
    length: jax.Array
    window: int = field(default=0, metadata={"static": True})
    shares: int = field(default=1, metadata={"static": True})

    def after(self, x: jax.Array) -> tuple["PagedContext", jax.Array]:
        """This context, not to be read before `x` is there, and `x`.

        Left alone, the compiler gathers the contexts of all layers first and holds them all. The length goes along: one
        mask for all layers, the drafter's too, was fused into each layer's maximum, at thrice the time.
        """
        page_table, length, x = jax.lax.optimization_barrier((self.page_table, self.length, x))
        return PagedContext(self.pools, page_table, length, self.window, self.shares), x

    def gathered(self) -> ContextRows:
        """The rows that this device holds."""
        places = context_positions(self.pools[0], self.page_table.shape[1], self.shares)
        rows = tuple(context_rows(pool, self.page_table) for pool in self.pools)
        return ContextRows(rows, places, self.length, self.window)


def attend_paged(
    queries: jax.Array,
    context: PagedContext,
    new: NewRows,
    scale: float,
    expand: Expand | None = None,
    heads_split: bool = False,
) -> jax.Array:
    """Softmax attention over a paged context and new rows.

    Args:
      queries: [batch, rows, heads, width], the heads of this device.
      context: where its pages' rows are split over the devices, every device adds what its own rows contribute.
      new: the pass's own rows, in the form of the pools' rows.
      scale: multiplies the scores.
      expand: makes keys and values of cache rows, where these do not lie as they are attended to. Without it, two pools
        are keys and values of kv_heads heads, each shared by heads / kv_heads of the queries', and a single pool of
        rows [width] is key and value at once of one head that all share.
      heads_split: whether the devices hold different heads; of interest only where pages are split over them.
    Returns:
      [batch, rows, heads, value width] in the dtype of `queries`; softmax in float32.
    """
    held = context.gathered()
    if context.shares > 1 and expand is None:
        return attend_spread(queries, held, new, scale, heads_split)
    if context.shares > 1:
        rows = tuple(gather_over_devices(array, 1, True) for array in held.rows)
        held = ContextRows(rows, gather_over_devices(held.places, 0, True), held.length, held.window)
    return attend(queries, held, new, scale, expand)


def attend(
    queries: jax.Array, context: ContextRows, new: NewRows, scale: float, expand: Expand | None = None
) -> jax.Array:
    """`attend_paged` with the context's rows at hand, scored apart from the new ones and joined by maximum and sum.

    Joining the two parts costs no concatenation, so the context is read once and never copied. Where the scores of the
    whole context would take too much memory, it is walked in blocks.
    """
    keys_values = expand or _as_they_lie
    old_rows, new_rows, mask = keys_values(context.rows), keys_values(new.rows), context.mask(new.positions)
    batch, count, heads, width = queries.shape
    kv_heads = new_rows[0].shape[2]
    grouped = queries.reshape(batch, count, kv_heads, heads // kv_heads, width)

    def scores(keys: jax.Array, mask: jax.Array) -> jax.Array:  # [batch, kv_heads, group, rows, keys]
        raw = product("brkgd,bckd->bkgrc", grouped, keys, jnp.float32) * scale
        return jnp.where(mask[:, None, None], raw, -jnp.inf)

    def mixed(weights: jax.Array, values: jax.Array) -> jax.Array:  # [batch, kv_heads, group, rows, value width]
        return product("bkgrc,bckd->bkgrd", weights.astype(values.dtype), values, jnp.float32)

    fresh = scores(new_rows[0], new.visibility)
    length = old_rows[0].shape[1]
    block = max(LEAST_BLOCK, SCORE_BYTES // (4 * batch * heads * count))
    if length <= block:
        old = scores(old_rows[0], mask)
        # A row always sees itself, so the maximum is finite. The result does not depend on it, nor does any gradient.
        peak = jax.lax.stop_gradient(jnp.maximum(old.max(-1, keepdims=True), fresh.max(-1, keepdims=True)))
        old, fresh = jnp.exp(old - peak), jnp.exp(fresh - peak)
        total = old.sum(-1) + fresh.sum(-1)  # [batch, kv_heads, group, rows]
        result = mixed(old, old_rows[1]) + mixed(fresh, new_rows[1])
    else:
        peak = fresh.max(-1)
        fresh = jnp.exp(fresh - peak[..., None])
        sums = (peak, fresh.sum(-1), mixed(fresh, new_rows[1]))

        def add(sums: Sums, start: jax.Array | int, size: int) -> Sums:
            """Adds a block of context to the running maximum, sum of weights and mixture of values."""
            peak, total, result = sums
            part = functools.partial(jax.lax.dynamic_slice_in_dim, start_index=start, slice_size=size)
            old = scores(part(old_rows[0], axis=1), part(mask, axis=2))
            highest = jnp.maximum(peak, old.max(-1))
            shrink, old = jnp.exp(peak - highest), jnp.exp(old - highest[..., None])
            result = result * shrink[..., None] + mixed(old, part(old_rows[1], axis=1))
            return highest, total * shrink + old.sum(-1), result

        blocks, rest = divmod(length, block)
        starts = jnp.arange(blocks) * block
        sums, _ = jax.lax.scan(lambda sums, start: (add(sums, start, block), None), sums, starts)
        _, total, result = add(sums, blocks * block, rest) if rest else sums
    result = (result / total[..., None]).transpose(0, 3, 1, 2, 4)  # [batch, rows, kv_heads, group, value width]
    return result.reshape(batch, count, heads, -1).astype(queries.dtype)


def attend_spread(queries: jax.Array, context: ContextRows, new: NewRows, scale: float, heads_split: bool) -> jax.Array:
    """Attention over a context whose rows are spread over the devices, each row key and value of one shared head.

    Each device scores the queries of all heads against its own rows. Sums go back to the heads' owners, who then add
    the new rows, so that those are counted once.
    """
    (held,), (fresh_rows,), mask = context.rows, new.rows, context.mask(new.positions)
    everyone = gather_over_devices(queries, 2, heads_split)

    def scores(queries: jax.Array, keys: jax.Array, mask: jax.Array) -> jax.Array:  # [batch, heads, rows, keys]
        raw = product("brhd,bcd->bhrc", queries, keys, jnp.float32) * scale
        return jnp.where(mask[:, None], raw, -jnp.inf)

    def mixed(weights: jax.Array, values: jax.Array) -> jax.Array:  # [batch, heads, rows, width]
        return product("bhrc,bcd->bhrd", weights.astype(values.dtype), values, jnp.float32)

    old = scores(everyone, held, mask)
    # Finite where there is no context at all; whatever it is, the result does not depend on it.
    peak = max_over_devices(jnp.maximum(old.max(-1), jnp.finfo(jnp.float32).min), True)  # [batch, heads, rows]
    old = jnp.exp(old - peak[..., None])
    total = sum_to_owners(old.sum(-1), 1, heads_split)
    result = sum_to_owners(mixed(old, held), 1, heads_split)

    own = queries.shape[2]
    peak = jax.lax.dynamic_slice_in_dim(peak, device_index(heads_split) * own, own, axis=1)
    fresh = scores(queries, fresh_rows, new.visibility)
    highest = jnp.maximum(peak, fresh.max(-1))
    fresh, shrink = jnp.exp(fresh - highest[..., None]), jnp.exp(peak - highest)
    result = (result * shrink[..., None] + mixed(fresh, fresh_rows)) / (total * shrink + fresh.sum(-1))[..., None]
    return result.transpose(0, 2, 1, 3).astype(queries.dtype)


def _as_they_lie(rows: LayerRows) -> LayerRows:
    """Keys and values apart, or rows that are both of one head; mixing whole rows copies no context."""
    return rows if len(rows) == 2 else (rows[0][:, :, None],) * 2
