"""Routed experts, in three formats and two ways, against dequantised twins computed without our code."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.model.families import kimi
from jaxspec.model.families.kimi_config import KimiConfig, read_kimi_config
from jaxspec.model.layers.experts import ExpertLinear, Experts, make_tiles
from jaxspec.model.layers.parameters import WeightSpec, fill
from jaxspec.model.quantization import fp8
from jaxspec.model.quantization.config import QuantizationConfig
from jaxspec.model.quantization.fp8 import FP8
from jaxspec.model.quantization.int4 import INT4
from jaxspec.model.quantization.scheme import UNQUANTISED
from tests.support.kimi_models import SIZES, random_weight

EXPERTS, HIDDEN, INNER = 5, 160, 96  # 160 columns: one block of 128 and a part of one
CONFIG = read_kimi_config(SIZES | {"n_routed_experts": EXPERTS, "hidden_size": HIDDEN, "moe_intermediate_size": INNER})
ALL = (UNQUANTISED, INT4, FP8)


def config(scheme: Any) -> KimiConfig:
    return dataclasses.replace(CONFIG, quantization=QuantizationConfig(scheme))


def leaf(spec: WeightSpec) -> jax.Array:
    if spec.dtype == jnp.float8_e4m3fn:
        values = np.random.default_rng(1).normal(0, 1, spec.shape)
    elif spec.name.endswith("scale_inv"):
        values = np.random.default_rng(2).uniform(0.05, 0.2, spec.shape)
    else:
        values = random_weight(spec.name, spec.shape, spec.dtype)
    return jnp.asarray(values, spec.dtype)


def experts(scheme: Any, dtype: Any = jnp.float32) -> Experts:
    return fill(lambda: Experts(kimi.experts_config(config(scheme)), kimi.layout_of(config(scheme), 1), dtype), leaf)


def twin(layer: ExpertLinear) -> np.ndarray:
    """The layer's weights as the formats' own definitions give them, [experts, out, in]."""
    if layer.scheme == INT4:
        packed = torch.tensor(np.asarray(layer.weight_packed[...]))
        count, outputs, words = packed.shape
        values = unpack_from_int32(packed.reshape(-1, words), 4, torch.Size([count * outputs, words * 8]))
        scale = torch.tensor(np.asarray(layer.weight_scale[...], np.float32)).to(torch.bfloat16)
        scale = scale.reshape(count * outputs, -1).repeat_interleave(32, dim=1)
        return (values.to(torch.bfloat16) * scale).float().numpy().reshape(count, outputs, -1)
    if layer.scheme == FP8:
        codes, scale = np.asarray(layer.weight[...], np.float32), np.asarray(layer.weight_scale_inv[...])
        outputs, inputs = np.indices(codes.shape[1:])
        return codes * scale[:, outputs // 128, inputs // 128]
    return np.asarray(layer.weight[...], np.float32)


def chosen_rows(rows: int, each: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, HIDDEN), np.float32)
    chosen = np.stack([rng.permutation(EXPERTS)[:each] for _ in range(rows)]).astype(np.int32)
    return x, chosen, rng.random((rows, each), np.float32)


def by_hand(module: Experts, x: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """[rows * k, hidden] in float64."""
    gate, up, down = (twin(p).astype(np.float64) for p in (module.gate_proj, module.up_proj, module.down_proj))
    results = []
    for row, picks in zip(x.astype(np.float64), chosen, strict=True):
        for expert in picks:
            g = gate[expert] @ row
            results.append(down[expert] @ (g / (1 + np.exp(-g)) * (up[expert] @ row)))
    return np.array(results)


@pytest.mark.parametrize("scheme", ALL, ids=lambda scheme: scheme.name)
@pytest.mark.parametrize("rows", [1, 40])
def test_both_ways_are_the_dequantised_experts(scheme: Any, rows: int) -> None:
    module = experts(scheme)
    x, chosen, _ = chosen_rows(rows, 3)
    expected = by_hand(module, x, chosen)
    flat, here = jnp.asarray(chosen.reshape(-1)), jnp.asarray(chosen.reshape(-1) != 4)
    ways: tuple[Callable[..., jax.Array], ...] = (module.gathered, module.grouped)
    for way in ways:
        found = np.asarray(jax.jit(way)(x, flat, here))
        mine = np.asarray(here)
        assert np.abs(found[mine] - expected[mine]).max() <= 1e-5 * np.abs(expected).max()
        assert np.isfinite(found).all()


@pytest.mark.parametrize("scheme", [INT4, FP8], ids=lambda scheme: scheme.name)
def test_float32_weights_are_exactly_their_twins(scheme: Any) -> None:
    for layer in (experts(scheme).gate_proj, experts(scheme).down_proj):
        every = jnp.arange(EXPERTS, dtype=jnp.int32)
        np.testing.assert_array_equal(np.asarray(jax.jit(layer.dense)(every)), twin(layer))
        # A row with a single 1 picks one input's weights; gathered, too, nothing is left to rounding.
        for place in (0, 7, 31, INNER - 1):
            x = np.zeros((EXPERTS, twin(layer).shape[2]), np.float32)
            x[:, place] = 1
            np.testing.assert_array_equal(np.asarray(jax.jit(layer.gathered)(x, every)), twin(layer)[:, :, place])


@pytest.mark.parametrize("scheme", ALL, ids=lambda scheme: scheme.name)
def test_bfloat16_activations_stay_close(scheme: Any) -> None:
    module = experts(scheme, jnp.bfloat16)
    x, chosen, weights = chosen_rows(6, 3)
    expected = (by_hand(module, x, chosen).reshape(6, 3, -1) * weights[..., None]).sum(1)
    found = jax.jit(module)(jnp.asarray(x, jnp.bfloat16), chosen, weights)
    assert found.dtype == jnp.bfloat16
    assert np.abs(np.asarray(found, np.float64) - expected).max() <= 0.02 * np.abs(expected).max()


@given(st.integers(0, 2**31), st.sampled_from([(1, 1, 1), (7, 5, 2), (200, 5, 3), (200, 16, 1), (600, 2, 1)]))
@settings(max_examples=40, deadline=None)
def test_every_assignment_has_one_place_in_a_tile_of_its_expert(seed: int, sizes: tuple[int, int, int]) -> None:
    assignments, count, block = sizes
    rng = np.random.default_rng(seed)
    favourites = rng.integers(0, count + 1, rng.integers(1, 4))  # `count`: another device's
    choice = np.where(
        rng.random(assignments) < 0.5, rng.choice(favourites, assignments), rng.integers(0, count + 1, assignments)
    )
    slots, owners = jax.jit(make_tiles, static_argnums=(1, 2))(choice.astype(np.int32), count, block)
    assert slots.shape[:2] == owners.shape
    assert slots.shape[1] == block
    slots, owners = np.asarray(slots), np.asarray(owners)
    assert len(np.unique(slots)) == slots.size
    real = slots < assignments
    assert sorted(slots[real]) == np.flatnonzero(choice < count).tolist()
    np.testing.assert_array_equal(choice[slots[real]], np.broadcast_to(owners[..., None], slots.shape)[real])


def test_fp8_scales_have_a_place_for_the_partial_blocks() -> None:
    assert fp8.scale_shape((EXPERTS, HIDDEN, INNER)) == experts(FP8).down_proj.weight_scale_inv.shape == (5, 2, 1)
