"""Weights of four bits: the `pack-quantized` layout of compressed-tensors, as Kimi K2's experts are published.

Symmetric, in groups of 32 inputs: w = q · scale, with q from -8 to 7 kept as q + 8. Eight of them make an int32 along
the input dimension, the first in the lowest bits. Arrays are NumPy's or JAX's; results are of the same kind.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.model.fields import Fields
from jaxspec.model.quantization.scheme import Array, PublishedTensor, Scheme, StoredArray, read_names

GROUP = 32  # Inputs that share a scale.
PER_WORD = 8  # Values in an int32.
VALUE_DEVIATION = 4.6  # Of an integer that takes each value from -8 to 7 equally often.
# What a config.json says of the layout: Kimi's routed experts, and no other Linear layer.
SECTION: Mapping[str, Any] = {
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


@dataclass(frozen=True)
class Int4(Scheme):
    """Packed int32 [..., out, in / 8] and bfloat16 scales [..., out, in / 32], as published.

    A published weight means bf16(q · scale). Models of float32 take it so exactly; where activations are bfloat16,
    each group's sum is multiplied by its scale in float32, which is no less exact.
    """

    name: ClassVar[str] = "int4"
    unit: ClassVar[int] = GROUP
    whole_units: ClassVar[bool] = True
    scales: ClassVar[str] = "weight_scale"
    section: ClassVar[Mapping[str, Any]] = SECTION
    described: ClassVar[str] = "'compressed-tensors' (pack-quantized INT4)"

    def stored(self, shape: tuple[int, ...], axes: tuple[str | None, ...], dtype: Any) -> dict[str, StoredArray]:
        """See `Scheme.stored`."""
        *outer, inputs = shape
        return {
            "weight_packed": StoredArray((*outer, inputs // PER_WORD), jnp.int32, axes),
            "weight_scale": StoredArray((*outer, inputs // GROUP), jnp.bfloat16, axes),
        }

    def quantise(self, weights: np.ndarray) -> dict[str, np.ndarray]:
        """See `Scheme.quantise`."""
        packed, scale = quantise(weights)
        return {"weight_packed": packed, "weight_scale": scale, "weight_shape": np.array(weights.shape, np.int32)}

    def dequantise(self, arrays: Mapping[str, Array], dtype: Any) -> Array:
        """See `Scheme.dequantise`."""
        return dequantise(arrays["weight_packed"], arrays["weight_scale"], jnp.bfloat16).astype(dtype)

    def dense(self, arrays: Mapping[str, jax.Array], experts: jax.Array, dtype: Any) -> jax.Array:
        """See `Scheme.dense`."""
        scale = arrays["weight_scale"][experts].astype(jnp.float32)
        values = unpack(arrays["weight_packed"][experts]).astype(jnp.float32)
        groups = values.reshape(*scale.shape, GROUP) * scale[..., None]
        return _as_bfloat16(groups).reshape(values.shape).astype(dtype)

    def multiply(self, arrays: Mapping[str, jax.Array], x: jax.Array, experts: jax.Array, dtype: Any) -> jax.Array:
        """See `Scheme.multiply`. Word by word, its eight values in turn: the compiler then loads each word once."""
        packed = arrays["weight_packed"][experts]  # [n, out, in / 8]
        scale = arrays["weight_scale"][experts].astype(jnp.float32)[..., None]  # [n, out, in / 32, 1]
        packed = packed.reshape(*scale.shape[:3], -1)  # words of one scale last
        places = x.reshape(x.shape[0], 1, *packed.shape[2:], PER_WORD)
        total = jnp.zeros((), jnp.float32)
        for place in range(PER_WORD):
            value = (((packed >> (4 * place)) & 0xF) - 8).astype(jnp.float32)
            if dtype == jnp.float32:
                value = _as_bfloat16(value * scale)
            total += value * places[..., place]
        if dtype != jnp.float32:
            total *= scale
        return total.sum((-2, -1))

    def reads(self, section: Mapping[str, Any]) -> bool:
        """See `Scheme.reads`."""
        return section.get("quant_method") == "compressed-tensors"

    def read_ignored(self, fields: Fields) -> tuple[str, ...]:
        """See `Scheme.read_ignored`."""
        if fields.table.get("format") != "pack-quantized":
            raise fields.wrong("format", "'pack-quantized'")
        fields.only({"quantization_status": "compressed"})
        for key in ("kv_cache_scheme", "sparsity_config", "transform_config"):
            if fields.table.get(key):
                raise fields.wrong(key, "none")
        groups = fields.section("config_groups")
        if len(groups) != 1:
            raise fields.wrong("config_groups", "one group")
        (name,) = groups
        group = Fields(Fields(groups, f"{fields.where} config_groups").section(name), f"{fields.where} {name}")
        if group.table.get("targets") != ["Linear"]:
            raise group.wrong("targets", "['Linear']")
        group.only({"format": "pack-quantized"})
        for key in ("input_activations", "output_activations"):
            if group.table.get(key):
                raise group.wrong(key, "none: weights alone are quantised")
        weights = Fields(group.section("weights"), f"{group.where} weights")
        required = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
        for key, value in required.items():
            if weights.table.get(key) != value:
                raise weights.wrong(key, repr(value))
        weights.only({"dynamic": False, "block_structure": None, "zp_dtype": None, "scale_dtype": None})
        if weights.table.get("actorder"):
            raise weights.wrong("actorder", "none")
        return read_names(fields, "ignore")

    def published(self, name: str, shape: tuple[int, ...], dtype: str) -> dict[str, PublishedTensor]:
        """See `Scheme.published`; `weight_shape` says how wide a packed weight is."""
        if name.endswith(".weight_scale"):
            return {name: PublishedTensor(shape, (dtype,))}  # Another dtype would round the scales.
        tensors = super().published(name, shape, dtype)
        if name.endswith(".weight_packed"):
            beside = f"{name.removesuffix('packed')}shape"
            tensors[beside] = PublishedTensor((2,), ("int32", "int64"), (shape[0], shape[1] * PER_WORD))
        return tensors

    def random_scale(self, deviation: float) -> float:
        """See `Scheme.random_scale`."""
        return deviation / VALUE_DEVIATION


INT4 = Int4()


def _as_bfloat16(x: jax.Array) -> jax.Array:
    """float32, rounded to bfloat16's precision; unlike a cast there and back, the compiler may not leave it out."""
    return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
