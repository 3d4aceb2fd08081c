"""The DeepSeek-V3 architecture's numbers: Kimi K2, K2-Thinking, K2.5, K2.6, K2.7-Code, and DeepSeek-V3 and R1.

The text model's config is the file itself or, in the wrapper with a vision tower, its `text_config`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxspec.model.families.config import MAX_HEADS, MAX_LAYERS, MAX_SIZE, read_dtype, read_ends
from jaxspec.model.families.rope_config import MAX_POSITIONS, read_rope
from jaxspec.model.fields import Fields
from jaxspec.model.layers.rope import RopeConfig
from jaxspec.model.quantization.config import NOT_QUANTISED, QuantizationConfig, read_quantization
from jaxspec.model.quantization.scheme import UNQUANTISED
from jaxspec.sharding.arithmetic import cdiv

KIMI_ARCHITECTURES = ("DeepseekV3ForCausalLM", "KimiK25ForConditionalGeneration", "Kimi_K25ForConditionalGeneration")
MODEL_TYPES = ("kimi_k2", "kimi_k25", "deepseek_v3")
MAX_EXPERTS = 2**14
WRAPPER = "language_model."  # What the wrapper with a vision tower puts before the text model's names.


@dataclass(frozen=True)
class KimiConfig:
    """A target with multi-head latent attention and routed experts. Field names are those of transformers.

    Attributes:
      q_lora_rank: rank of the queries' latent; None where queries are projected in one step.
      moe_intermediate_size: inner units of one expert.
      first_k_dense_replace: layers, from the first, that have a dense MLP of `intermediate_size` instead of experts.
      n_group, topk_group: experts are chosen within the best `topk_group` of `n_group` groups.
      latent_norm_eps: of the norms over the two latents; transformers keeps 1e-6 whatever `rms_norm_eps` is.
      rope_interleave: whether rotated pairs are neighbours (2i, 2i + 1) in the weights, rather than halves apart.
      dtype: the checkpoint's own, of all that is not quantised.
      quantization: of the published file.
      num_nextn_predict_layers: layers for multi-token prediction that the file has beyond the model's; not used.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    first_k_dense_replace: int
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool
    latent_norm_eps: float = 1e-6
    rope_interleave: bool = True
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "bfloat16"
    quantization: QuantizationConfig = NOT_QUANTISED
    num_nextn_predict_layers: int = 0

    @property
    def expert_units(self) -> int:
        """Indivisible units of one expert's inner width: those that share a scale, or single ones."""
        return cdiv(self.moe_intermediate_size, self.quantization.scheme.unit)


def read_kimi_config(raw: Mapping[str, Any]) -> KimiConfig:
    """Reads a `config.json`.

    Raises:
      ValueError: naming the field, for a value of another type or out of range, or a setting that is not implemented.
    """
    root = Fields(raw)
    text = root.section("text_config") or raw
    fields = Fields(text)
    for table in (root, fields):
        if table.table.get("model_type") not in (*MODEL_TYPES, None):
            raise table.wrong("model_type", f"one of {', '.join(MODEL_TYPES)}")
    fields.only(
        {
            "attention_bias": False,
            "hidden_act": "silu",
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "moe_layer_freq": 1,
        }
    )
    heads = fields.integer("num_attention_heads", 1, MAX_HEADS)
    if fields.integer("num_key_value_heads", 1, MAX_HEADS, heads) != heads:
        raise fields.wrong("num_key_value_heads", f"num_attention_heads ({heads})")
    vocab = fields.integer("vocab_size", 1, MAX_SIZE)
    layers = fields.integer("num_hidden_layers", 1, MAX_LAYERS)
    rotated = fields.integer("qk_rope_head_dim", 2, MAX_HEADS)
    if rotated % 2:
        raise fields.wrong("qk_rope_head_dim", "an even number: values are rotated in pairs")
    experts = fields.integer("n_routed_experts", 1, MAX_EXPERTS)
    groups, best_groups = _read_groups(fields, experts)
    quantization = read_quantization(raw, text)
    config = KimiConfig(
        family="kimi",
        vocab_size=vocab,
        hidden_size=fields.integer("hidden_size", 1, MAX_SIZE),
        intermediate_size=fields.integer("intermediate_size", 1, MAX_SIZE),
        moe_intermediate_size=fields.integer("moe_intermediate_size", 1, MAX_SIZE),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        q_lora_rank=None if text.get("q_lora_rank") is None else fields.integer("q_lora_rank", 1, MAX_SIZE),
        kv_lora_rank=fields.integer("kv_lora_rank", 1, MAX_SIZE),
        qk_nope_head_dim=fields.integer("qk_nope_head_dim", 1, MAX_HEADS),
        qk_rope_head_dim=rotated,
        v_head_dim=fields.integer("v_head_dim", 1, MAX_HEADS),
        n_routed_experts=experts,
        n_shared_experts=fields.integer("n_shared_experts", 1, MAX_EXPERTS),
        num_experts_per_tok=fields.integer("num_experts_per_tok", 1, experts // groups * best_groups),
        first_k_dense_replace=fields.integer("first_k_dense_replace", 0, layers),
        n_group=groups,
        topk_group=best_groups,
        norm_topk_prob=fields.flag("norm_topk_prob", True),
        routed_scaling_factor=fields.real("routed_scaling_factor"),
        rms_norm_eps=fields.real("rms_norm_eps", high=1.0),
        rope=read_rope(fields, rotated),
        max_position_embeddings=fields.integer("max_position_embeddings", 2, MAX_POSITIONS),
        tie_word_embeddings=_read_tie(root, fields),
        latent_norm_eps=fields.real("latent_norm_eps", high=1.0, default=1e-6),
        rope_interleave=fields.flag("rope_interleave", True),
        eos_token_ids=read_ends(fields, vocab),
        dtype=read_dtype(raw),
        quantization=quantization,
        num_nextn_predict_layers=fields.integer("num_nextn_predict_layers", 0, MAX_LAYERS, 0),
    )
    _check_quantization(fields, config)
    return config


def _read_groups(fields: Fields, experts: int) -> tuple[int, int]:
    """`n_group` and `topk_group`; one group is no grouping."""
    groups = fields.integer("n_group", 1, experts, 1)
    if experts % groups:
        raise fields.wrong("n_group", f"a divisor of n_routed_experts ({experts})")
    if groups > 1 and experts // groups < 2:
        raise fields.wrong("n_group", f"at most {experts // 2}: a group is judged by its two best experts")
    return groups, fields.integer("topk_group", 1, groups, 1)


def _read_tie(root: Fields, fields: Fields) -> bool:
    tied = fields.flag("tie_word_embeddings", root.flag("tie_word_embeddings", False))
    if root.flag("tie_word_embeddings", tied) != tied:
        raise root.wrong("tie_word_embeddings", f"{tied}, as in text_config")
    return tied


def _check_quantization(fields: Fields, config: KimiConfig) -> None:
    """Raises ValueError unless all routed experts are quantised in one way, in whole groups."""
    scheme = config.quantization.scheme
    if scheme == UNQUANTISED:
        return
    for layer in range(config.first_k_dense_replace, config.num_hidden_layers):
        for projection in ("gate_proj", "up_proj", "down_proj"):
            module = f"model.layers.{layer}.mlp.experts.0.{projection}"
            if not config.quantization.quantizes(module, WRAPPER + module):
                raise ValueError(f"config.json quantization_config: leaves {module} out, expected quantised experts")
    for key in ("hidden_size", "moe_intermediate_size"):
        if scheme.whole_units and getattr(config, key) % scheme.unit:
            raise fields.wrong(key, f"a multiple of {scheme.unit}, {scheme.name.upper()}'s group")
