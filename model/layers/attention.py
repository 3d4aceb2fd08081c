"""Grouped-query attention: its projections, and rotary embedding."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec.model.layers.basic import Linear, RMSNorm
from jaxspec.model.layers.batch import LayerRows
from jaxspec.model.layers.paged_attention import ContextRows, NewRows, PagedContext, attend, attend_paged
from jaxspec.model.layers.rope import RopeConfig
from jaxspec.sharding.collectives import device_index, sum_over_devices
from jaxspec.sharding.layout import Layout


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


@dataclass(frozen=True)
class AttentionConfig:
    """Sizes of grouped-query attention. Field names are those of transformers.

    Attributes:
      qk_norm_eps: of the norms over queries and keys; None for a model without.
    """

    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    qk_norm_eps: float | None


class Attention(nnx.Module):
    """The projections of grouped-query attention, and which heads this device owns.

    Query heads are split over the mesh where they divide it; K/V heads likewise, otherwise every device computes and
    caches all of them and picks those that its query heads belong to.
    """

    def __init__(self, config: AttentionConfig, layout: Layout, dtype: Any):
        hidden, head_dim = config.hidden_size, config.head_dim
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = head_dim
        self.group = heads // kv_heads
        self.split = layout.splits("heads")
        self.kv_split = layout.splits("kv_heads")
        self.q_proj = Linear(heads * head_dim, hidden, ("heads", None), dtype)
        self.k_proj = Linear(kv_heads * head_dim, hidden, ("kv_heads", None), dtype)
        self.v_proj = Linear(kv_heads * head_dim, hidden, ("kv_heads", None), dtype)
        self.o_proj = Linear(hidden, heads * head_dim, (None, "heads"), dtype)
        self.qk_norm = config.qk_norm_eps is not None
        if config.qk_norm_eps is not None:
            self.q_norm = RMSNorm(head_dim, config.qk_norm_eps, dtype)
            self.k_norm = RMSNorm(head_dim, config.qk_norm_eps, dtype)

    def __call__(
        self,
        x: jax.Array,
        tables: tuple[jax.Array, jax.Array],
        context: PagedContext | ContextRows,
        positions: jax.Array,
        visibility: jax.Array,
    ) -> tuple[jax.Array, LayerRows]:
        """Attends from every row of a pass to the context and to the pass's own rows.

        Args:
          x: [batch, rows, hidden].
          tables: of the rows' positions, from `rotary_tables`.
          positions: int32 [batch, rows].
          visibility: bool [batch or 1, rows, rows].
        Returns:
          [batch, rows, hidden], the same on every device, and the rows' own keys and values.
        """
        rows = self.keys_values(x, tables)
        new = NewRows(rows, positions, visibility)
        scale, expand = self.head_dim**-0.5, None if self.split == self.kv_split else self._own_heads
        if isinstance(context, PagedContext):
            context, x = context.after(x)
            mixed = attend_paged(self.queries(x, tables), context, new, scale, expand)
        else:
            mixed = attend(self.queries(x, tables), context, new, scale, expand)
        return sum_over_devices(self.o_proj(mixed.reshape(*mixed.shape[:2], -1)), self.split), rows

    def queries(self, x: jax.Array, tables: tuple[jax.Array, jax.Array]) -> jax.Array:
        """[batch, rows, hidden] → normed and rotated queries [batch, rows, heads / devices, head_dim]."""
        q = self._heads(self.q_proj(x))
        return rotate(self.q_norm(q) if self.qk_norm else q, tables)

    def keys_values(self, x: jax.Array, tables: tuple[jax.Array, jax.Array]) -> LayerRows:
        """[batch, rows, hidden] → cache rows: normed, rotated keys and values, [batch, rows, kv_heads, head_dim]."""
        k = self._heads(self.k_proj(x))
        return rotate(self.k_norm(k) if self.qk_norm else k, tables), self._heads(self.v_proj(x))

    def _heads(self, x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:2], -1, self.head_dim)

    def _own_heads(self, rows: LayerRows) -> LayerRows:
        """The K/V heads that this device's query heads read, one for each, where every device holds all of them."""
        heads = self.q_proj.weight.shape[0] // self.head_dim
        wanted = (device_index(True) * heads + jnp.arange(heads)) // self.group
        return tuple(jnp.take(array, wanted, axis=2) for array in rows)
