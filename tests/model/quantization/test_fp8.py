"""Eight-bit weights in blocks, partial ones at the edges, against PyTorch's float8 and a loop over weights."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

from jaxspec.model.quantization import fp8


def by_the_definition(weight: np.ndarray, scale_inv: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """W[o, i] = float(w8[o, i]) · scale_inv[o // rows, i // columns], one weight after the other."""
    floats = torch.from_numpy(weight.view(np.uint8).copy()).view(torch.float8_e4m3fn).float().numpy()
    out = np.empty(weight.shape, np.float32)
    for o, i in np.ndindex(weight.shape):
        out[o, i] = floats[o, i] * scale_inv[o // block[0], i // block[1]]
    return out


@pytest.mark.parametrize(
    ("shape", "block", "scales"),
    [
        ((130, 257), (128, 128), (2, 3)),  # Edges of 2 rows and of 1 column.
        ((128, 256), (128, 128), (1, 2)),
        ((24, 40), (128, 128), (1, 1)),  # Smaller than a block.
        ((9, 10), (4, 3), (3, 4)),
    ],
)
def test_dequantised_by_the_definition(shape, block, scales):
    rng = np.random.default_rng(0)
    patterns = rng.integers(0, 256, shape, dtype=np.uint8)
    patterns[(patterns & 0x7F) == 0x7F] = 0  # Not a number.
    weight = patterns.view(ml_dtypes.float8_e4m3fn)
    scale_inv = (rng.standard_normal(scales) * 10.0 ** rng.integers(-4, 3, scales)).astype(np.float32)
    assert fp8.scale_shape(shape, block) == scales
    expected = by_the_definition(weight, scale_inv, block)
    ours = fp8.dequantise(weight, scale_inv, np.float32, block)
    np.testing.assert_array_equal(ours, expected)
    traced = fp8.dequantise(jnp.asarray(weight), jnp.asarray(scale_inv), jnp.bfloat16, block)
    np.testing.assert_array_equal(traced, expected.astype(ml_dtypes.bfloat16))


def test_experts_in_a_stack_are_dequantised_one_by_one():
    rng = np.random.default_rng(1)
    weight = rng.standard_normal((3, 70, 200)).astype(ml_dtypes.float8_e4m3fn)
    scale_inv = rng.random((3, 1, 2)).astype(np.float32)
    stacked = fp8.dequantise(weight, scale_inv, np.float32)
    for expert in range(3):
        np.testing.assert_array_equal(stacked[expert], by_the_definition(weight[expert], scale_inv[expert], (128, 128)))


def test_quantising_keeps_three_bits_and_the_largest_weight():
    weight = np.random.default_rng(2).standard_normal((200, 130)).astype(np.float32)
    weight[128:, 128:] = 0
    weight[5, 7] = -90
    quantised, scale_inv = fp8.quantise(weight)
    assert (quantised.dtype, scale_inv.dtype, scale_inv.shape) == (ml_dtypes.float8_e4m3fn, np.float32, (2, 2))
    again = fp8.dequantise(quantised, scale_inv, np.float32)
    assert again[5, 7] == pytest.approx(-90, rel=1e-6)
    assert not again[128:, 128:].any()
    # Three bits of mantissa; below the smallest normal number, 2**-6, steps of 2**-9.
    step = np.maximum(np.abs(weight) * 2**-4, 2**-10 * scale_inv.repeat(128, 0)[:200].repeat(128, 1)[:, :130])
    assert (np.abs(again - weight) <= step * 1.001).all()
