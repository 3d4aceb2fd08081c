"""Rotary position embedding: its parameters, and the frequencies that follow."""

import math
from dataclasses import dataclass

import numpy as np


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
