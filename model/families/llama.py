"""The Llama family: Llama 3.x, SmolLM2, and (with q/k norms) Qwen3's dense models."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec.model.families.config import ModelConfig
from jaxspec.model.layers.attention import Attention, AttentionConfig, rotary_tables
from jaxspec.model.layers.basic import Embedding, GatedMLP, RMSNorm
from jaxspec.model.layers.batch import ForwardBatch, ForwardOutput, LayerRows
from jaxspec.model.layers.cache import PagedCache, RowSpec, key_value_rows
from jaxspec.model.layers.paged_attention import PagedContext
from jaxspec.sharding.layout import DEFAULT_PLACEMENT, Layout, Placement
from jaxspec.sharding.vocab_shard import VocabShard


class DecoderLayer(nnx.Module):
    """Pre-norm attention and MLP around a residual stream."""

    def __init__(self, config: ModelConfig, layout: Layout, dtype: Any):
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.self_attn = Attention(attention_config(config), layout, dtype)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, layout, dtype)

    def __call__(
        self,
        x: jax.Array,
        tables: tuple[jax.Array, jax.Array],
        context: PagedContext,
        batch: ForwardBatch,
    ) -> tuple[jax.Array, LayerRows]:
        """x [batch, rows, hidden] → the new residual stream and this layer's new cache rows."""
        attended, rows = self.self_attn(self.input_layernorm(x), tables, context, batch.positions, batch.visibility)
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x)), rows


class LlamaForCausalLM(nnx.Module):
    """A Llama or Qwen3 target.

    Args:
      config: the checkpoint's own numbers.
      layout: which axes the mesh splits.
      dtype: of the weights and activations.
    """

    def __init__(self, config: ModelConfig, layout: Layout, dtype: Any):
        self.config = config
        self.layout = layout
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, layout, dtype)
        self.layers = nnx.List([DecoderLayer(config, layout, dtype) for _ in range(config.num_hidden_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        if not config.tie_word_embeddings:
            self.lm_head = Embedding(config.vocab_size, config.hidden_size, layout, dtype)

    @property
    def vocab(self) -> VocabShard:
        """The part of the vocabulary whose logits a device holds."""
        return VocabShard(self.config.vocab_size, self.layout.splits("vocab"))

    @property
    def cache_rows(self) -> tuple[tuple[RowSpec, ...], ...]:
        """What the cache holds for one token, layer by layer."""
        config = self.config
        return key_value_rows(config.num_hidden_layers, config.num_key_value_heads, config.head_dim)

    def __call__(self, batch: ForwardBatch, cache: PagedCache, taps: tuple[int, ...]) -> ForwardOutput:
        """Runs every row of `batch`; `taps` are the 0-based layers whose outputs are returned."""
        batch.check()
        x = self.embed_tokens(batch.tokens)
        tables = rotary_tables(batch.positions, self.config.rope, self.config.head_dim)
        rows, outputs = [], []
        for layer, pools in zip(self.layers, cache, strict=True):
            x, new = layer(x, tables, PagedContext(pools, batch.page_table, batch.context_length), batch)
            rows.append(new)
            outputs.append(x)
        tapped = jnp.concatenate([outputs[i] for i in taps], axis=-1) if taps else x[..., :0]
        experts = jnp.zeros((0, *batch.tokens.shape, 0), jnp.int32)
        return ForwardOutput(hidden=self.norm(x), tapped=tapped, rows=tuple(rows), experts=experts)

    def embed(self, tokens: jax.Array) -> jax.Array:
        """int32 [...] → [..., hidden]; the drafter's input rows come from here too."""
        return self.embed_tokens(tokens)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """[..., hidden] after a final norm → float32 logits [..., vocab / devices] of this device's vocabulary rows."""
        return (self.embed_tokens if self.config.tie_word_embeddings else self.lm_head).logits(hidden)


def attention_config(config: ModelConfig) -> AttentionConfig:
    """What its attention needs to know of a model."""
    return AttentionConfig(
        config.hidden_size,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
        config.rms_norm_eps if config.qk_norm else None,
    )


def layout_of(config: ModelConfig, devices: int, placement: Placement = DEFAULT_PLACEMENT) -> Layout:
    """What the mesh may split, counted in heads, MLP units and vocabulary rows.

    Raises:
      ValueError: naming the setting, if `placement` asks for what this family does not have.
    """
    if placement.experts != DEFAULT_PLACEMENT.experts:
        raise ValueError(
            f"EngineConfig.expert_layout: found {placement.experts!r}, but a {config.family} target has no experts"
        )
    if placement.page_rows:
        raise ValueError(
            f"EngineConfig.shard_cache: found 'sequence', but a {config.family} target's cache is split by K/V heads"
        )
    return Layout(
        devices,
        (
            ("heads", config.num_attention_heads),
            ("kv_heads", config.num_key_value_heads),
            ("mlp", config.intermediate_size),
            ("vocab", config.vocab_size),
        ),
    )


def tensor_names(name: str) -> str:
    """The Hugging Face name of the weight called `name` here (module path)."""
    return name if name.startswith("lm_head.") else f"model.{name}"
