"""Targets against transformers in float32: through prefill chunks, decode steps and tree verification over pages."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from jax.sharding import NamedSharding

from jaxspec.model.checkpoint.loading import load_target
from jaxspec.model.families import llama
from jaxspec.model.families.config import ModelConfig, read_model_config
from jaxspec.model.layers.parameters import fill
from jaxspec.model.text.tokenizer import Tokenizer
from jaxspec.sharding.mesh import make_mesh
from tests.support.sessions import PARENTS, compare


def ported(config: ModelConfig, weights: Callable[[str], np.ndarray]) -> llama.LlamaForCausalLM:
    """Our module with the tensors that `weights` gives for Hugging Face names."""
    layout, mesh = llama.layout_of(config, 1), make_mesh(1)
    return fill(
        lambda: llama.LlamaForCausalLM(config, layout, jnp.float32),
        lambda spec: jax.device_put(
            weights(llama.tensor_names(spec.name)), NamedSharding(mesh, layout.spec(spec.axes))
        ),
    )


def tiny_published(family: str, tied: bool) -> Any:
    torch.manual_seed(0)
    common = {
        "vocab_size": 50,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tied,
        "initializer_range": 0.4,
        "attn_implementation": "eager",
    }
    if family == "qwen3":
        config = transformers.Qwen3Config(head_dim=10, rope_theta=1e6, rms_norm_eps=1e-6, **common)
        model = transformers.Qwen3ForCausalLM(config)
    else:
        scaling = {
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        }
        config = transformers.LlamaConfig(head_dim=16, rms_norm_eps=1e-5, rope_parameters=scaling, **common)
        model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(1 + 0.2 * torch.randn_like(parameter))
    return model.eval()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_tiny_models_agree_with_transformers(family: str, tied: bool) -> None:
    published = tiny_published(family, tied)
    raw = published.config.to_dict() | {"architectures": [type(published).__name__]}
    config = read_model_config(raw)
    assert (config.family, config.tie_word_embeddings, config.qk_norm) == (family, tied, family == "qwen3")
    state = {name: tensor.numpy() for name, tensor in published.state_dict().items()}
    target = ported(config, state.__getitem__)
    tokens = np.random.default_rng(2).integers(0, config.vocab_size, 150)
    compare(target, published, tokens, taps=(0, 1), chunk=64, steps=3)


def test_the_scaled_frequencies_of_the_tiny_llama_lie_in_all_three_bands() -> None:
    config = read_model_config(tiny_published("llama", True).config.to_dict() | {"architectures": ["LlamaForCausalLM"]})
    plain = 1e4 ** -(np.arange(0, 16, 2) / 16)
    wavelength = 2 * np.pi / plain
    ratio = config.rope.inverse_frequencies(16) / plain
    kept, stretched = wavelength < 128 / 4, wavelength > 128 / 1
    np.testing.assert_allclose(ratio[kept], 1, rtol=1e-6)
    np.testing.assert_allclose(ratio[stretched], 1 / 8, rtol=1e-6)
    between = ratio[~kept & ~stretched]
    assert ((between > 1 / 8) & (between < 1)).all()
    assert min(kept.sum(), stretched.sum(), len(between)) >= 1
    # 150 positions turn a pair of the middle band (wavelength 63) more than twice.
    assert wavelength[~kept & ~stretched].max() * 2 < 150


def test_a_wrong_rope_is_far_outside_the_tolerance() -> None:
    """The comparison has teeth: without the scaling it fails."""
    published = tiny_published("llama", True)
    raw = published.config.to_dict() | {"architectures": ["LlamaForCausalLM"]}
    raw["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4}
    state = {name: tensor.numpy() for name, tensor in published.state_dict().items()}
    tokens = np.random.default_rng(2).integers(0, 50, 150)
    with pytest.raises(AssertionError):
        compare(ported(read_model_config(raw), state.__getitem__), published, tokens, (0, 1), chunk=64, steps=3)


def test_the_real_smollm2_agrees_with_transformers(smollm2_gguf: Path, smollm2_checkpoint: Path) -> None:
    """transformers reads the GGUF file with its own code, so names and the Q/K row order are tested too."""
    target = load_target(smollm2_checkpoint, make_mesh(1))
    assert target.embed_tokens.weight.dtype == jnp.float32
    published = transformers.AutoModelForCausalLM.from_pretrained(
        smollm2_gguf.parent, gguf_file=smollm2_gguf.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    chat = (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nWhy is the sky blue? Answer in "
        "two sentences, and name the physicist who explained it.<|im_end|>\n<|im_start|>assistant\nThe sky"
    )
    tokens = np.array(Tokenizer.from_checkpoint(smollm2_checkpoint).encode(chat))
    assert 40 <= len(tokens) <= 80
    # Steps share the tree's program: 30 layers take long to compile.
    compare(target, published, tokens, taps=(1, 15, 27), chunk=32, steps=3, step_rows=len(PARENTS))
