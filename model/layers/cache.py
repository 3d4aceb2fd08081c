"""The paged cache: pools of pages, read through a page table, written only by a commit.

A cache is a tuple with one entry a layer, each a tuple of pools `[pages, page_size, ...]` (keys and values for ordinary
attention). Target and drafter have pools of their own and share the page table, so position p of a sequence lives in
page `page_table[p // page_size]` of every pool. An entry that holds no page is `pages`, one past the last: reads there
are clipped and masked by length, writes are dropped.

A model may split the rows of each page over the mesh ("page_rows" of its layout): device d then holds the d-th part of
every page, so that a context is spread evenly whatever its length.

On CPUs bfloat16 pools are kept as their bits, uint16: the compiler has no bfloat16 scatter there, and would turn the
whole pool into float32 and back for every commit.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.model.layers.batch import LayerRows
from jaxspec.sharding.collectives import device_index
from jaxspec.sharding.layout import Layout

PagedCache = tuple[tuple[jax.Array, ...], ...]
BITS = jnp.uint16  # The dtype of a pool of bfloat16 values that is kept as bits.


@dataclass(frozen=True)
class RowSpec:
    """What one pool holds for one token: shape and the logical name of each dimension."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]


def pool_spec(row: RowSpec, layout: Layout) -> jax.sharding.PartitionSpec:
    """How a pool `[pages, page_size, *row]` is split over the mesh."""
    return layout.spec((None, "page_rows", *row.axes))


def key_value_rows(layers: int, kv_heads: int, head_dim: int) -> tuple[tuple[RowSpec, ...], ...]:
    """The cache of ordinary attention: a key and a value of every K/V head, in every layer."""
    row = RowSpec((kv_heads, head_dim), ("kv_heads", None))
    return ((row, row),) * layers


def pool_dtype(dtype: Any, mesh: jax.sharding.Mesh) -> Any:
    """What a pool of values of `dtype` is kept as."""
    return BITS if dtype == jnp.bfloat16 and mesh.devices.flat[0].platform == "cpu" else dtype


def empty_cache(
    specs: tuple[tuple[RowSpec, ...], ...],
    pages: int,
    page_size: int,
    layout: Layout,
    mesh: jax.sharding.Mesh,
    dtype: Any,
) -> PagedCache:
    """Pools of zeros, `[pages, page_size, *row]`, split over the mesh as the layout says."""
    kept = pool_dtype(dtype, mesh)

    def pool(spec: RowSpec) -> jax.Array:
        sharding = jax.sharding.NamedSharding(mesh, pool_spec(spec, layout))
        return jnp.zeros((pages, page_size, *spec.shape), kept, device=sharding)

    return jax.tree.map(pool, specs, is_leaf=lambda node: isinstance(node, RowSpec))


def context_rows(pool: jax.Array, page_table: jax.Array) -> jax.Array:
    """Gathers each sequence's context in order of position.

    Args:
      pool: [pages, page_size, ...].
      page_table: int32 [batch, width].
    Returns:
      [batch, width * page_size, ...]; rows at or past the context's length are whatever the pages held.
    """
    rows = pool.at[page_table].get(mode="clip")
    if rows.dtype == BITS:
        rows = jax.lax.bitcast_convert_type(rows, jnp.bfloat16)
    return rows.reshape(rows.shape[0], rows.shape[1] * rows.shape[2], *rows.shape[3:])


def context_positions(pool: jax.Array, width: int, shares: int = 1) -> jax.Array:
    """int32 [width * page_size]: the position of each row that `context_rows` gives of a table of `width` pages.

    Args:
      shares: devices that the rows of a page are split over.
    """
    local = pool.shape[1]
    rows = jnp.arange(width * local, dtype=jnp.int32)
    if shares == 1:
        return rows
    return rows // local * (local * shares) + device_index(shares > 1) * local + rows % local


def write_rows(
    cache: PagedCache,
    rows: tuple[LayerRows, ...],
    page_table: jax.Array,
    positions: jax.Array,
    keep: jax.Array,
    shares: int = 1,
) -> PagedCache:
    """Writes the kept rows at their positions, in place where the cache is donated.

    Args:
      rows: for each layer, arrays [batch, rows, ...].
      page_table: int32 [batch, width].
      positions: int32 [batch, rows].
      keep: bool [batch, rows]; the other rows leave no trace.
      shares: devices that the rows of a page are split over; each writes its own.
    """
    if not cache:
        return cache
    pages, local = cache[0][0].shape[:2]
    page_size = local * shares
    page = jnp.take_along_axis(page_table, positions // page_size, axis=1, mode="fill", fill_value=pages)
    row = positions % page_size - device_index(shares > 1) * local
    here = keep & (row >= 0) & (row < local)
    slots = jnp.where(here, page * local + row, pages * local).reshape(-1)

    def write(pool: jax.Array, new: jax.Array) -> jax.Array:
        flat = pool.reshape(pages * local, *pool.shape[2:])
        new = new.reshape(-1, *new.shape[2:])
        if pool.dtype == BITS:
            new = jax.lax.bitcast_convert_type(new.astype(jnp.bfloat16), BITS)
        else:
            new = new.astype(pool.dtype)
        return flat.at[slots].set(new, mode="drop").reshape(pool.shape)

    return jax.tree.map(write, cache, rows)
