"""A small Llama rewritten in Kimi's form says the same, in transformers' DeepSeek-V3 and on eight devices of ours."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import save_file
from typer.testing import CliRunner

from jaxspec.config import EngineConfig, SamplingParams, SpeculationConfig
from jaxspec.engine.engine import Engine
from jaxspec.model.checkpoint.loading import load_target
from jaxspec.model.checkpoint.sources import open_source
from jaxspec.model.quantization import fp8, int4
from jaxspec.serve.cli.demo_model import converted
from jaxspec.sharding.mesh import make_mesh
from scripts.make_kimi_demo import Form, app, write_kimi_demo
from tests.support.published import write_byte_tokenizer, write_model
from tests.support.sessions import compare

# Six heads over three, and half an MLP that is no multiple of anything: both are padded.
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 258,
    "hidden_size": 96,
    "intermediate_size": 74,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-9,  # All that is not exact.
    "rope_theta": 500.0,
    "tie_word_embeddings": True,
    "eos_token_id": 257,
}
DRAFTER = LLAMA | {
    "architectures": ["DFlashDraftModel"],
    "num_hidden_layers": 1,
    "num_target_layers": 2,
    "block_size": 4,
    "dflash_config": {"mask_token_id": 0, "target_layer_ids": [0]},
}
PROMPT = list(range(40, 60))
HEADS, ROTATED, PLAIN, HIDDEN = 8, 24, 8, 96


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    folder = write_model(tmp_path_factory.mktemp("published") / "llama", LLAMA, scale=0.2)
    write_byte_tokenizer(folder, {"eos_token": "</s>"})
    return folder


@pytest.fixture(scope="module")
def forms(tmp_path_factory, llama) -> dict[str, Path]:
    """The Llama in every form."""
    root = tmp_path_factory.mktemp("forms")
    settings: dict[str, dict[str, Any]] = {
        "plain": {},
        "perturbed": {"perturbed": True},
        "int4": {"quantised": "int4"},
        "int4 twin": {"quantised": "int4", "dequantised": True},
        "fp8": {"quantised": "fp8"},
        "fp8 twin": {"quantised": "fp8", "dequantised": True},
    }
    for name, form in settings.items():
        write_kimi_demo(open_source(llama), root / name, Form(**form))
    return {name: root / name for name in settings}


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    """Every tensor, without the wrapper's prefix that all of them carry."""
    source = open_source(folder)
    assert all(name.startswith("language_model.") for name in source.tensors)
    return {name.removeprefix("language_model."): source.read(name) for name in source.tensors}


def logits(model: transformers.PreTrainedModel) -> np.ndarray:
    with torch.no_grad():
        return model.eval()(torch.tensor([PROMPT])).logits[0].numpy()


def in_transformers(folder: Path, flat: Path) -> transformers.DeepseekV3ForCausalLM:
    """The text model as transformers loads it from a flat folder of the same tensors."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())["text_config"]
    frequencies = config["rope_scaling"].pop("inv_freq")
    flat.mkdir()
    (flat / "config.json").write_text(json.dumps(config | {"model_type": "deepseek_v3"}))
    save_file(tensors_of(folder), flat / "model.safetensors", {"format": "pt"})
    model = transformers.DeepseekV3ForCausalLM.from_pretrained(flat, dtype=torch.float32)
    model.model.rotary_emb.inv_freq = torch.tensor(frequencies)
    return model


def test_transformers_finds_the_llama_in_it(llama, forms, tmp_path):
    expected = logits(transformers.LlamaForCausalLM.from_pretrained(llama, dtype=torch.float32))
    assert expected.std() > 0.5
    np.testing.assert_allclose(logits(in_transformers(forms["plain"], tmp_path / "plain")), expected, atol=2e-4)
    perturbed = logits(in_transformers(forms["perturbed"], tmp_path / "perturbed"))
    assert np.abs(perturbed - expected).max() > 0.5


def test_what_is_zero_and_what_is_not(forms):
    for name in ("plain", "perturbed"):
        tensors = tensors_of(forms[name])
        query = tensors["model.layers.1.self_attn.q_b_proj.weight"].reshape(HEADS, PLAIN + ROTATED, HIDDEN)
        keys = tensors["model.layers.1.self_attn.kv_b_proj.weight"].reshape(HEADS, 2 * PLAIN, HIDDEN)
        assert not query[6:].any()
        assert not keys[6:].any()
        assert query[:6, :PLAIN].any() == keys[:6, :PLAIN].any() == (name == "perturbed")
        up = [tensors[f"model.layers.1.mlp.experts.{expert}.up_proj.weight"] for expert in range(8)]
        assert up[0].shape == (40, HIDDEN)
        assert not up[0][37:].any()
        assert np.array_equal(up[0], up[5]) == (name == "plain")
        assert not np.array_equal(up[0][:37], tensors["model.layers.1.mlp.shared_experts.up_proj.weight"][:37])


def test_quantised_weights_stand_for_their_twins(forms):
    four, twin = tensors_of(forms["int4"]), tensors_of(forms["int4 twin"])
    name = "model.layers.1.mlp.experts.3.down_proj.weight"
    assert four[f"{name}_packed"].shape == (HIDDEN, 256 // 8)  # Eight groups of 32.
    assert four[f"{name}_shape"].tolist() == [HIDDEN, 256]
    weights = int4.dequantise(four[f"{name}_packed"], four[f"{name}_scale"], ml_dtypes.bfloat16)
    np.testing.assert_array_equal(twin[name], weights.astype(np.float32))
    plain = tensors_of(forms["plain"])
    np.testing.assert_allclose(weights[:, :37].astype(np.float32), plain[name][:, :37], atol=0.1)
    assert {key for key in four if "experts." not in key} == {key for key in plain if "experts." not in key}

    eight, twin = tensors_of(forms["fp8"]), tensors_of(forms["fp8 twin"])
    linear = {key for key in plain if key.endswith("_proj.weight") or key.endswith("with_mqa.weight")}
    assert {key.removesuffix("_scale_inv") for key in eight if key.endswith("_scale_inv")} == linear
    assert eight[name].shape == (HIDDEN, 1024)  # Eight blocks of 128.
    for key in (name, "model.layers.0.self_attn.q_a_proj.weight"):
        weights = fp8.dequantise(eight[key], eight[f"{key}_scale_inv"], np.float32)
        np.testing.assert_array_equal(twin[key], weights)


def test_differing_experts_agree_with_transformers(forms, tmp_path):
    """Chunks, steps and a tree, where every choice of experts and every unrotated value shows."""
    published = in_transformers(forms["perturbed"], tmp_path / "flat").eval()
    target = load_target(converted(forms["perturbed"], tmp_path), make_mesh(1))
    tokens = np.random.default_rng(0).integers(0, 256, 40)
    compare(target, published, tokens, taps=(0,), chunk=24, steps=2)


def answer(target: Path, drafter: Path | None, devices: int, tokens: int, budget: int) -> Any:
    engine = Engine.from_checkpoints(
        target,
        drafter,
        config=EngineConfig(slots=1, max_context=128, devices=devices),
        speculation=SpeculationConfig(budget, top_k_cap=32),
    )
    return engine.generate([PROMPT], SamplingParams(temperature=0, max_tokens=tokens))[0]


def test_eight_devices_speak_as_the_llama_and_as_their_twin(forms, llama, tmp_path):
    """The whole path: published folder, conversion, slices on eight devices, drafts, trees; greedy, float32."""
    drafter = converted(write_model(tmp_path / "drafter", DRAFTER, scale=0.2), tmp_path)
    plain, four, twin = (converted(forms[name], tmp_path) for name in ("plain", "int4", "int4 twin"))
    found = answer(plain, drafter, devices=8, tokens=64, budget=32)
    assert found.tokens == answer(converted(llama, tmp_path), None, devices=1, tokens=64, budget=0).tokens
    assert len(set(found.tokens)) > 4
    assert sum(found.statistics.accepted_lengths[1:]) > 0, "no draft was ever accepted"
    found = answer(four, drafter, devices=8, tokens=16, budget=6)
    assert found.tokens == answer(twin, None, devices=1, tokens=16, budget=0).tokens


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--quantised", "int8"], "--quantised: found 'int8', expected one of plain, int4, fp8"),
        (["--dtype", "float64"], "--dtype: found 'float64', expected one of float32, bfloat16"),
        (["--source", "nowhere"], "nowhere: found nothing there"),
    ],
)
def test_bad_options_are_one_line(tmp_path, options, message):
    result = CliRunner().invoke(app, ["--output", str(tmp_path / "out"), *options])
    assert result.exit_code == 2
    assert len(result.stderr.strip().splitlines()) == 1
    assert message in result.stderr
    assert not (tmp_path / "out").exists()
