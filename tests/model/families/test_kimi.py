"""Kimi and DeepSeek-V3 against transformers in float32: prefill chunks, decode steps and trees over pages."""

from typing import Any

import numpy as np
import pytest
import torch
import transformers

from jaxspec.model.families.kimi_config import read_kimi_config
from jaxspec.model.families.registry import family_of
from tests.support.kimi_models import SIZES, YARN, disturbed, ported, published_text, stacked_weights
from tests.support.sessions import compare

INVERSE_FREQUENCIES = [1.0, 0.3, 0.07, 0.004]
# Between them they set every field to another value than the first has.
VARIANTS: dict[str, dict[str, Any]] = {
    "kimi": {},
    "deepseek": {
        "n_group": 4,
        "topk_group": 2,
        "q_lora_rank": None,
        "rope_interleave": False,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "first_k_dense_replace": 0,
        "num_experts_per_tok": 4,
        "routed_scaling_factor": 0.9,
        "rms_norm_eps": 1e-2,
        "num_hidden_layers": 2,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e3},
    },
    "scaled": {"first_k_dense_replace": 2, "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.2}},
}


def check(published: Any, config: Any, state: dict[str, Any]) -> None:
    target = ported(config, stacked_weights(state))
    attention = target.layers[0].self_attn
    assert attention.absorbs(6), "decoding and trees"
    assert not attention.absorbs(48), "prefill"
    tokens = np.random.default_rng(2).integers(2, config.vocab_size - 2, 100)
    compare(target, published, tokens, taps=tuple(range(config.num_hidden_layers - 1)), chunk=48, steps=2)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_text_model_agrees_with_transformers(variant: str) -> None:
    published = published_text(VARIANTS[variant])
    raw = published.config.to_dict() | {"architectures": ["DeepseekV3ForCausalLM"]}
    if variant == "scaled":  # What transformers' config can't say is set in its modules.
        raw["latent_norm_eps"] = 0.03
        raw["rope_parameters"] = raw["rope_parameters"] | {"inv_freq": INVERSE_FREQUENCIES}
        published.model.rotary_emb.inv_freq.copy_(torch.tensor(INVERSE_FREQUENCIES))
        for layer in published.model.layers:
            layer.self_attn.q_a_layernorm.variance_epsilon = layer.self_attn.kv_a_layernorm.variance_epsilon = 0.03
    config = read_kimi_config(raw)
    assert family_of(raw) == config.family == "kimi"
    check(published, config, published.state_dict())


def test_the_wrapped_text_model_agrees_with_transformers() -> None:
    """K2.5 and K2.6: the config inside `text_config`, the weights beside a vision tower's."""
    torch.manual_seed(0)
    text = SIZES | {"model_type": "kimi_k2", "num_hidden_layers": 2, "num_nextn_predict_layers": 0}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Kimi_K25Config(
        text_config=text | {"initializer_range": 0.3},
        vision_config=vision,
        projection_hidden_size=16,
        image_token_id=62,
        video_token_id=63,
        tie_word_embeddings=False,
        attn_implementation="eager",
    )
    published = disturbed(transformers.Kimi_K25ForConditionalGeneration(config))
    raw = published.config.to_dict() | {"architectures": ["Kimi_K25ForConditionalGeneration"]}
    assert family_of(raw) == "kimi"
    state = {name.replace("model.language_model.", "model."): value for name, value in published.state_dict().items()}
    check(published, read_kimi_config(raw), state)
