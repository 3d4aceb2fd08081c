"""Rotary position embedding: what a `config.json` says of it, and the frequencies that follow."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxspec.model.fields import Fields

MAX_POSITIONS = 2**30
_KINDS = ("default", "llama3", "yarn")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding.

    Attributes:
      theta: base of the frequencies.
      kind: "default"; "llama3" (Llama 3.1's piecewise scaling: the four fields from `factor` on); or "yarn" (arXiv
        2309.00071: `factor`, `original_max_position_embeddings` and the fields from `beta_fast` on).
      mscale, mscale_all_dim: 0 where the config has none.
      attention_factor: multiplies cos and sin; None follows from `factor` and the two mscales.
      inv_freq: explicit frequencies, which win over all rules; empty where the config has none.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position_embeddings: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True
    attention_factor: float | None = None
    inv_freq: tuple[float, ...] = ()

    def inverse_frequencies(self, head_dim: int) -> np.ndarray:
        """float32 [head_dim / 2]: radians per position of each rotated pair."""
        if self.inv_freq:
            return np.array(self.inv_freq, np.float32)
        exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
        frequencies = (1.0 / np.float32(self.theta) ** exponents).astype(np.float32)
        if self.kind == "llama3":
            return self._llama3(frequencies)
        return self._yarn(frequencies, head_dim) if self.kind == "yarn" else frequencies

    @property
    def amplitude(self) -> float:
        """What multiplies cos and sin."""
        if self.kind != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._growth(self.mscale) / self._growth(self.mscale_all_dim)
        return self._growth(1.0)

    @property
    def score_factor(self) -> float:
        """What DeepSeek's latent attention multiplies its softmax scale by: m², with m from `mscale_all_dim`."""
        return self._growth(self.mscale_all_dim) ** 2 if self.kind == "yarn" and self.mscale_all_dim else 1.0

    def _growth(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

    def _llama3(self, frequencies: np.ndarray) -> np.ndarray:
        """Long wavelengths are stretched by `factor`, short ones kept, the band between interpolated."""
        wavelengths = 2 * np.pi / frequencies
        smooth = (self.original_max_position_embeddings / wavelengths - self.low_freq_factor) / (
            self.high_freq_factor - self.low_freq_factor
        )
        smooth = np.clip(smooth, 0.0, 1.0)
        return ((1 - smooth) * frequencies / self.factor + smooth * frequencies).astype(np.float32)

    def _yarn(self, frequencies: np.ndarray, head_dim: int) -> np.ndarray:
        """Pairs that turn `beta_fast` times in the trained length keep their pace, `beta_slow` times are stretched."""

        def pair_that_turns(times: float) -> float:
            ratio = self.original_max_position_embeddings / (times * 2 * math.pi)
            return head_dim * math.log(ratio) / (2 * math.log(self.theta))

        low, high = pair_that_turns(self.beta_fast), pair_that_turns(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        if low == high:
            high += 0.001  # The published rule against dividing by 0.
        pairs = np.arange(head_dim // 2, dtype=np.float32)
        stretched = np.clip((pairs - low) / (high - low), 0, 1).astype(np.float32)
        return (frequencies / np.float32(self.factor) * stretched + frequencies * (1 - stretched)).astype(np.float32)


def read_rope(fields: Fields, head_dim: int) -> RopeConfig:
    """Reads `rope_theta` + `rope_scaling` (older files) or `rope_parameters` (newer ones).

    Args:
      head_dim: rotated values of a head.
    Raises:
      ValueError: naming the field, for a kind that is not implemented or a value that does not fit.
    """
    table: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        if any(isinstance(value, dict) for value in fields.section(key).values()):
            raise fields.wrong(key, "one set of parameters for all layers")
        table |= fields.section(key)
    Fields({**fields.table, **table}).only({"partial_rotary_factor": 1.0})
    rope = Fields(table, f"{fields.where} rope_scaling")
    theta = (rope if "rope_theta" in table else fields).real("rope_theta")
    explicit: tuple[float, ...] = ()
    if "inv_freq" in table:
        explicit = rope.reals("inv_freq")
        if len(explicit) != head_dim // 2:
            raise rope.wrong("inv_freq", f"{head_dim // 2} numbers, one for each rotated pair")
    kind = table.get("rope_type", table.get("type", "default"))
    if kind not in _KINDS:
        raise ValueError(f"config.json rope_scaling: found type {kind!r}, only {', '.join(_KINDS)} are supported")
    if kind == "default":
        return RopeConfig(theta, inv_freq=explicit)
    factor = rope.real("factor")
    trained = rope.integer("original_max_position_embeddings", 1, MAX_POSITIONS)
    if kind == "llama3":
        low, high = rope.real("low_freq_factor"), rope.real("high_freq_factor")
        if low >= high:
            raise rope.wrong("high_freq_factor", f"more than low_freq_factor ({low:g})")
        return RopeConfig(theta, kind, factor, low, high, trained, inv_freq=explicit)
    if theta <= 1:
        raise (rope if "rope_theta" in table else fields).wrong("rope_theta", "more than 1")
    fast, slow = rope.real("beta_fast", default=32.0), rope.real("beta_slow", default=1.0)
    if fast < slow:
        raise rope.wrong("beta_fast", f"at least beta_slow ({slow:g})")
    return RopeConfig(
        theta,
        kind,
        factor,
        original_max_position_embeddings=trained,
        beta_fast=fast,
        beta_slow=slow,
        mscale=rope.real("mscale", default=0.0),
        mscale_all_dim=rope.real("mscale_all_dim", default=0.0),
        truncate=rope.flag("truncate", True),
        attention_factor=rope.real("attention_factor") if "attention_factor" in table else None,
        inv_freq=explicit,
    )
