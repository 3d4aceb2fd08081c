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

from jaxspec.model.layers.attention import rotate
from jaxspec.model.layers.basic import Linear, RMSNorm, product
from jaxspec.model.layers.batch import LayerRows
from jaxspec.model.layers.paged_attention import NewRows, PagedContext, attend_paged
from jaxspec.sharding.collectives import sum_over_devices
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
        """How many values the cache holds for one token and layer."""
        return self.kv_lora_rank + self.qk_rope_head_dim


class LatentAttention(nnx.Module):
    """Latent attention's projections; heads are split over the mesh, both latents computed on every device.

    The context's rows lie whole on every device, or are spread over all of them (`PagedContext.shares`).
    """

    def __init__(self, config: LatentAttentionConfig, layout: Layout, dtype: Any):
        self.config = config
        self.split = layout.splits("heads")
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

    def __call__(
        self,
        x: jax.Array,
        tables: tuple[jax.Array, jax.Array],
        context: PagedContext,
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
          [batch, rows, hidden], the same on every device, and the rows' own cache rows.
        """
        rows = (self.latent_rows(x, tables),)
        context, x = context.after(x)
        form = self.absorbed if self.absorbs(x.shape[1]) else self.naive
        mixed = form(self.queries(x, tables), context, NewRows(rows, positions, visibility))
        return sum_over_devices(self.o_proj(mixed.reshape(*mixed.shape[:2], -1)), self.split), rows

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

    def naive(self, queries: jax.Array, context: PagedContext, new: NewRows) -> jax.Array:
        """[batch, rows, heads / devices, value] by expanding every latent row."""
        return attend_paged(queries, context, new, self.scale, self._expand)

    def absorbed(self, queries: jax.Array, context: PagedContext, new: NewRows) -> jax.Array:
        """[batch, rows, heads / devices, value]: one key/value head, the cache row, that all query heads share."""
        to_keys, to_values = self._expansion()
        plain, rotated = jnp.split(queries, [self.config.qk_nope_head_dim], axis=-1)
        queries = jnp.concatenate([product("hnk,brhn->brhk", to_keys, plain), rotated], axis=-1)
        # Values are the rows' latents, the first part of what is mixed.
        mixed = attend_paged(queries, context, new, self.scale, heads_split=self.split)
        return product("brhk,hvk->brhv", mixed[..., : self.config.kv_lora_rank], to_values)

    def _expansion(self) -> tuple[jax.Array, jax.Array]:
        """`kv_b_proj` by head: [heads, nope, rank] gives keys, [heads, value, rank] values."""
        config = self.config
        weight = self.kv_b_proj.weight[...].reshape(
            -1, config.qk_nope_head_dim + config.v_head_dim, config.kv_lora_rank
        )
        return weight[:, : config.qk_nope_head_dim], weight[:, config.qk_nope_head_dim :]

    def _expand(self, rows: LayerRows) -> LayerRows:
        """Cache rows [batch, rows, rank + rope] → keys [batch, rows, heads, nope + rope] and values [..., value]."""
        config = self.config
        latent, key = jnp.split(rows[0], [config.kv_lora_rank], axis=-1)
        expanded = self.kv_b_proj(latent).reshape(*latent.shape[:2], -1, config.qk_nope_head_dim + config.v_head_dim)
        plain, values = jnp.split(expanded, [config.qk_nope_head_dim], axis=-1)
        rotated = jnp.broadcast_to(key[:, :, None], (*plain.shape[:3], config.qk_rope_head_dim))
        return jnp.concatenate([plain, rotated], axis=-1), values

    def _rotate(self, x: jax.Array, tables: tuple[jax.Array, jax.Array]) -> jax.Array:
        """Rotates [batch, rows, heads, rope]; the result's halves hold the pairs' first and second values."""
        if self.config.rope_interleave:
            x = jnp.concatenate([x[..., 0::2], x[..., 1::2]], axis=-1)
        return rotate(x, tables)
