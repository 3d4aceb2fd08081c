"""Model configurations, read from a checkpoint's `config.json`.

Field names are those of transformers. Every number comes from the file and is checked; a setting that the code does not
implement is refused by name rather than ignored.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from jaxspec.model.families.rope_config import MAX_POSITIONS, read_rope
from jaxspec.model.fields import Fields
from jaxspec.model.layers.rope import RopeConfig
from jaxspec.sharding.checkpoint.manifest import FLOAT_DTYPES

# Far beyond any published model; what exceeds them is a damaged file, and would take hours or overflow.
MAX_SIZE, MAX_HEADS, MAX_LAYERS = 2**24, 2**12, 2**10
MAX_BLOCK = 1025  # Rows of one drafter pass.
TARGET_FAMILIES = {"LlamaForCausalLM": "llama", "Qwen3ForCausalLM": "qwen3"}


class TargetConfig(Protocol):
    """What is read of a target's config, whatever its family."""

    @property
    def family(self) -> str:
        """The family's name in the registry."""

    @property
    def vocab_size(self) -> int:
        """How many tokens there are."""

    @property
    def hidden_size(self) -> int:
        """The width of the residual stream."""

    @property
    def num_hidden_layers(self) -> int:
        """The number of decoder layers."""

    @property
    def max_position_embeddings(self) -> int:
        """The number of positions that the model was made for."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokens that end an answer."""


@dataclass(frozen=True)
class ModelConfig:
    """A dense decoder-only target (Llama or Qwen3)."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool
    qk_norm: bool
    eos_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class DFlashConfig:
    """A DFlash drafter (arXiv 2602.06036).

    Attributes:
      block_size: rows of one drafter pass, anchor included; it drafts `block_size - 1` tokens.
      target_layer_ids: 0-based target layers whose outputs are tapped.
      windows: for each layer, the sliding window in positions, or 0 for full attention.
      causal: for each layer, whether a block row is hidden from the rows before it.
      input_embedding_scale, output_multiplier, final_logit_softcapping: see the published config; 1, 1, 0 by default.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    block_size: int
    mask_token_id: int
    num_target_layers: int
    target_layer_ids: tuple[int, ...]
    windows: tuple[int, ...]
    causal: tuple[bool, ...]
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float = 0.0

    @property
    def depth(self) -> int:
        """L, the tokens drafted in one pass."""
        return self.block_size - 1


def read_model_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Reads a target's `config.json`.

    Raises:
      ValueError: naming the field, for an unknown architecture, a value of another type or out of range, or a setting
        that is not implemented.
    """
    name = architecture(raw)
    if name not in TARGET_FAMILIES:
        raise ValueError(f"config.json architectures: found {name!r}, expected one of {sorted(TARGET_FAMILIES)}")
    family = TARGET_FAMILIES[name]
    Fields(raw).only({"attention_bias": False, "mlp_bias": False, "hidden_act": "silu", "use_sliding_window": False})
    if raw.get("quantization_config"):
        raise ValueError("config.json quantization_config: quantised Llama and Qwen3 checkpoints are not supported")
    fields = Fields(raw)
    shape = _read_shape(fields)
    if "sliding_attention" in _read_layer_types(fields, shape["num_hidden_layers"]):
        raise fields.wrong("layer_types", "only 'full_attention' in a target")
    return ModelConfig(
        family=family,
        **shape,
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        qk_norm=family == "qwen3",
        eos_token_ids=read_ends(fields, shape["vocab_size"]),
    )


def read_dflash_config(raw: Mapping[str, Any]) -> DFlashConfig:
    """Reads a DFlash drafter's `config.json`; DFlash keys may stand in `dflash_config` or at the top level.

    Raises:
      ValueError: naming the field, for a DFlash 2 checkpoint, a missing key, a value of another type or out of range,
        or a setting that is not implemented.
    """
    name = architecture(raw)
    fields = Fields(raw)
    inner = fields.section("dflash_config")
    own = Fields({**raw, **inner})
    if name == "DFlash2DraftModel" or {"selector_rank", "selector_top_k", "conv_kernel_size"} & set(own.table):
        raise ValueError(
            "config.json architectures: DFlash2DraftModel (DFlash 2) is not supported, only DFlashDraftModel"
        )
    if name != "DFlashDraftModel":
        raise ValueError(f"config.json architectures: found {name!r}, expected 'DFlashDraftModel'")
    Fields(raw).only({"attention_bias": False, "mlp_bias": False, "hidden_act": "silu"})
    for key in (
        "attention_sink_bias",
        "attention_value_scale",
        "draft_vocab_size",
        "sample_from_anchor",
        "projector_type",
    ):
        if own.table.get(key):
            raise ValueError(f"config.json {key}: found {own.table[key]!r}, which is not supported")
    shape = _read_shape(fields)
    layers = shape["num_hidden_layers"]
    sliding = [kind == "sliding_attention" for kind in _read_layer_types(fields, layers)]
    window = fields.integer("sliding_window", 1, MAX_POSITIONS) if any(sliding) else 0
    target_layers = own.integer("num_target_layers", 2, MAX_LAYERS)
    # An explicit rule wins; otherwise sliding layers are causal inside the block and full ones are not.
    rules = ((raw, "is_causal"), (inner, "is_causal"), (inner, "causal"))
    explicit = [Fields(table).flag(key) for table, key in rules if table.get(key) is not None]
    return DFlashConfig(
        **shape,
        block_size=own.integer("block_size", 2, MAX_BLOCK, 16),
        mask_token_id=own.integer("mask_token_id", 0, shape["vocab_size"] - 1),
        num_target_layers=target_layers,
        target_layer_ids=_read_taps(own, target_layers, layers),
        windows=tuple(window if slides else 0 for slides in sliding),
        causal=tuple(explicit[0] if explicit else slides for slides in sliding),
        input_embedding_scale=own.real("input_embedding_scale", default=1.0),
        output_multiplier=own.real("output_multiplier", default=1.0),
        final_logit_softcapping=own.real("final_logit_softcapping", default=0.0),
    )


def default_target_layers(num_target_layers: int, count: int) -> tuple[int, ...]:
    """The published rule for tapped layers: evenly from the second to the third-last (one tap: the middle)."""
    if count == 1:
        return (num_target_layers // 2,)
    return tuple(round(1 + i * (num_target_layers - 4) / (count - 1)) for i in range(count))


def check_drafter(target: TargetConfig, drafter: DFlashConfig) -> None:
    """Raises ValueError, naming the field, where `drafter` was not made for `target`."""
    for field, found, expected in (
        ("hidden_size", drafter.hidden_size, target.hidden_size),
        ("vocab_size", drafter.vocab_size, target.vocab_size),
        ("num_target_layers", drafter.num_target_layers, target.num_hidden_layers),
    ):
        if found != expected:
            raise ValueError(
                f"drafter {field}: found {found}, but the target has {expected}: a drafter of another target"
            )
    # The last layer is not tapped: its output is only defined after the final norm.
    wrong = [i for i in drafter.target_layer_ids if not 0 <= i < target.num_hidden_layers - 1]
    if wrong:
        raise ValueError(f"drafter target_layer_ids: found {wrong[0]}, expected 0 to {target.num_hidden_layers - 2}")
    if not 0 <= drafter.mask_token_id < target.vocab_size:
        raise ValueError(f"drafter mask_token_id: found {drafter.mask_token_id}, expected 0 to {target.vocab_size - 1}")
    if drafter.block_size < 2:
        raise ValueError(f"drafter block_size: found {drafter.block_size}, expected at least 2")


def architecture(raw: Mapping[str, Any]) -> str:
    """The class that a `config.json` names first, or "(none)"; raises ValueError if it names them otherwise."""
    names = raw.get("architectures") or ["(none)"]
    if not isinstance(names, list) or not isinstance(names[0], str):
        raise Fields(raw).wrong("architectures", "a list of names")
    return names[0]


def read_dtype(raw: Mapping[str, Any]) -> str:
    """`dtype` (newer files) or `torch_dtype`, of the text model or of the whole file; bfloat16 where none is given.

    Raises:
      ValueError: naming the field, for a dtype that weights are not read in.
    """
    for fields in (Fields(Fields(raw).section("text_config")), Fields(raw)):
        for key in ("dtype", "torch_dtype"):
            if (value := fields.table.get(key)) is not None:
                if value not in FLOAT_DTYPES:
                    raise fields.wrong(key, f"one of {', '.join(sorted(FLOAT_DTYPES))}")
                return value
    return "bfloat16"


def _read_shape(fields: Fields) -> dict[str, Any]:
    """The fields that targets and drafters share."""
    heads = fields.integer("num_attention_heads", 1, MAX_HEADS)
    hidden = fields.integer("hidden_size", 1, MAX_SIZE)
    kv_heads = fields.integer("num_key_value_heads", 1, MAX_HEADS, heads)
    if heads % kv_heads:
        raise fields.wrong("num_key_value_heads", f"a divisor of num_attention_heads ({heads})")
    if fields.table.get("head_dim") is None and hidden % heads:
        raise fields.wrong("hidden_size", f"a multiple of num_attention_heads ({heads}), or a head_dim")
    head_dim = fields.integer("head_dim", 2, MAX_HEADS, hidden // heads)
    if head_dim % 2:
        raise fields.wrong("head_dim", f"an even number (here {head_dim}): its rows are rotated in pairs")
    return {
        "vocab_size": fields.integer("vocab_size", 1, MAX_SIZE),
        "hidden_size": hidden,
        "intermediate_size": fields.integer("intermediate_size", 1, MAX_SIZE),
        "num_hidden_layers": fields.integer("num_hidden_layers", 1, MAX_LAYERS),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": fields.real("rms_norm_eps", high=1.0),
        "rope": read_rope(fields, head_dim),
        "max_position_embeddings": fields.integer("max_position_embeddings", 2, MAX_POSITIONS),
    }


def _read_layer_types(fields: Fields, layers: int) -> list[str]:
    kinds = fields.table.get("layer_types")
    kinds = ["full_attention"] * layers if kinds is None else kinds
    known = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in known for kind in kinds):
        raise fields.wrong("layer_types", f"{layers}, each 'full_attention' or 'sliding_attention'")
    return kinds


def read_ends(fields: Fields, vocab_size: int) -> tuple[int, ...]:
    """`eos_token_id`: one id, a list of them, or none."""
    found = fields.table.get("eos_token_id")
    if found is None or found == []:
        return ()
    if isinstance(found, list):
        return fields.integers("eos_token_id", 0, vocab_size - 1)
    return (fields.integer("eos_token_id", 0, vocab_size - 1),)


def _read_taps(fields: Fields, target_layers: int, layers: int) -> tuple[int, ...]:
    if fields.table.get("target_layer_ids") is None:
        taps = default_target_layers(target_layers, layers)
    else:
        taps = fields.integers("target_layer_ids", 0, target_layers - 2)
    if len(set(taps)) < len(taps) or not all(0 <= tap < target_layers - 1 for tap in taps):
        raise fields.wrong("target_layer_ids", f"different layers from 0 to {target_layers - 2}")
    return taps
