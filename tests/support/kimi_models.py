"""Tiny models of the DeepSeek-V3 family: as transformers makes them, and as ours with the same weights."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from jax.sharding import NamedSharding

from jaxspec.model.families import kimi
from jaxspec.model.families.kimi_config import KimiConfig, read_kimi_config
from jaxspec.model.layers.parameters import WeightSpec, fill
from jaxspec.model.quantization import int4
from jaxspec.model.quantization.config import NOT_QUANTISED
from jaxspec.sharding.layout import DEFAULT_PLACEMENT, Placement
from jaxspec.sharding.mesh import make_mesh

YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
# Widths that nothing else has, so that no two axes can be taken for one another.
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 6,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "rope_parameters": YARN,
    "rope_interleave": True,
    "hidden_act": "silu",
    "attention_bias": False,
    "eos_token_id": 1,
}


def published_text(changes: dict[str, Any]) -> Any:
    """transformers' DeepseekV3ForCausalLM with random weights, norms and biases of every kind."""
    torch.manual_seed(0)
    config = transformers.DeepseekV3Config(
        **SIZES | changes, num_nextn_predict_layers=0, initializer_range=0.3, attn_implementation="eager"
    )
    return disturbed(transformers.DeepseekV3ForCausalLM(config))


def disturbed(model: Any) -> Any:
    """The same model with norms away from 1, router biases away from 0 and router weights that differ."""
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if "norm" in name:
                tensor.copy_(1 + 0.2 * torch.randn_like(tensor))
            elif name.endswith("e_score_correction_bias"):
                tensor.copy_(0.2 * torch.randn_like(tensor))
            elif name.endswith("mlp.gate.weight") or ".experts." in name:
                tensor.copy_(0.3 * torch.randn_like(tensor))
    return model.eval()


def stacked_weights(state: dict[str, Any]) -> Callable[[str], np.ndarray]:
    """Our name of a weight → its values, from a state that keeps gate and up of all experts in one tensor."""

    def of(name: str) -> np.ndarray:
        if ".mlp.experts." not in name:
            return state[kimi.tensor_names(name)[0]].numpy()
        block, projection, _ = name.rsplit(".", 2)
        if projection == "down_proj":
            return state[f"model.{block}.down_proj"].numpy()
        gate, up = np.split(state[f"model.{block}.gate_up_proj"].numpy(), 2, axis=1)
        return gate if projection == "gate_proj" else up

    return of


def ported(
    config: KimiConfig,
    weights: Callable[[str], np.ndarray],
    devices: int = 1,
    placement: Placement = DEFAULT_PLACEMENT,
    dtype: Any = jnp.float32,
) -> kimi.KimiForCausalLM:
    """Our module with the arrays that `weights` gives for its weights' names."""
    layout, mesh = kimi.layout_of(config, devices, placement), make_mesh(devices)

    def leaf(spec: WeightSpec) -> jax.Array:
        values = weights(spec.name)
        assert values.shape == spec.shape, spec
        return jax.device_put(values.astype(spec.dtype), NamedSharding(mesh, layout.spec(spec.axes)))

    return fill(lambda: kimi.KimiForCausalLM(config, layout, dtype), leaf)


# Quantised experts that eight devices divide both ways, in the shape that the tests' tiny drafter was made for.
SPLIT = {
    "num_hidden_layers": 2,
    "moe_intermediate_size": 256,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "quantization_config": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32},
            }
        },
        "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|down)_proj.*"],
    },
}


def random_weight(name: str, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """A weight that depends on its name alone, wide enough for peaked, varied outputs."""
    rng = np.random.default_rng(list(name.encode()))
    if dtype == jnp.int32:
        return rng.integers(-(2**31), 2**31, shape).astype(np.int32)
    if name.endswith("weight_scale"):
        return np.asarray(rng.uniform(0.02, 0.05, shape), jnp.bfloat16)
    if name.endswith("e_score_correction_bias"):
        return rng.normal(0, 0.1, shape)
    if len(shape) == 1:
        return rng.normal(1, 0.2, shape)
    return rng.normal(0, 1.3 / np.sqrt(shape[-1]), shape)


def twin_of(target: kimi.KimiForCausalLM) -> kimi.KimiForCausalLM:
    """The target with its INT4 experts dequantised: bf16(q · scale), as the format defines them."""
    config = dataclasses.replace(target.config, quantization=NOT_QUANTISED)

    def of(name: str) -> np.ndarray:
        layer: Any = target
        for part in name.split(".")[:-1]:
            layer = layer[int(part)] if part.isdigit() else getattr(layer, part)
        if ".mlp.experts." not in name:
            return np.asarray(getattr(layer, name.rsplit(".", 1)[1])[...])
        scale = np.asarray(layer.weight_scale[...], np.float32).repeat(32, axis=-1)
        weights = int4.unpack(np.asarray(layer.weight_packed[...])) * scale
        return weights.astype(jnp.bfloat16).astype(np.float32)

    return ported(config, of)


def tiny_kimi(
    changes: dict[str, Any] | None = None, devices: int = 1, placement: Placement = DEFAULT_PLACEMENT
) -> kimi.KimiForCausalLM:
    """A target of random weights, INT4 experts by default; equal ones on every mesh."""
    config = read_kimi_config(SIZES | (SPLIT if changes is None else changes))
    layout, mesh = kimi.layout_of(config, devices, placement), make_mesh(devices)

    def leaf(spec: WeightSpec) -> jax.Array:
        values = np.asarray(random_weight(spec.name, spec.shape, spec.dtype), spec.dtype)
        return jax.device_put(values, NamedSharding(mesh, layout.spec(spec.axes)))

    return fill(lambda: kimi.KimiForCausalLM(config, layout, jnp.float32), leaf)
