"""Weights of eight bits with a scale for each block: the FP8 layout of DeepSeek-V3 and Kimi K2.

float8_e4m3fn [out, in] with `weight_scale_inv`, float32, one for each block of (as published) 128 × 128; blocks at the
edges may be partial. Despite the name, a weight is its float8 times the scale. Arrays are NumPy's or JAX's.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.model.fields import Fields
from jaxspec.model.quantization.scheme import Array, PublishedTensor, Scheme, StoredArray, read_names
from jaxspec.sharding.arithmetic import cdiv
from jaxspec.sharding.checkpoint.manifest import FLOAT_DTYPES

BLOCK = (128, 128)  # Outputs and inputs that share a scale.
DTYPE = "float8_e4m3fn"
# What a config.json says of the layout.
SECTION: Mapping[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": list(BLOCK),
}
LARGEST = 448.0  # of float8_e4m3fn, which has no infinity


def dequantise(weight: Array, scale_inv: Array, dtype: Any, block: tuple[int, int] = BLOCK) -> Array:
    """float8 [..., out, in] and scales [..., ceil(out / rows), ceil(in / columns)] → [..., out, in] in `dtype`."""
    rows, columns = weight.shape[-2:]
    scale = scale_inv.repeat(block[0], axis=-2)[..., :rows, :].repeat(block[1], axis=-1)[..., :columns]
    return (weight.astype(np.float32) * scale.astype(np.float32)).astype(dtype)


def scale_shape(shape: tuple[int, ...], block: tuple[int, int] = BLOCK) -> tuple[int, ...]:
    """The shape of the scales of a weight of `shape` [..., out, in]."""
    return (*shape[:-2], cdiv(shape[-2], block[0]), cdiv(shape[-1], block[1]))


def quantise(weight: np.ndarray, block: tuple[int, int] = BLOCK) -> tuple[np.ndarray, np.ndarray]:
    """Weights [out, in] → float8 [out, in] and float32 scales, max |w| / 448 of each block."""
    blocks = scale_shape(weight.shape, block)
    padded = np.zeros((blocks[0] * block[0], blocks[1] * block[1]), np.float32)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    largest = np.abs(padded.reshape(blocks[0], block[0], blocks[1], block[1])).max(axis=(1, 3))
    scale = np.where(largest == 0, 1, largest / LARGEST).astype(np.float32)  # [blocks down, blocks across]
    divided = padded / scale.repeat(block[0], axis=0).repeat(block[1], axis=1)
    return divided[: weight.shape[0], : weight.shape[1]].astype(jnp.float8_e4m3fn), scale


@dataclass(frozen=True)
class Fp8(Scheme):
    """float8 [..., out, in] and float32 scales of its blocks, as published.

    All Linear layers are published so. Experts stay so in memory; other weights are dequantised when they are read.
    """

    name: ClassVar[str] = "fp8"
    unit: ClassVar[int] = BLOCK[1]
    outputs_per_scale: ClassVar[int] = BLOCK[0]
    scales: ClassVar[str] = "weight_scale_inv"
    section: ClassVar[Mapping[str, Any]] = SECTION
    described: ClassVar[str] = "'fp8'"

    def stored(self, shape: tuple[int, ...], axes: tuple[str | None, ...], dtype: Any) -> dict[str, StoredArray]:
        """See `Scheme.stored`."""
        return {
            "weight": StoredArray(shape, jnp.float8_e4m3fn, axes),
            "weight_scale_inv": StoredArray(scale_shape(shape), jnp.float32, axes),
        }

    def quantise(self, weights: np.ndarray) -> dict[str, np.ndarray]:
        """See `Scheme.quantise`."""
        quantised, scale = quantise(weights)
        return {"weight": quantised, "weight_scale_inv": scale}

    def dequantise(self, arrays: Mapping[str, Array], dtype: Any) -> Array:
        """See `Scheme.dequantise`."""
        return dequantise(arrays["weight"], arrays["weight_scale_inv"], dtype)

    def multiply(self, arrays: Mapping[str, jax.Array], x: jax.Array, experts: jax.Array, dtype: Any) -> jax.Array:
        """See `Scheme.multiply`."""
        weights = arrays["weight"][experts].astype(jnp.float32)  # [n, out, in]
        down, across = (jnp.arange(size) // block for size, block in zip(weights.shape[1:], BLOCK, strict=True))
        weights *= arrays["weight_scale_inv"][experts[:, None, None], down[:, None], across]
        return (weights * x[:, None]).sum(-1)

    def reads(self, section: Mapping[str, Any]) -> bool:
        """See `Scheme.reads`."""
        return section.get("quant_method") == "fp8"

    def read_ignored(self, fields: Fields) -> tuple[str, ...]:
        """See `Scheme.read_ignored`; the output head is never quantised."""
        fields.only({"fmt": "e4m3", "activation_scheme": "dynamic", "scale_fmt": None})
        if fields.table.get("weight_block_size") != list(BLOCK):
            raise fields.wrong("weight_block_size", f"{list(BLOCK)}")
        names = [name for key in ("modules_to_not_convert", "ignored_layers") for name in read_names(fields, key)]
        return ("lm_head", *names)

    def published(self, name: str, shape: tuple[int, ...], dtype: str) -> dict[str, PublishedTensor]:
        """See `Scheme.published`."""
        tensors = super().published(name, shape, dtype)
        if dtype == DTYPE:
            tensors[f"{name}_scale_inv"] = PublishedTensor(scale_shape(shape), FLOAT_DTYPES)
        return tensors

    def linear_scales(self, name: str, dtype: str) -> str:
        """See `Scheme.linear_scales`."""
        return f"{name}_scale_inv" if dtype == DTYPE else ""


FP8 = Fp8()
