"""Weights of four bits: the `pack-quantized` layout of compressed-tensors, as Kimi K2's experts are published.

Symmetric, in groups of 32 inputs: w = q · scale, with q from -8 to 7 kept as q + 8. Eight of them make an int32 along
the input dimension, the first in the lowest bits. Arrays are NumPy's or JAX's; results are of the same kind.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

GROUP = 32  # Inputs that share a scale.
PER_WORD = 8  # Values in an int32.
# What a config.json says of the layout: Kimi's routed experts, and no other Linear layer.
CONFIG: Mapping[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "kv_cache_scheme": None,
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "input_activations": None,
            "output_activations": None,
            "weights": {
                "num_bits": 4,
                "type": "int",
                "symmetric": True,
                "strategy": "group",
                "group_size": GROUP,
                "dynamic": False,
                "actorder": None,
                "observer": "minmax",
            },
        }
    },
    "ignore": [
        "lm_head",
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
    ],
}
_SHIFTS = 4 * np.arange(PER_WORD, dtype=np.int32)

Array = TypeVar("Array", np.ndarray, jax.Array)


def unpack(packed: Array) -> Array:
    """int32 [..., in / 8] → the integers in it, int8 [..., in] from -8 to 7."""
    nibbles = (packed[..., None] >> _SHIFTS) & 0xF  # [..., in / 8, 8]; the mask drops the sign that >> shifts in.
    return (nibbles.astype(np.int8) - np.int8(8)).reshape(*packed.shape[:-1], -1)


def pack(integers: np.ndarray) -> np.ndarray:
    """The inverse of `unpack`: integers [..., in] from -8 to 7 → int32 [..., in / 8]."""
    nibbles = (integers.astype(np.int32) + 8).astype(np.uint32).reshape(*integers.shape[:-1], -1, PER_WORD)
    return np.bitwise_or.reduce(nibbles << _SHIFTS.astype(np.uint32), axis=-1).view(np.int32)


def dequantise(packed: Array, scale: Array, dtype: Any) -> Array:
    """int32 [..., in / 8] and scales [..., in / 32] → weights [..., in], rounded once, to `dtype`."""
    groups = unpack(packed).reshape(*scale.shape, GROUP)
    weights = groups.astype(np.float32) * scale[..., None].astype(np.float32)
    return weights.reshape(*scale.shape[:-1], -1).astype(dtype)


def quantise(weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Weights [..., in] → packed int32 [..., in / 8] and bfloat16 scales [..., in / 32], max |w| / 7 of each group."""
    groups = weights.astype(np.float32).reshape(*weights.shape[:-1], -1, GROUP)
    scale = (np.abs(groups).max(axis=-1) / 7).astype(jnp.bfloat16)
    # A group of zeros has a scale of zero, which times any q is right.
    divisor = np.where(scale == 0, 1, scale).astype(np.float32)[..., None]
    integers = np.clip(np.round(groups / divisor), -8, 7)
    return pack(integers.reshape(weights.shape)), scale
