"""Kimi and DeepSeek-V3 against transformers in float32: prefill chunks, decode steps and trees over pages."""

from typing import Any

import numpy as np
import pytest

from model.families import family_of
from model.kimi_config import read_kimi_config
from tests.kimi_models import YARN, ported, published_text, stacked_weights
from tests.sessions import compare

pytestmark = pytest.mark.usefixtures("quick_compile")

# Between them they set every field to another value than the first.
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
        "rms_norm_eps": 1e-6,
        "num_hidden_layers": 2,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e3},
    },
    "mscale": {
        "first_k_dense_replace": 2,
        "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.2, "beta_fast": 1.0, "factor": 4.0},
    },
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_tiny_models_agree_with_transformers(variant: str) -> None:
    published = published_text(VARIANTS[variant])
    raw = published.config.to_dict() | {"architectures": ["DeepseekV3ForCausalLM"]}
    config = read_kimi_config(raw)
    assert family_of(raw) == config.family == "kimi"
    target = ported(config, stacked_weights(published.state_dict()))
    attention = target.layers[0].self_attn
    assert attention.absorbs(6), "decoding and trees"
    assert not attention.absorbs(48), "prefill"
    tokens = np.random.default_rng(2).integers(0, config.vocab_size, 100)
    compare(target, published, tokens, taps=tuple(range(config.num_hidden_layers - 1)), chunk=48, steps=2)
