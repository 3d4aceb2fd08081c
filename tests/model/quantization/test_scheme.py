"""A scheme that the code has never seen works from a published file to a model's experts, being in the table alone."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxspec.model.checkpoint.conversion import convert, plan_conversion
from jaxspec.model.checkpoint.loading import load_target
from jaxspec.model.checkpoint.sources import open_source
from jaxspec.model.families import kimi
from jaxspec.model.families.kimi_config import read_kimi_config
from jaxspec.model.layers.experts import ExpertLinear
from jaxspec.model.layers.parameters import fill, weight_specs
from jaxspec.model.quantization.config import SCHEMES, QuantizationConfig, read_quantization
from jaxspec.model.quantization.fp8 import FP8
from jaxspec.model.quantization.int4 import INT4
from jaxspec.model.quantization.scheme import UNQUANTISED, Scheme, StoredArray
from jaxspec.sharding.mesh import make_mesh
from tests.support.kimi_models import SIZES, random_weight


@dataclass(frozen=True)
class Bytes(Scheme):
    """Four signed bytes in an int32, and a scale for each output."""

    name: ClassVar[str] = "bytes"
    unit: ClassVar[int] = 4
    whole_units: ClassVar[bool] = True
    scales: ClassVar[str] = "weight_step"
    section: ClassVar[Mapping[str, Any]] = {"quant_method": "bytes"}
    described: ClassVar[str] = "'bytes'"

    def stored(self, shape, axes, dtype):
        return {
            "weight_bytes": StoredArray((*shape[:-1], shape[-1] // 4), jnp.int32, axes),
            "weight_step": StoredArray((*shape[:-1], 1), jnp.float32, (*axes[:-1], None)),
        }

    def quantise(self, weights):
        step = np.abs(weights).max(-1, keepdims=True).astype(np.float32) / 127
        return {"weight_bytes": np.round(weights / step).astype(np.int8).view(np.int32), "weight_step": step}

    def dequantise(self, arrays, dtype):
        packed = arrays["weight_bytes"]
        values = (packed[..., None] << np.array([24, 16, 8, 0], np.int32)) >> np.int32(24)  # The shift keeps the sign.
        values = values.reshape(*packed.shape[:-1], -1).astype(np.float32)
        return (values * arrays["weight_step"]).astype(dtype)

    def reads(self, section):
        return section.get("quant_method") == "bytes"


BYTES = Bytes()
ALL = [UNQUANTISED, INT4, FP8, BYTES]


@pytest.fixture(autouse=True)
def known(monkeypatch):
    monkeypatch.setitem(SCHEMES, "bytes", BYTES)


@pytest.mark.parametrize("scheme", ALL, ids=lambda scheme: scheme.name)
def test_what_is_quantised_is_stored_multiplied_and_dequantised_alike(scheme):
    draw = np.random.default_rng(0)
    weights = draw.normal(size=(3, 40, 160)).astype(np.float32)
    published = [scheme.quantise(weight) for weight in weights]
    layer = fill(
        lambda: ExpertLinear(weights.shape, ("experts", None, None), scheme, jnp.float32),
        lambda spec: jnp.asarray(np.stack([tensors[spec.name] for tensors in published])),
    )
    expected = np.stack([scheme.dequantise(tensors, np.float32) for tensors in published])
    assert np.abs(expected - weights).max() <= 0.15 * np.abs(weights).max()
    experts = jnp.array([2, 0, 2, 1], jnp.int32)
    np.testing.assert_array_equal(jax.jit(layer.dense)(experts), expected[experts])
    x = draw.normal(size=(4, 160)).astype(np.float32)
    found = jax.jit(layer.gathered)(x, experts)
    np.testing.assert_allclose(found, np.einsum("noi,ni->no", expected[experts], x), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("scheme", ALL, ids=lambda scheme: scheme.name)
def test_published_tensors_are_as_they_have_to_be(scheme):
    shape = (160, 256)
    tensors = {f"x.{name}": array for name, array in scheme.quantise(np.ones(shape, np.float32)).items()}
    needs = {}
    for name, array in scheme.stored(shape, (None, None), jnp.float32).items():
        needs |= scheme.published(f"x.{name}", array.shape, jnp.dtype(array.dtype).name)
    assert needs.keys() == tensors.keys()
    for name, need in needs.items():
        assert tensors[name].shape == need.shape
        assert tensors[name].dtype.name in need.dtypes
        assert need.values is None or tuple(tensors[name].tolist()) == need.values


@pytest.mark.parametrize("scheme", [INT4, FP8, BYTES], ids=lambda scheme: scheme.name)
def test_a_scheme_reads_the_section_that_it_writes(scheme):
    assert read_quantization({"quantization_config": scheme.section}).scheme == scheme
    assert scheme.scales in scheme.stored((64, 64), (None, None), jnp.float32)


def test_what_no_scheme_reads_is_refused_with_all_that_are_read():
    with pytest.raises(
        ValueError,
        match=r"quant_method: found 'awq', expected 'compressed-tensors' \(pack-quantized INT4\) or 'fp8' or",
    ):
        read_quantization({"quantization_config": {"quant_method": "awq"}})
    assert read_quantization({}, {}) == QuantizationConfig()
    assert not QuantizationConfig().quantizes("lm_head")


def test_from_a_published_file_to_the_experts(tmp_path):
    """Nothing but the table of schemes knows of this one; a converted model's experts stay in it."""
    raw = SIZES | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "num_hidden_layers": 2,
        "dtype": "float32",
        "quantization_config": dict(BYTES.section),
    }
    config = read_kimi_config(raw)
    assert (config.quantization.scheme, config.expert_units) == (BYTES, SIZES["moe_intermediate_size"] // 4)
    layout = kimi.layout_of(config, 1)
    tensors: dict[str, np.ndarray] = {}
    expected = {}
    for spec in weight_specs(lambda: kimi.KimiForCausalLM(config, layout, jnp.float32)):
        published = kimi.tensor_names(spec.name)[0]
        if "{}" not in published:
            tensors[published] = random_weight(spec.name, spec.shape, spec.dtype).astype(np.float32)
        elif published.endswith(".weight_bytes"):
            module = spec.name.removesuffix(".weight_bytes")
            whole = random_weight(module, (*spec.shape[:-1], spec.shape[-1] * 4), np.float32)
            quantised = [BYTES.quantise(weight) for weight in whole]
            for expert, arrays in enumerate(quantised):
                prefix = published.format(expert).removesuffix("weight_bytes")
                tensors |= {prefix + name: array for name, array in arrays.items()}
            expected[module] = np.stack([BYTES.dequantise(arrays, np.float32) for arrays in quantised])
    folder = tmp_path / "published"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(tensors, folder / "model.safetensors")

    source = open_source(folder)
    convert(source, plan_conversion(source), tmp_path / "converted")
    for devices in (1, 2):
        target = load_target(tmp_path / "converted", make_mesh(devices), dtype=ml_dtypes.bfloat16)
        experts = target.layers[1].mlp.experts
        for name in ("gate_proj", "up_proj", "down_proj"):
            layer = getattr(experts, name)
            assert (layer.weight_bytes.dtype, layer.names) == (jnp.int32, ("weight_bytes", "weight_step"))
            arrays = {part: np.asarray(getattr(layer, part)[...]) for part in layer.names}
            found = BYTES.dequantise(arrays, np.float32)
            np.testing.assert_allclose(found, expected[f"layers.1.mlp.experts.{name}"], rtol=0.01, atol=1e-6)
