"""The DFlash drafter (arXiv 2602.06036): a block of tokens in one pass, conditioned on the target's tapped features.

Its context is never its own token stream. Features of processed tokens are projected once, every layer turns them
into keys and values, and those are cached in pages beside the target's. A pass runs the block [anchor, mask, mask, …]
over that context; slot k predicts the token k positions after the anchor.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec.model.families.config import DFlashConfig
from jaxspec.model.layers.attention import Attention, AttentionConfig, rotary_tables
from jaxspec.model.layers.basic import GatedMLP, Linear, RMSNorm
from jaxspec.model.layers.batch import LayerRows
from jaxspec.model.layers.cache import PagedCache, RowSpec, key_value_rows
from jaxspec.model.layers.paged_attention import ContextRows, PagedContext
from jaxspec.sharding.collectives import gather_over_devices
from jaxspec.sharding.layout import Layout


class DFlashLayer(nnx.Module):
    """A Qwen3 decoder layer whose context keys and values come from target features."""

    def __init__(self, config: DFlashConfig, layout: Layout, dtype: Any):
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.self_attn = Attention(
            AttentionConfig(
                config.hidden_size,
                config.num_attention_heads,
                config.num_key_value_heads,
                config.head_dim,
                config.rms_norm_eps,
            ),
            layout,
            dtype,
        )
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, layout, dtype)

    def __call__(
        self,
        x: jax.Array,
        tables: tuple[jax.Array, jax.Array],
        context: PagedContext | ContextRows,
        positions: jax.Array,
        visibility: jax.Array,
    ) -> jax.Array:
        """One layer over block rows x [batch, rows, hidden]; see `jaxspec.model.layers.attention.Attention`."""
        attended, _ = self.self_attn(self.input_layernorm(x), tables, context, positions, visibility)
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x))


class DFlashDrafter(nnx.Module):
    """The drafter; embedding and output head are the target's and are not part of it."""

    def __init__(self, config: DFlashConfig, layout: Layout, dtype: Any):
        self.config = config
        self.layout = layout
        taps = len(config.target_layer_ids)
        self.split = layout.splits("features")
        self.fc = Linear(config.hidden_size, taps * config.hidden_size, ("features", None), dtype)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.layers = nnx.List([DFlashLayer(config, layout, dtype) for _ in range(config.num_hidden_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)

    @property
    def cache_rows(self) -> tuple[tuple[RowSpec, ...], ...]:
        """What the cache holds for one token, layer by layer."""
        config = self.config
        return key_value_rows(config.num_hidden_layers, config.num_key_value_heads, config.head_dim)

    def features(self, tapped: jax.Array) -> jax.Array:
        """Tapped features [batch, rows, taps * hidden] → context features [batch, rows, hidden]."""
        projected = self.fc(tapped.astype(self.fc.weight.dtype))
        return self.hidden_norm(gather_over_devices(projected, projected.ndim - 1, self.split))

    def context_keys_values(self, tapped: jax.Array, positions: jax.Array) -> tuple[LayerRows, ...]:
        """The cache rows of processed tokens, for every layer.

        Args:
          tapped: [batch, rows, taps * hidden], the target's features of those tokens.
          positions: int32 [batch, rows], their absolute positions.
        """
        features = self.features(tapped)
        tables = self._tables(positions)
        return tuple(layer.self_attn.keys_values(features, tables) for layer in self.layers)

    def block_tokens(self, anchor: jax.Array, length: int) -> jax.Array:
        """int32 [batch] → the drafter's input [batch, 1 + length]: the anchor, then mask tokens."""
        masks = jnp.full((anchor.shape[0], length), self.config.mask_token_id, jnp.int32)
        return jnp.concatenate([anchor[:, None], masks], axis=1)

    def visible_rows(self, layer: int, block: int) -> jax.Array:
        """bool [block, block]: which block rows a block row sees in `layer` (a window exceeds any block)."""
        full = jnp.ones((block, block), bool)
        return jnp.tril(full) if self.config.causal[layer] else full

    def hidden(self, embedded: jax.Array, start: jax.Array, cache: PagedCache, page_table: jax.Array) -> jax.Array:
        """One pass over a block.

        Args:
          embedded: [batch, block, hidden], the target's embedding of `block_tokens`; at most `block_size` rows.
          start: int32 [batch], the anchor's position; the context is every position before it.
          cache: the drafter's own pools.
          page_table: int32 [batch, pages].
        Returns:
          [batch, block - 1, hidden] after the final norm, for the drafted slots.
        """
        windows = self.config.windows
        contexts = [
            PagedContext(pools, page_table, start, window) for pools, window in zip(cache, windows, strict=True)
        ]
        return self._over(embedded, start, contexts)

    def hidden_after(self, embedded: jax.Array, start: jax.Array, context: tuple[LayerRows, ...]) -> jax.Array:
        """`hidden` with the context at hand: for each layer the rows of positions 0, 1, …, [batch, rows, ...]."""
        places = jnp.arange(context[0][0].shape[1])
        windows = self.config.windows
        contexts = [ContextRows(rows, places, start, window) for rows, window in zip(context, windows, strict=True)]
        return self._over(embedded, start, contexts)

    def _over(self, embedded: jax.Array, start: jax.Array, contexts: Sequence[PagedContext | ContextRows]) -> jax.Array:
        """The pass of `hidden`, given each layer's context."""
        block = embedded.shape[1]
        x = embedded.astype(self.fc.weight.dtype) * self.config.input_embedding_scale
        positions = start[:, None] + jnp.arange(block)
        tables = self._tables(positions)
        for index, (layer, context) in enumerate(zip(self.layers, contexts, strict=True)):
            x = layer(x, tables, context, positions, self.visible_rows(index, block)[None])
        return self.norm(x)[:, 1:]

    def scaled(self, logits: jax.Array) -> jax.Array:
        """The published output multiplier and soft cap, on float32 logits."""
        logits = logits * self.config.output_multiplier
        cap = self.config.final_logit_softcapping
        return cap * jnp.tanh(logits / cap) if cap > 0 else logits

    def _tables(self, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        return rotary_tables(positions, self.config.rope, self.config.head_dim)


def layout_of(config: DFlashConfig, devices: int) -> Layout:
    """What the mesh may split; the vocabulary belongs to the target."""
    return Layout(
        devices,
        (
            ("heads", config.num_attention_heads),
            ("kv_heads", config.num_key_value_heads),
            ("mlp", config.intermediate_size),
            ("features", config.hidden_size),
        ),
    )
