"""The DeepSeek-V3 family: Kimi K2, K2-Thinking, K2.5, K2.6 and K2.7-Code, DeepSeek-V3 and R1 (without their MTP)."""

import re
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec.model.families.kimi_config import WRAPPER, KimiConfig
from jaxspec.model.layers.attention import rotary_tables
from jaxspec.model.layers.basic import Embedding, GatedMLP, RMSNorm
from jaxspec.model.layers.batch import ForwardBatch, ForwardOutput, LayerRows
from jaxspec.model.layers.cache import PagedCache, RowSpec
from jaxspec.model.layers.experts import ExpertsConfig
from jaxspec.model.layers.mla import LatentAttention, LatentAttentionConfig
from jaxspec.model.layers.moe import MixtureOfExperts, RouterConfig
from jaxspec.model.layers.paged_attention import PagedContext
from jaxspec.sharding.layout import DEFAULT_PLACEMENT, Layout, Placement
from jaxspec.sharding.vocab_shard import VocabShard

# Tensors of the wrapper's vision tower, which a text model has no use for.
VISION_PREFIXES = ("vision_tower.", "mm_projector.")
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


class DecoderLayer(nnx.Module):
    """Pre-norm latent attention, then a dense MLP or a mixture of experts, around a residual stream."""

    def __init__(self, config: KimiConfig, layer: int, layout: Layout, dtype: Any):
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.self_attn = LatentAttention(attention_config(config), layout, dtype)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.mlp = (
            GatedMLP(config.hidden_size, config.intermediate_size, layout, dtype)
            if layer < config.first_k_dense_replace
            else MixtureOfExperts(router_config(config), experts_config(config), shared_units(config), layout, dtype)
        )

    def __call__(
        self,
        x: jax.Array,
        tables: tuple[jax.Array, jax.Array],
        context: PagedContext,
        batch: ForwardBatch,
    ) -> tuple[jax.Array, LayerRows, jax.Array | None]:
        """x [batch, rows, hidden] → the new residual stream, this layer's new cache rows, and its chosen experts."""
        attended, rows = self.self_attn(self.input_layernorm(x), tables, context, batch.positions, batch.visibility)
        x = x + attended
        normed = self.post_attention_layernorm(x)
        if isinstance(self.mlp, GatedMLP):
            return x + self.mlp(normed), rows, None
        mixed, chosen = self.mlp(normed)
        return x + mixed, rows, chosen


class KimiForCausalLM(nnx.Module):
    """A Kimi or DeepSeek-V3 target.

    Args:
      config: the checkpoint's own numbers.
      layout: which axes the mesh splits.
      dtype: of activations and of the weights that are not quantised.
    """

    def __init__(self, config: KimiConfig, layout: Layout, dtype: Any):
        self.config = config
        self.layout = layout
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, layout, dtype)
        self.layers = nnx.List([DecoderLayer(config, i, layout, dtype) for i in range(config.num_hidden_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        if not config.tie_word_embeddings:
            self.lm_head = Embedding(config.vocab_size, config.hidden_size, layout, dtype)

    @property
    def vocab(self) -> VocabShard:
        """The part of the vocabulary whose logits a device holds."""
        return VocabShard(self.config.vocab_size, self.layout.splits("vocab"))

    @property
    def cache_rows(self) -> tuple[tuple[RowSpec, ...], ...]:
        """What the cache holds for one token, layer by layer: its latent and its rotated key."""
        row = RowSpec((attention_config(self.config).latent_row,), (None,))
        return ((row,),) * self.config.num_hidden_layers

    def __call__(self, batch: ForwardBatch, cache: PagedCache, taps: tuple[int, ...]) -> ForwardOutput:
        """Runs every row of `batch`; `taps` are the 0-based layers whose outputs are returned."""
        batch.check()
        x = self.embed_tokens(batch.tokens)
        tables = rotary_tables(batch.positions, self.config.rope, self.config.qk_rope_head_dim)
        shares = self.layout.shares("page_rows")
        rows, outputs, chosen = [], [], []
        for layer, pools in zip(self.layers, cache, strict=True):
            context = PagedContext(pools, batch.page_table, batch.context_length, shares=shares)
            x, new, picks = layer(x, tables, context, batch)
            rows.append(new)
            chosen += [] if picks is None else [picks]
            outputs.append(x)
        tapped = jnp.concatenate([outputs[i] for i in taps], axis=-1) if taps else x[..., :0]
        experts = jnp.stack(chosen) if chosen else jnp.zeros((0, *batch.tokens.shape, 0), jnp.int32)
        return ForwardOutput(hidden=self.norm(x), tapped=tapped, rows=tuple(rows), experts=experts)

    def embed(self, tokens: jax.Array) -> jax.Array:
        """int32 [...] → [..., hidden]; the drafter's input rows come from here too."""
        return self.embed_tokens(tokens)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """[..., hidden] after a final norm → float32 logits [..., vocab / devices] of this device's vocabulary rows."""
        return (self.embed_tokens if self.config.tie_word_embeddings else self.lm_head).logits(hidden)


def attention_config(config: KimiConfig) -> LatentAttentionConfig:
    """What its attention needs to know of a model."""
    return LatentAttentionConfig(
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        q_lora_rank=config.q_lora_rank,
        kv_lora_rank=config.kv_lora_rank,
        qk_nope_head_dim=config.qk_nope_head_dim,
        qk_rope_head_dim=config.qk_rope_head_dim,
        v_head_dim=config.v_head_dim,
        latent_norm_eps=config.latent_norm_eps,
        rope_interleave=config.rope_interleave,
        score_factor=config.rope.score_factor,
    )


def router_config(config: KimiConfig) -> RouterConfig:
    """What its routers need to know of a model."""
    return RouterConfig(
        n_routed_experts=config.n_routed_experts,
        hidden_size=config.hidden_size,
        num_experts_per_tok=config.num_experts_per_tok,
        n_group=config.n_group,
        topk_group=config.topk_group,
        norm_topk_prob=config.norm_topk_prob,
        routed_scaling_factor=config.routed_scaling_factor,
    )


def experts_config(config: KimiConfig) -> ExpertsConfig:
    """What its routed experts need to know of a model."""
    return ExpertsConfig(
        config.n_routed_experts, config.hidden_size, config.moe_intermediate_size, config.quantization.scheme
    )


def shared_units(config: KimiConfig) -> int:
    """Inner units of the shared expert."""
    return config.n_shared_experts * config.moe_intermediate_size


def layout_of(config: KimiConfig, devices: int, placement: Placement = DEFAULT_PLACEMENT) -> Layout:
    """What the mesh may split, counted in heads, MLP units, experts or their scale groups, and vocabulary rows.

    Raises:
      ValueError: naming the setting, where the mesh does not divide the experts, or a page's rows that it is to split.
    """
    if placement.experts == "tensor":
        experts = ("expert_mlp", config.expert_units)
    else:
        experts = ("experts", config.n_routed_experts)
    if experts[1] % devices:
        raise ValueError(
            f"EngineConfig.expert_layout: found {placement.experts!r}, whose {experts[1]} parts of the experts "
            f"{devices} devices do not divide, expected a number of devices that divides them; change devices or "
            "expert_layout"
        )
    if placement.page_rows % devices:
        raise ValueError(
            f"EngineConfig.page_size: found {placement.page_rows}, expected a multiple of {devices} devices, which "
            "split the rows of every page"
        )
    return Layout(
        devices,
        (
            ("heads", config.num_attention_heads),
            ("mlp", config.intermediate_size),
            ("shared_mlp", shared_units(config)),
            experts,
            ("vocab", config.vocab_size),
            *([("page_rows", placement.page_rows)] if placement.page_rows else []),
        ),
    )


def tensor_names(name: str) -> tuple[str, ...]:
    """The published names of the weight called `name` here (module path): without the wrapper, and within it.

    Experts are stacked here and published one by one: "{}" stands for the expert's number.
    """
    published = name if name.startswith("lm_head.") else f"model.{name}"
    published = published.replace(".mlp.experts.", ".mlp.experts.{}.")
    return published, WRAPPER + published


def left_out(config: KimiConfig, published: str) -> str | None:
    """Why the tensor that a checkpoint calls `published` is not one of the model's; None if nothing says so."""
    if published.startswith(VISION_PREFIXES):
        return "only text is read, no images"
    layer = _LAYER.match(published.removeprefix(WRAPPER))
    if layer and 0 <= int(layer[1]) - config.num_hidden_layers < config.num_nextn_predict_layers:
        return "layers for multi-token prediction are not used"
    return None
