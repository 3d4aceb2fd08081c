"""Model configurations, read from a checkpoint's `config.json`.

Field names are those of transformers. Every number comes from the file; a setting that the code does not implement
is refused by name rather than ignored.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

TARGET_FAMILIES = {"LlamaForCausalLM": "llama", "Qwen3ForCausalLM": "qwen3"}


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding.

    Attributes:
      theta: base of the frequencies.
      kind: "default", or "llama3" (Llama 3.1's piecewise scaling, which reads the four fields below).
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position_embeddings: int = 0

    def inverse_frequencies(self, head_dim: int) -> np.ndarray:
        """float32 [head_dim / 2]: radians per position of each rotated pair."""
        exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
        frequencies = (1.0 / np.float32(self.theta) ** exponents).astype(np.float32)
        if self.kind == "default":
            return frequencies
        # Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, the band between interpolated.
        wavelengths = 2 * np.pi / frequencies
        smooth = (self.original_max_position_embeddings / wavelengths - self.low_freq_factor) / (
            self.high_freq_factor - self.low_freq_factor
        )
        smooth = np.clip(smooth, 0.0, 1.0)
        return ((1 - smooth) * frequencies / self.factor + smooth * frequencies).astype(np.float32)


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
      ValueError: naming the field, for an unknown architecture or a setting that is not implemented.
    """
    architecture = _architecture(raw)
    if architecture not in TARGET_FAMILIES:
        raise ValueError(
            f"config.json architectures: found {architecture!r}, expected one of {sorted(TARGET_FAMILIES)}"
        )
    family = TARGET_FAMILIES[architecture]
    _refuse(raw, {"attention_bias": False, "mlp_bias": False, "hidden_act": "silu", "use_sliding_window": False})
    if raw.get("quantization_config"):
        raise ValueError("config.json quantization_config: quantised Llama and Qwen3 checkpoints are not supported")
    heads = int(_required(raw, "num_attention_heads"))
    hidden = int(_required(raw, "hidden_size"))
    eos = raw.get("eos_token_id")
    return ModelConfig(
        family=family,
        vocab_size=int(_required(raw, "vocab_size")),
        hidden_size=hidden,
        intermediate_size=int(_required(raw, "intermediate_size")),
        num_hidden_layers=int(_required(raw, "num_hidden_layers")),
        num_attention_heads=heads,
        num_key_value_heads=int(raw.get("num_key_value_heads") or heads),
        head_dim=int(raw.get("head_dim") or hidden // heads),
        rms_norm_eps=float(_required(raw, "rms_norm_eps")),
        rope=_read_rope(raw),
        max_position_embeddings=int(_required(raw, "max_position_embeddings")),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qk_norm=family == "qwen3",
        eos_token_ids=tuple(int(i) for i in (eos if isinstance(eos, list) else [] if eos is None else [eos])),
    )


def read_dflash_config(raw: Mapping[str, Any]) -> DFlashConfig:
    """Reads a DFlash drafter's `config.json`; DFlash keys may stand in `dflash_config` or at the top level.

    Raises:
      ValueError: naming the field, for a DFlash 2 checkpoint, a missing key or a setting that is not implemented.
    """
    architecture = _architecture(raw)
    inner = raw.get("dflash_config") or {}
    if architecture == "DFlash2DraftModel" or any(
        key in inner or key in raw for key in ("selector_rank", "selector_top_k", "conv_kernel_size")
    ):
        raise ValueError(
            "config.json architectures: DFlash2DraftModel (DFlash 2) is not supported, only DFlashDraftModel"
        )
    if architecture != "DFlashDraftModel":
        raise ValueError(f"config.json architectures: found {architecture!r}, expected 'DFlashDraftModel'")
    _refuse(raw, {"attention_bias": False, "hidden_act": "silu"})
    for key in (
        "attention_sink_bias",
        "attention_value_scale",
        "draft_vocab_size",
        "sample_from_anchor",
        "projector_type",
    ):
        if inner.get(key, raw.get(key)):
            raise ValueError(f"config.json {key}: found {inner.get(key, raw.get(key))!r}, which is not supported")

    def setting(key: str, default: Any = None) -> Any:
        value = inner.get(key, raw.get(key, default))
        if value is None:
            raise ValueError(f"config.json {key}: missing, needed by a DFlash drafter")
        return value

    layers = int(_required(raw, "num_hidden_layers"))
    target_layers = int(setting("num_target_layers"))
    heads = int(_required(raw, "num_attention_heads"))
    hidden = int(_required(raw, "hidden_size"))
    kinds = tuple(raw.get("layer_types") or ["full_attention"] * layers)
    if len(kinds) != layers or set(kinds) - {"full_attention", "sliding_attention"}:
        raise ValueError(
            f"config.json layer_types: found {list(kinds)}, expected {layers}, each 'full_attention' or "
            "'sliding_attention'"
        )
    sliding = [kind == "sliding_attention" for kind in kinds]
    if any(sliding) and not raw.get("sliding_window"):
        raise ValueError("config.json sliding_window: missing, needed by the 'sliding_attention' layers")
    # An explicit rule wins; otherwise sliding layers are causal inside the block and full ones are not.
    causal = raw.get("is_causal", inner.get("is_causal", inner.get("causal")))
    taps = inner.get("target_layer_ids", raw.get("target_layer_ids"))
    return DFlashConfig(
        vocab_size=int(_required(raw, "vocab_size")),
        hidden_size=hidden,
        intermediate_size=int(_required(raw, "intermediate_size")),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=int(raw.get("num_key_value_heads") or heads),
        head_dim=int(raw.get("head_dim") or hidden // heads),
        rms_norm_eps=float(_required(raw, "rms_norm_eps")),
        rope=_read_rope(raw),
        max_position_embeddings=int(_required(raw, "max_position_embeddings")),
        block_size=int(setting("block_size", 16)),
        mask_token_id=int(setting("mask_token_id")),
        num_target_layers=target_layers,
        target_layer_ids=tuple(int(i) for i in taps) if taps else default_target_layers(target_layers, layers),
        windows=tuple(int(raw["sliding_window"]) if s else 0 for s in sliding),
        causal=tuple(s if causal is None else bool(causal) for s in sliding),
        input_embedding_scale=float(setting("input_embedding_scale", 1.0)),
        output_multiplier=float(setting("output_multiplier", 1.0)),
        final_logit_softcapping=float(setting("final_logit_softcapping", 0.0)),
    )


def default_target_layers(num_target_layers: int, count: int) -> tuple[int, ...]:
    """The published rule for tapped layers: evenly from the second to the third-last (one tap: the middle)."""
    if count == 1:
        return (num_target_layers // 2,)
    return tuple(round(1 + i * (num_target_layers - 4) / (count - 1)) for i in range(count))


def check_drafter(target: ModelConfig, drafter: DFlashConfig) -> None:
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


def _architecture(raw: Mapping[str, Any]) -> str:
    return str((raw.get("architectures") or ["(none)"])[0])


def _required(raw: Mapping[str, Any], key: str) -> Any:
    if raw.get(key) is None:
        raise ValueError(f"config.json {key}: missing")
    return raw[key]


def _refuse(raw: Mapping[str, Any], supported: Mapping[str, Any]) -> None:
    for key, value in supported.items():
        if raw.get(key, value) not in (value, None):
            raise ValueError(f"config.json {key}: found {raw[key]!r}, only {value!r} is supported")


def _read_rope(raw: Mapping[str, Any]) -> RopeConfig:
    """Reads `rope_theta` + `rope_scaling` (older files) or `rope_parameters` (newer ones)."""
    rope = dict(raw.get("rope_scaling") or {}) | dict(raw.get("rope_parameters") or {})
    theta = rope.get("rope_theta", raw.get("rope_theta"))
    if theta is None:
        raise ValueError("config.json rope_theta: missing")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return RopeConfig(theta=float(theta))
    if kind != "llama3":
        raise ValueError(f"config.json rope_scaling: found type {kind!r}, only 'default' and 'llama3' are supported")
    return RopeConfig(
        theta=float(theta),
        kind=kind,
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_max_position_embeddings=int(rope["original_max_position_embeddings"]),
    )
