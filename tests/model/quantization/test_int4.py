"""Four-bit weights against the library that defines their layout."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme, QuantizationStrategy

from jaxspec.model.quantization import int4

SCHEME = QuantizationScheme(
    targets=["Linear"],
    weights=QuantizationArgs(
        num_bits=4, type="int", symmetric=True, strategy=QuantizationStrategy.GROUP, group_size=32
    ),
)


def bfloat16(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)


def test_the_golden_vector():
    values = np.array([[-8, -7, -1, 0, 1, 2, 6, 7]])
    packed = int4.pack(values)
    assert packed.dtype == np.int32
    assert packed.tolist() == [[-22444272]]
    assert packed.view(np.uint32).tolist() == [[0xFEA98710]]
    np.testing.assert_array_equal(int4.unpack(packed), values)
    assert int4.unpack(np.zeros((1, 1), np.int32)).tolist() == [[-8] * 8]


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32])
def test_dequantised_as_the_library_does(dtype):
    """Every bit pattern, -8 included, with scales over many magnitudes."""
    rng = np.random.default_rng(0)
    packed = rng.integers(-(2**31), 2**31, (3, 40, 24), dtype=np.int32)
    scale = (rng.standard_normal((3, 40, 6)) * 10.0 ** rng.integers(-6, 3, (3, 40, 6))).astype(ml_dtypes.bfloat16)
    assert set(np.unique(int4.unpack(packed))) == set(range(-8, 8))
    ours = int4.dequantise(packed, scale, dtype)
    traced = int4.dequantise(jnp.asarray(packed), jnp.asarray(scale), dtype)
    assert ours.shape == (3, 40, 192)
    assert ours.dtype == traced.dtype == dtype
    np.testing.assert_array_equal(ours, traced)
    for expert in range(3):
        scales = bfloat16(scale[expert])
        state = {
            "weight_packed": torch.from_numpy(packed[expert]),
            "weight_scale": scales if dtype == ml_dtypes.bfloat16 else scales.float(),
            "weight_shape": torch.tensor([40, 192]),
        }
        theirs = PackedQuantizationCompressor.decompress(state, SCHEME)["weight"]
        np.testing.assert_array_equal(ours[expert].astype(np.float32), theirs.float().numpy())


def test_quantised_as_the_library_does():
    weights = np.random.default_rng(1).standard_normal((6, 96)).astype(np.float32)
    weights[2, 32:64] = 0
    packed, scale = int4.quantise(weights)
    assert (packed.dtype, scale.dtype, scale.shape) == (np.int32, ml_dtypes.bfloat16, (6, 3))
    largest = np.abs(weights.reshape(6, 3, 32)).max(-1)
    np.testing.assert_array_equal(scale, (largest / 7).astype(ml_dtypes.bfloat16))
    given = {"weight": torch.from_numpy(weights), "weight_scale": torch.from_numpy(scale.astype(np.float32))}
    given["weight_scale"][2, 1] = 1  # The library divides by it.
    theirs = PackedQuantizationCompressor.compress(given, SCHEME)
    np.testing.assert_array_equal(packed, theirs["weight_packed"].numpy())
    errors = np.abs(int4.dequantise(packed, scale, np.float32) - weights).reshape(6, 3, 32).max(-1)
    assert (errors <= 0.51 * scale.astype(np.float32)).all()


def test_packing_inverts_unpacking():
    packed = np.random.default_rng(2).integers(-(2**31), 2**31, (5, 7), dtype=np.int32)
    np.testing.assert_array_equal(int4.pack(int4.unpack(packed)), packed)
