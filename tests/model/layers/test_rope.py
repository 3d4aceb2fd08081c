"""Frequencies and amplitudes of YaRN: published check values, and transformers on random settings."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from jaxspec.model.families.config import read_dflash_config
from jaxspec.model.families.rope_config import read_rope
from jaxspec.model.fields import Fields
from jaxspec.model.layers.attention import rotary_tables
from jaxspec.model.layers.rope import RopeConfig

K2_5 = RopeConfig(
    50000.0, "yarn", 64.0, original_max_position_embeddings=4096, beta_fast=32, beta_slow=1, mscale=1, mscale_all_dim=1
)
K2_INSTRUCT = dataclasses.replace(K2_5, factor=32.0, beta_fast=1.0)
# As published for K2.5 and used for K2.6 (six layers, 3.48 B parameters).
KIMI_DRAFTER: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "vocab_size": 163840,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 6,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 64.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 4096,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "max_position_embeddings": 262144,
    "num_target_layers": 61,
    "block_size": 8,
    "dflash_config": {"mask_token_id": 163838, "target_layer_ids": [1, 12, 24, 35, 47, 58]},
}


def test_the_published_frequencies() -> None:
    frequencies = K2_5.inverse_frequencies(64)
    expected = {0: 1, 1: 0.713111, 8: 0.066874, 9: 0.0437767, 14: 0.00446585}
    expected |= {19: 1.58375e-4, 20: 1.80702e-5, 31: 4.38221e-7}
    assert frequencies.dtype == np.float32
    for place, value in expected.items():
        assert frequencies[place] == pytest.approx(value, rel=2e-6)


@pytest.mark.parametrize(
    ("rope", "growth", "scale"), [(K2_5, 1.4158883083, 0.1446796258), (K2_INSTRUCT, 1.3465735903, 0.1308607999)]
)
def test_the_published_softmax_scales(rope: RopeConfig, growth: float, scale: float) -> None:
    assert rope.amplitude == 1.0
    assert math.sqrt(rope.score_factor) == pytest.approx(growth, rel=1e-9)
    assert 192**-0.5 * rope.score_factor == pytest.approx(scale, rel=1e-9)


def test_k2_instruct_jumps_from_kept_to_stretched_within_one_pair() -> None:
    ratio = K2_INSTRUCT.inverse_frequencies(64) / RopeConfig(50000.0).inverse_frequencies(64)
    np.testing.assert_allclose(ratio[:20], 1, rtol=1e-6)
    np.testing.assert_allclose(ratio[20:], 1 / 32, rtol=1e-6)


@given(
    st.sampled_from([8, 32, 64, 128]),
    st.floats(2, 1e6),
    st.floats(1, 64),
    st.integers(4, 8192),
    st.tuples(st.floats(1, 40), st.floats(0.1, 1)),
    st.tuples(st.sampled_from([0.0, 0.5, 1.0, 1.3]), st.sampled_from([0.0, 0.7, 1.0])),
    st.booleans(),
    st.sampled_from([None, 1.0, 1.4158883]),
)
@settings(max_examples=60, deadline=None)
def test_yarn_is_what_transformers_makes_of_the_same_settings(
    head_dim: int,
    theta: float,
    factor: float,
    trained: int,
    betas: tuple[float, float],
    mscales: tuple[float, float],
    truncate: bool,
    attention_factor: float | None,
) -> None:
    parameters: dict[str, Any] = {
        "rope_type": "yarn",
        "rope_theta": theta,
        "factor": factor,
        "original_max_position_embeddings": trained,
        "beta_fast": betas[0],
        "beta_slow": betas[1],
        "truncate": truncate,
    }
    parameters |= {name: value for name, value in zip(("mscale", "mscale_all_dim"), mscales, strict=True) if value}
    if attention_factor is not None:
        parameters["attention_factor"] = attention_factor
    published = transformers.Qwen3Config(
        head_dim=head_dim, num_attention_heads=2, max_position_embeddings=trained * 64, rope_parameters=parameters
    )
    frequencies, amplitude = ROPE_INIT_FUNCTIONS["yarn"](published, "cpu")
    rope = read_rope(Fields({"rope_parameters": parameters}), head_dim)
    np.testing.assert_allclose(rope.inverse_frequencies(head_dim), frequencies.numpy(), rtol=2e-5)
    assert rope.amplitude == pytest.approx(amplitude, rel=1e-12)


@pytest.mark.parametrize(
    ("changes", "amplitude"),
    [
        ({}, 1.0),
        ({"mscale": None, "mscale_all_dim": None}, 0.1 * math.log(64) + 1),
        ({"attention_factor": 1.4158883}, 1.4158883),
        ({"attention_factor": 1.4158883, "mscale": None}, 1.4158883),
    ],
)
def test_the_kimi_drafters_amplitude_can_be_set(changes: dict[str, Any], amplitude: float) -> None:
    drafter = read_dflash_config(KIMI_DRAFTER | {"rope_scaling": KIMI_DRAFTER["rope_scaling"] | changes})
    assert (drafter.depth, drafter.mask_token_id, drafter.target_layer_ids) == (7, 163838, (1, 12, 24, 35, 47, 58))
    assert drafter.windows == (0,) * 6
    assert drafter.rope.amplitude == pytest.approx(amplitude, rel=1e-9)
    published = transformers.Qwen3Config(
        **{key: KIMI_DRAFTER[key] for key in ("hidden_size", "num_attention_heads", "head_dim")},
        max_position_embeddings=262144,
        rope_parameters={"rope_type": "yarn", "rope_theta": 50000.0}
        | {k: v for k, v in (KIMI_DRAFTER["rope_scaling"] | changes).items() if k != "type" and v is not None},
    )
    positions = np.array([[0, 1, 77, 3000]], np.int32)
    cos, sin = jax.jit(lambda p: rotary_tables(p, drafter.rope, 128))(jnp.asarray(positions))
    theirs = Qwen3RotaryEmbedding(published)(torch.zeros(1), torch.tensor(positions))
    for ours, expected in zip((cos, sin), theirs, strict=True):
        np.testing.assert_allclose(ours[0, :, 0], expected[0, :, :64].numpy(), rtol=1e-5, atol=2e-4)
