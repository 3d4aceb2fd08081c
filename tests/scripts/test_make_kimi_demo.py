"""A small Llama rewritten in Kimi's form: the same logits, in transformers' own DeepSeek-V3 too."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

from model.sources import open_source
from scripts.make_kimi_demo import Form, write_kimi_demo

# Six heads over three, and half an MLP that is no multiple of anything: both are padded.
LLAMA = {
    "vocab_size": 80,
    "hidden_size": 96,
    "intermediate_size": 74,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-9,  # All that is not exact.
    "rope_theta": 500.0,
    "tie_word_embeddings": True,
}
TOKENS = torch.arange(24)[None] * 37 % 80


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> tuple[Path, transformers.LlamaForCausalLM]:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, 1 if "norm" in name else 0, 0.2)
    folder = tmp_path_factory.mktemp("llama")
    model.save_pretrained(folder)
    return folder, model.eval()


def logits(model: transformers.PreTrainedModel) -> np.ndarray:
    with torch.no_grad():
        return model(TOKENS).logits[0].numpy()


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    """Every tensor as the index lists it, without the wrapper's prefix."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = {file: load_file(folder / file) for file in sorted(set(index["weight_map"].values()))}
    return {name.removeprefix("language_model."): files[file][name] for name, file in index["weight_map"].items()}


def in_transformers(folder: Path, flat: Path) -> transformers.DeepseekV3ForCausalLM:
    """The text model, loaded by transformers from a flat folder of the same tensors."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())["text_config"]
    frequencies = config["rope_scaling"].pop("inv_freq")
    flat.mkdir()
    (flat / "config.json").write_text(json.dumps(config | {"model_type": "deepseek_v3"}))
    save_file(tensors_of(folder), flat / "model.safetensors", {"format": "pt"})
    model = transformers.DeepseekV3ForCausalLM.from_pretrained(flat, dtype=torch.float32)
    model.model.rotary_emb.inv_freq = torch.tensor(frequencies)
    return model.eval()


def write(llama, folder: Path, **form: Any) -> Path:
    write_kimi_demo(open_source(llama[0]), folder, Form(**form))
    return folder


def test_it_says_what_the_llama_says(llama, tmp_path):
    theirs = in_transformers(write(llama, tmp_path / "kimi"), tmp_path / "flat")
    expected = logits(llama[1])
    assert expected.std() > 0.5
    np.testing.assert_allclose(logits(theirs), expected, atol=2e-4)
    routed = {name: x for name, x in tensors_of(tmp_path / "kimi").items() if ".experts.3." in name}
    assert all(np.abs(x).max() > 0.1 for x in routed.values())
    assert len(routed) == 3
