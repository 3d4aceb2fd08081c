"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): the cache holds one latent row for all heads.

A row is [latent | rotated key]. Its two readings give equal results:

- naive: the latents are expanded to every head's keys and values, then attended as usual;
- absorbed: the expansion is moved to the other side of each product, so that queries meet the rows as they lie.

For one head, query row and cached token the naive form takes nope + rope + value products and the absorbed one
2 · (rank + rope); but the naive form first expands each token, rank · (nope + value) products a head, whatever the
number of rows. So few rows (decoding, trees) are absorbed and many (prefill) expand: with Kimi's numbers, from 158 on.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec.model.layers.attention import attend, rotate
from jaxspec.model.layers.basic import Linear, RMSNorm, product
from jaxspec.sharding.collectives import (
    device_index,
    gather_over_devices,
    max_over_devices,
    sum_over_devices,
    sum_to_owners,
)
from jaxspec.sharding.layout import Layout


@dataclass(frozen=True)
class LatentAttentionConfig:
    """Sizes of latent attention. Field names are those of transformers.

    Attributes:
      q_lora_rank: rank of the queries' latent; None where queries are projected in one step.
      latent_norm_eps: of the norms over the two latents.
      rope_interleave: whether rotated pairs are neighbours (2i, 2i + 1) in the weights, rather than halves apart.
      score_factor: multiplies the scores, beside the root of their width.
    """

    hidden_size: int
    num_attention_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    latent_norm_eps: float
    rope_interleave: bool
    score_factor: float

    @property
    def latent_row(self) -> int:
        """Values that the cache holds for one token and layer."""
        return self.kv_lora_rank + self.qk_rope_head_dim


class LatentAttention(nnx.Module):
    """Latent attention's projections; heads are split over the mesh, both latents computed on every device.

    The context's rows lie whole on every device, or are spread over all of them (`layout` splits "page_rows").
    """

    def __init__(self, config: LatentAttentionConfig, layout: Layout, dtype: Any):
        self.config = config
        self.split = layout.splits("heads")
        self.spread = layout.splits("page_rows")
        hidden, heads, rank = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
        query_width = heads * (config.qk_nope_head_dim + config.qk_rope_head_dim)
        if config.q_lora_rank is None:
            self.q_proj = Linear(query_width, hidden, ("heads", None), dtype)
        else:
            self.q_a_proj = Linear(config.q_lora_rank, hidden, (None, None), dtype)
            self.q_a_layernorm = RMSNorm(config.q_lora_rank, config.latent_norm_eps, dtype)
            self.q_b_proj = Linear(query_width, config.q_lora_rank, ("heads", None), dtype)
        self.kv_a_proj_with_mqa = Linear(config.latent_row, hidden, (None, None), dtype)
        self.kv_a_layernorm = RMSNorm(rank, config.latent_norm_eps, dtype)
        self.kv_b_proj = Linear(heads * (config.qk_nope_head_dim + config.v_head_dim), rank, ("heads", None), dtype)
        self.o_proj = Linear(hidden, heads * config.v_head_dim, (None, "heads"), dtype)

    @property
    def scale(self) -> float:
        """What multiplies the scores."""
        config = self.config
        return (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5 * config.score_factor

    def queries(self, x: jax.Array, tables: tuple[jax.Array, jax.Array]) -> jax.Array:
        """[batch, rows, hidden] → [batch, rows, heads / devices, nope + rope], the second part rotated."""
        config = self.config
        direct = config.q_lora_rank is None
        flat = self.q_proj(x) if direct else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q = flat.reshape(*x.shape[:2], -1, config.qk_nope_head_dim + config.qk_rope_head_dim)
        plain, rotated = jnp.split(q, [config.qk_nope_head_dim], axis=-1)
        return jnp.concatenate([plain, self._rotate(rotated, tables)], axis=-1)

    def latent_rows(self, x: jax.Array, tables: tuple[jax.Array, jax.Array]) -> jax.Array:
        """[batch, rows, hidden] → cache rows [batch, rows, rank + rope]: the latent after its norm, the rotated key."""
        latent, key = jnp.split(self.kv_a_proj_with_mqa(x), [self.config.kv_lora_rank], axis=-1)
        key = self._rotate(key[:, :, None], tables)[:, :, 0]
        return jnp.concatenate([self.kv_a_layernorm(latent), key], axis=-1)

    def absorbs(self, rows: int) -> bool:
        """Whether so many query rows are cheaper in the absorbed form; see the top of this file."""
        config = self.config
        inner = config.qk_nope_head_dim + config.v_head_dim
        more_a_row = 2 * config.kv_lora_rank + config.qk_rope_head_dim - inner
        return rows * more_a_row < config.kv_lora_rank * inner

    def attend(
        self,
        queries: jax.Array,
        context: jax.Array,
        context_mask: jax.Array,
        rows: jax.Array,
        visibility: jax.Array,
    ) -> jax.Array:
        """Attention and its output projection.

        Args:
          queries: [batch, rows, heads / devices, nope + rope].
          context: cache rows [batch, context, rank + rope] that this device holds.
          context_mask: bool [batch, rows or 1, context].
          rows: this pass's own cache rows.
          visibility: bool [batch or 1, rows, rows].
        Returns:
          [batch, rows, hidden], the same on every device.
        """
        form = self.absorbed if self.absorbs(queries.shape[1]) else self.naive
        mixed = form(queries, context, context_mask, rows, visibility)  # [batch, rows, heads / devices, value]
        return sum_over_devices(self.o_proj(mixed.reshape(*mixed.shape[:2], -1)), self.split)

    def naive(
        self, queries: jax.Array, context: jax.Array, context_mask: jax.Array, rows: jax.Array, visibility: jax.Array
    ) -> jax.Array:
        """[batch, rows, heads / devices, value] by expanding every latent row; a spread context is gathered first."""
        context = gather_over_devices(context, 1, self.spread)
        context_mask = gather_over_devices(context_mask, 2, self.spread)
        return attend(queries, self._expand(context), context_mask, self._expand(rows), visibility, self.scale)

    def absorbed(
        self, queries: jax.Array, context: jax.Array, context_mask: jax.Array, rows: jax.Array, visibility: jax.Array
    ) -> jax.Array:
        """[batch, rows, heads / devices, value]: one key/value head, the cache row, that all query heads share."""
        to_keys, to_values = self._expansion()
        plain, rotated = jnp.split(queries, [self.config.qk_nope_head_dim], axis=-1)
        queries = jnp.concatenate([product("hnk,brhn->brhk", to_keys, plain), rotated], axis=-1)
        if self.spread:
            mixed = attend_spread(queries, context, context_mask, rows, visibility, self.scale, self.split)
        else:
            # Values are the rows' latents. Mixing whole rows and dropping the rest of the sum copies no context.
            shared = tuple((array[:, :, None],) * 2 for array in (context, rows))
            mixed = attend(queries, shared[0], context_mask, shared[1], visibility, self.scale)
        return product("brhk,hvk->brhv", mixed[..., : self.config.kv_lora_rank], to_values)

    def _expansion(self) -> tuple[jax.Array, jax.Array]:
        """`kv_b_proj` by head: [heads, nope, rank] gives keys, [heads, value, rank] values."""
        config = self.config
        weight = self.kv_b_proj.weight[...].reshape(
            -1, config.qk_nope_head_dim + config.v_head_dim, config.kv_lora_rank
        )
        return weight[:, : config.qk_nope_head_dim], weight[:, config.qk_nope_head_dim :]

    def _expand(self, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Cache rows [batch, rows, rank + rope] → keys [batch, rows, heads, nope + rope] and values [..., value]."""
        config = self.config
        latent, key = jnp.split(rows, [config.kv_lora_rank], axis=-1)
        expanded = self.kv_b_proj(latent).reshape(*rows.shape[:2], -1, config.qk_nope_head_dim + config.v_head_dim)
        plain, values = jnp.split(expanded, [config.qk_nope_head_dim], axis=-1)
        rotated = jnp.broadcast_to(key[:, :, None], (*plain.shape[:3], config.qk_rope_head_dim))
        return jnp.concatenate([plain, rotated], axis=-1), values

    def _rotate(self, x: jax.Array, tables: tuple[jax.Array, jax.Array]) -> jax.Array:
        """Rotates [batch, rows, heads, rope]; the result's halves hold the pairs' first and second values."""
        if self.config.rope_interleave:
            x = jnp.concatenate([x[..., 0::2], x[..., 1::2]], axis=-1)
        return rotate(x, tables)


def attend_spread(
    queries: jax.Array,
    context: jax.Array,
    context_mask: jax.Array,
    rows: jax.Array,
    visibility: jax.Array,
    scale: float,
    split: bool,
) -> jax.Array:
    """Absorbed attention over a context whose rows are spread over the devices.

    Each device scores the queries of all heads against its own rows. Sums go back to the heads' owners, who then add
    the new rows, so that those are counted once.

    Args:
      queries: [batch, rows, heads / devices, width]; keys and values are the rows themselves, [batch, …, width].
      split: whether heads are split over the devices.
    Returns:
      [batch, rows, heads / devices, width]; softmax in float32.
    """
    everyone = gather_over_devices(queries, 2, split)

    def scores(queries: jax.Array, keys: jax.Array, mask: jax.Array) -> jax.Array:  # [batch, heads, rows, keys]
        raw = product("brhd,bcd->bhrc", queries, keys, jnp.float32) * scale
        return jnp.where(mask[:, None], raw, -jnp.inf)

    def mixed(weights: jax.Array, values: jax.Array) -> jax.Array:  # [batch, heads, rows, width]
        return product("bhrc,bcd->bhrd", weights.astype(values.dtype), values, jnp.float32)

    old = scores(everyone, context, context_mask)
    # Finite where there is no context at all; whatever it is, the result does not depend on it.
    peak = max_over_devices(jnp.maximum(old.max(-1), jnp.finfo(jnp.float32).min), True)  # [batch, heads, rows]
    old = jnp.exp(old - peak[..., None])
    total = sum_to_owners(old.sum(-1), 1, split)
    result = sum_to_owners(mixed(old, context), 1, split)

    own = queries.shape[2]
    peak = jax.lax.dynamic_slice_in_dim(peak, device_index(split) * own, own, axis=1)
    new = scores(queries, rows, visibility)
    highest = jnp.maximum(peak, new.max(-1))
    new, shrink = jnp.exp(new - highest[..., None]), jnp.exp(peak - highest)
    result = (result * shrink[..., None] + mixed(new, rows)) / (total * shrink + new.sum(-1))[..., None]
    return result.transpose(0, 2, 1, 3).astype(queries.dtype)
