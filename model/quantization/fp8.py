"""Weights of eight bits with a scale for each block: the FP8 layout of DeepSeek-V3 and Kimi K2.

float8_e4m3fn [out, in] with `weight_scale_inv`, float32, one for each block of (as published) 128 × 128; blocks at the
edges may be partial. Despite the name, a weight is its float8 times the scale. Arrays are NumPy's or JAX's.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

BLOCK = (128, 128)  # Rows and columns that share a scale.
# What a config.json says of the layout.
CONFIG: Mapping[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": list(BLOCK),
}
LARGEST = 448.0  # of float8_e4m3fn, which has no infinity

Array = TypeVar("Array", np.ndarray, jax.Array)


def dequantise(weight: Array, scale_inv: Array, dtype: Any, block: tuple[int, int] = BLOCK) -> Array:
    """float8 [..., out, in] and scales [..., ceil(out / rows), ceil(in / columns)] → [..., out, in] in `dtype`."""
    rows, columns = weight.shape[-2:]
    scale = scale_inv.repeat(block[0], axis=-2)[..., :rows, :].repeat(block[1], axis=-1)[..., :columns]
    return (weight.astype(np.float32) * scale.astype(np.float32)).astype(dtype)


def scale_shape(shape: tuple[int, ...], block: tuple[int, int] = BLOCK) -> tuple[int, ...]:
    """The shape of the scales of a weight of `shape` [..., out, in]."""
    return (*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1]))


def quantise(weight: np.ndarray, block: tuple[int, int] = BLOCK) -> tuple[np.ndarray, np.ndarray]:
    """Weights [out, in] → float8 [out, in] and float32 scales, max |w| / 448 of each block."""
    blocks = scale_shape(weight.shape, block)
    padded = np.zeros((blocks[0] * block[0], blocks[1] * block[1]), np.float32)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    largest = np.abs(padded.reshape(blocks[0], block[0], blocks[1], block[1])).max(axis=(1, 3))
    scale = np.where(largest == 0, 1, largest / LARGEST).astype(np.float32)  # [blocks down, blocks across]
    divided = padded / scale.repeat(block[0], axis=0).repeat(block[1], axis=1)
    return divided[: weight.shape[0], : weight.shape[1]].astype(jnp.float8_e4m3fn), scale
