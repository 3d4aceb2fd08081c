"""Configs of the DeepSeek-V3 family: both published shapes are read, and what is not implemented is refused by name."""

import copy
import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxspec.model.families import kimi
from jaxspec.model.families.kimi_config import KimiConfig, read_kimi_config
from jaxspec.model.families.registry import family_of
from jaxspec.model.quantization.fp8 import FP8
from jaxspec.model.quantization.int4 import INT4
from jaxspec.model.quantization.scheme import UNQUANTISED
from jaxspec.sharding.layout import Placement

TEXT: dict[str, Any] = {
    "model_type": "kimi_k2",
    "vocab_size": 163840,
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.827,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 64.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "max_position_embeddings": 262144,
    "attention_bias": False,
    "num_nextn_predict_layers": 0,
    "tie_word_embeddings": False,
    "eos_token_id": 163586,
    "dtype": "bfloat16",
    "do_sample": False,
    "top_k": 50,
    "quantization_config": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    "num_bits": 4,
                    "type": "int",
                    "symmetric": True,
                    "strategy": "group",
                    "group_size": 32,
                    "dynamic": False,
                    "actorder": None,
                    "observer": "minmax",
                },
                "input_activations": None,
                "output_activations": None,
            }
        },
        "ignore": [
            "lm_head",
            "re:.*self_attn.*",
            "re:.*shared_experts.*",
            r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
        ],
    },
}
K2_6 = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "model_type": "kimi_k25",
    "tie_word_embeddings": False,
    "text_config": TEXT,
    "vision_config": {"patch_size": 14},
}
FP8_SECTION = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
K2_INSTRUCT = {key: value for key, value in TEXT.items() if key not in ("dtype", "quantization_config")} | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "torch_dtype": "bfloat16",
    "quantization_config": FP8_SECTION,
    "rms_norm_eps": 1e-6,
    "eos_token_id": [163585, 163586],
}


def with_text(**changes: Any) -> dict[str, Any]:
    return K2_6 | {"text_config": TEXT | changes}


def with_fp8(**changes: Any) -> dict[str, Any]:
    return K2_INSTRUCT | {"quantization_config": FP8_SECTION | changes}


def with_quantization(path: str, value: Any) -> dict[str, Any]:
    """K2.6 with one value of its quantisation, at a path like "config_groups/group_0/weights/num_bits"."""
    section = copy.deepcopy(TEXT["quantization_config"])
    *parents, last = path.split("/")
    place = section
    for parent in parents:
        place = place[parent]
    place[last] = value
    return with_text(quantization_config=section)


def test_k2_6_is_read_from_its_text_config() -> None:
    config = read_kimi_config(K2_6)
    assert family_of(K2_6) == config.family == "kimi"
    assert (config.rms_norm_eps, config.latent_norm_eps, config.eos_token_ids) == (1e-5, 1e-6, (163586,))
    assert (config.quantization.scheme, config.expert_units, config.dtype) == (INT4, 64, "bfloat16")
    assert kimi.attention_config(config).latent_row == 576
    assert config.rope.kind == "yarn"
    assert config.rope_interleave
    quantized = [
        module
        for module in (
            "lm_head",
            "model.layers.0.mlp.gate_proj",
            "model.layers.5.self_attn.o_proj",
            "model.layers.5.mlp.shared_experts.up_proj",
            "model.layers.5.mlp.experts.7.down_proj",
        )
        if config.quantization.quantizes(module)
    ]
    assert quantized == ["model.layers.5.mlp.experts.7.down_proj"]


def test_k2_instruct_is_read_from_the_root() -> None:
    config = read_kimi_config(K2_INSTRUCT)
    assert (config.quantization.scheme, config.expert_units, config.eos_token_ids) == (FP8, 16, (163585, 163586))
    assert config.quantization.quantizes("model.layers.5.self_attn.o_proj")
    assert not config.quantization.quantizes("lm_head")
    plain = read_kimi_config({key: value for key, value in K2_INSTRUCT.items() if key != "quantization_config"})
    assert (plain.quantization.scheme, plain.expert_units) == (UNQUANTISED, 2048)
    assert not plain.quantization.quantizes("model.layers.5.self_attn.o_proj")


def test_newer_spellings_say_the_same() -> None:
    text = {key: value for key, value in TEXT.items() if key not in ("rope_theta", "rope_scaling", "dtype")}
    rope = {key: value for key, value in TEXT["rope_scaling"].items() if key != "type"}
    newer = text | {"rope_parameters": rope | {"rope_type": "yarn", "rope_theta": 50000.0}, "torch_dtype": "bfloat16"}
    assert read_kimi_config(K2_6 | {"text_config": newer | {"model_type": "deepseek_v3"}}) == read_kimi_config(K2_6)
    moved = {key: value for key, value in TEXT.items() if key != "quantization_config"}
    assert read_kimi_config(K2_6 | {"text_config": moved, "quantization_config": TEXT["quantization_config"]}) == (
        read_kimi_config(K2_6)
    )


GROUP = "config_groups/group_0/"
REFUSED: list[tuple[dict[str, Any], str]] = [
    (K2_6 | {"model_type": "kimi_k3"}, "model_type: found 'kimi_k3', expected one of kimi_k2"),
    (K2_6 | {"tie_word_embeddings": True}, "tie_word_embeddings: found True, expected False, as in text_config"),
    (K2_6 | {"text_config": "x"}, "text_config: found 'x', expected an object"),
    (with_text(attention_bias=True), "attention_bias: found True, only False is supported"),
    (with_text(hidden_act="gelu"), "hidden_act: found 'gelu'"),
    (with_text(topk_method="greedy"), "topk_method: found 'greedy', only 'noaux_tc' is supported"),
    (with_text(scoring_func="softmax"), "scoring_func: found 'softmax', only 'sigmoid' is supported"),
    (with_text(moe_layer_freq=2), "moe_layer_freq: found 2, only 1 is supported"),
    (with_text(num_key_value_heads=8), r"num_key_value_heads: found 8, expected num_attention_heads \(64\)"),
    (with_text(qk_rope_head_dim=63), "qk_rope_head_dim: found 63, expected an even number"),
    (with_text(n_group=5), r"n_group: found 5, expected a divisor of n_routed_experts \(384\)"),
    (with_text(n_group=384), "n_group: found 384, expected at most 192"),
    (with_text(n_group=8, topk_group=9), "topk_group: found 9, expected an integer from 1 to 8"),
    (with_text(num_experts_per_tok=385), "num_experts_per_tok: found 385, expected an integer from 1 to 384"),
    (with_text(n_group=8, topk_group=1, num_experts_per_tok=49), "num_experts_per_tok: found 49"),
    (with_text(first_k_dense_replace=62), "first_k_dense_replace: found 62"),
    (with_text(q_lora_rank=0), "q_lora_rank: found 0"),
    (with_text(kv_lora_rank=None), "kv_lora_rank: missing"),
    (with_text(n_shared_experts=None), "n_shared_experts: missing"),
    (with_text(routed_scaling_factor=0), "routed_scaling_factor: found 0"),
    (with_text(latent_norm_eps=-1.0), r"latent_norm_eps: found -1\.0"),
    (with_text(dtype="int8"), "dtype: found 'int8', expected one of bfloat16"),
    (with_text(rope_scaling={"type": "dynamic", "factor": 2.0}), "rope_scaling: found type 'dynamic'"),
    (with_text(rope_scaling=TEXT["rope_scaling"] | {"beta_fast": 0.5}), r"beta_fast: found 0\.5, expected at least"),
    (with_text(rope_scaling=TEXT["rope_scaling"] | {"inv_freq": [1.0]}), "inv_freq: found .* expected 32 numbers"),
    (with_text(rope_scaling=TEXT["rope_scaling"] | {"attention_factor": 0}), "attention_factor: found 0"),
    (with_text(rope_theta=1.0), r"rope_theta: found 1\.0, expected more than 1"),
    (with_text(moe_intermediate_size=2000), "moe_intermediate_size: found 2000, expected a multiple of 32"),
    (with_quantization("quant_method", "awq"), "quantization_config quant_method: found 'awq'"),
    (with_quantization("format", "nvfp4-pack-quantized"), "format: found 'nvfp4-pack-quantized'"),
    (with_quantization("quantization_status", "frozen"), "quantization_status: found 'frozen'"),
    (with_quantization("kv_cache_scheme", {"num_bits": 8}), "kv_cache_scheme: found .* expected none"),
    (with_quantization("config_groups", {}), "config_groups: found {}, expected one group"),
    (with_quantization(GROUP + "targets", ["Embedding"]), "group_0 targets: found"),
    (with_quantization(GROUP + "input_activations", {"num_bits": 8}), "group_0 input_activations: found"),
    (with_quantization(GROUP + "weights/num_bits", 8), "weights num_bits: found 8, expected 4"),
    (with_quantization(GROUP + "weights/symmetric", False), "weights symmetric: found False, expected True"),
    (with_quantization(GROUP + "weights/group_size", 128), "weights group_size: found 128, expected 32"),
    (with_quantization(GROUP + "weights/strategy", "channel"), "weights strategy: found 'channel'"),
    (with_quantization(GROUP + "weights/actorder", "group"), "weights actorder: found 'group', expected none"),
    (with_quantization("ignore", ["re:("]), "ignore: found .* expected names or regular expressions"),
    (with_quantization("ignore", ["re:.*experts.*"]), r"leaves model\.layers\.1\.mlp\.experts\.0\.gate_proj out"),
    (
        K2_INSTRUCT | {"quantization_config": FP8_SECTION | {"fmt": "e5m2"}},
        "fmt: found 'e5m2', only 'e4m3' is supported",
    ),
    (with_fp8(weight_block_size=[64, 64]), "weight_block_size: found"),
    (
        K2_INSTRUCT | {"quantization_config": FP8_SECTION | {"activation_scheme": "static"}},
        "activation_scheme: found 'static'",
    ),
    (with_fp8(scale_fmt="ue8m0"), "scale_fmt: found 'ue8m0'"),
]


@pytest.mark.parametrize(("raw", "message"), REFUSED)
def test_what_is_not_implemented_is_refused_by_name(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        read_kimi_config(raw)
    assert re.fullmatch("config.json .+", str(caught.value))


@pytest.mark.parametrize(
    ("placement", "devices", "message"),
    [
        (
            Placement("tensor"),
            3,
            "expert_layout: found 'tensor', whose 64 parts of the experts 3 devices do not divide, expected",
        ),
        (Placement("expert"), 5, "expert_layout: found 'expert', whose 384 parts of the experts 5 devices"),
        (Placement(page_rows=12), 8, "page_size: found 12, expected a multiple of 8 devices"),
    ],
)
def test_layouts_that_the_mesh_does_not_divide_are_refused(placement: Placement, devices: int, message: str) -> None:
    config: KimiConfig = read_kimi_config(K2_6)
    with pytest.raises(ValueError, match=f"EngineConfig.{message}"):
        kimi.layout_of(config, devices, placement)
    layout = kimi.layout_of(config, 8, Placement(placement.experts, 16))
    assert layout.replicated() == ()


def refusal(raw: dict[str, Any]) -> str | None:
    """What a config is refused with, if it is; any other exception passes through."""
    try:
        read_kimi_config(raw)
    except ValueError as error:
        return str(error)
    return None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
ROPE = sorted({*TEXT["rope_scaling"], "attention_factor", "truncate", "inv_freq"})


@given(
    st.dictionaries(st.sampled_from(sorted(TEXT)), JSON, max_size=2),
    st.dictionaries(st.sampled_from(ROPE), JSON, max_size=2),
    st.dictionaries(st.sampled_from(sorted(TEXT["quantization_config"])), JSON, max_size=1),
)
def test_whatever_stands_in_a_config_it_is_read_or_refused_in_one_line(
    changes: dict[str, Any], rope: dict[str, Any], quantization: dict[str, Any]
) -> None:
    text = TEXT | {
        "rope_scaling": TEXT["rope_scaling"] | rope,
        "quantization_config": TEXT["quantization_config"] | quantization,
    }
    raw = json.loads(json.dumps(K2_6 | {"text_config": text | changes}))
    message = refusal(raw)
    assert message is None or re.fullmatch("config.json .+", message)
