"""Configs of targets and drafters: each field that is absent, of another type or out of range is refused by name."""

import json
import math
import re
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxspec.model.families.config import DFlashConfig, ModelConfig, RopeConfig, read_dflash_config, read_model_config
from jaxspec.model.families.registry import family_of

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000,
    "max_position_embeddings": 256,
}
TARGET = SHAPE | {
    "architectures": ["LlamaForCausalLM"],
    "tie_word_embeddings": True,
    "eos_token_id": 2,
    "layer_types": ["full_attention"] * 2,
}
DRAFTER = SHAPE | {
    "architectures": ["DFlashDraftModel"],
    "num_target_layers": 5,
    "block_size": 8,
    "layer_types": ["full_attention", "sliding_attention"],
    "sliding_window": 16,
    "is_causal": False,
    "mask_token_id": 63,
    "target_layer_ids": [1, 3],
    "input_embedding_scale": 2.0,
    "output_multiplier": 0.5,
    "final_logit_softcapping": 30.0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
READERS = [(read_model_config, TARGET), (read_dflash_config, DRAFTER)]
INTEGERS = ("vocab_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
INTEGERS += ("hidden_size", "head_dim", "max_position_embeddings")
NO_INTEGER = ["8", "", [], [8], {}, {"a": 8}, True, 8.0, 1.5, math.nan, math.inf, 0, -1, 2**31, 10**300]
NO_REAL = ["1", "", [], [1e-5], {}, True, math.nan, math.inf, -math.inf, -1.0, 1e-60, 10**400]
NO_FLAG = ["true", "", [], {}, 0, 1, 1.0, math.nan]

CASES: list[tuple[dict[str, Any], str, Any]] = [
    *((base, key, value) for _, base in READERS for key in INTEGERS for value in NO_INTEGER),
    *((base, "rms_norm_eps", value) for _, base in READERS for value in [*NO_REAL, 0, 1.0, 5]),
    *((base, "rope_theta", value) for _, base in READERS for value in [*NO_REAL, 0, 1e60]),
    *((base, "rope_scaling", value) for _, base in READERS for value in ["linear", ["a"], 5, True, [], {"a": {}}]),
    *((base, "rope_parameters", value) for _, base in READERS for value in ["x", 5, {"full_attention": {}}]),
    *((base, "architectures", value) for _, base in READERS for value in ["X", 5, [None], [["a"]], {"a": 1}]),
    *((base, "num_key_value_heads", 3) for _, base in READERS),
    *((base, "head_dim", 5) for _, base in READERS),
    *((base, "max_position_embeddings", 1) for _, base in READERS),
    *((base, "num_hidden_layers", 10**9) for _, base in READERS),
    *((base, "partial_rotary_factor", 0.5) for _, base in READERS),
    *((base, "layer_types", v) for _, base in READERS for v in ["full_attention", [[1], [2]], 3, {}, ["x"] * 2, []]),
    (TARGET, "layer_types", ["full_attention", "sliding_attention"]),
    *((TARGET, "tie_word_embeddings", value) for value in NO_FLAG),
    *((TARGET, "eos_token_id", value) for value in ["2", {}, [None], ["a"], [[1]], 64, -1, [2, 64], True, 1.5]),
    *((DRAFTER, "dflash_config", value) for value in ["x", ["mask_token_id"], 5, True]),
    *((DRAFTER, "num_target_layers", value) for value in [*NO_INTEGER, 1]),
    *((DRAFTER, "block_size", value) for value in [*NO_INTEGER, 1, 1026]),
    *((DRAFTER, "mask_token_id", value) for value in [*(v for v in NO_INTEGER if v != 0 or v is False), 64]),
    *((DRAFTER, "target_layer_ids", v) for v in ["0", 3, {}, [], [[0]], [None], [1, 1], [-1], [4], [True, 2], [1.0]]),
    *((DRAFTER, "sliding_window", value) for value in NO_INTEGER),
    *((DRAFTER, "is_causal", value) for value in NO_FLAG),
    *(
        (DRAFTER, key, value)
        for key in ("input_embedding_scale", "output_multiplier", "final_logit_softcapping")
        for value in NO_REAL
    ),
]


def read(raw: dict[str, Any]) -> ModelConfig | DFlashConfig:
    return read_dflash_config(raw) if "block_size" in raw else read_model_config(raw)


def test_the_configs_that_the_cases_spoil_are_good():
    assert read(TARGET).rope == RopeConfig(10000.0)
    drafter = read_dflash_config(DRAFTER)
    assert (drafter.windows, drafter.target_layer_ids, drafter.final_logit_softcapping) == ((0, 16), (1, 3), 30.0)
    for config in (read(TARGET), drafter):
        assert all(type(getattr(config, f.name)) is f.type for f in fields(config) if f.type in (int, float, bool))


@pytest.mark.parametrize(("base", "key", "value"), CASES)
def test_a_value_that_does_not_fit_is_one_line_about_its_field(base, key, value):
    with pytest.raises(ValueError, match=rf"^config\.json {key}: (found|missing)") as caught:
        read(base | {key: value})
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize("key", ["mask_token_id", "target_layer_ids", "output_multiplier", "block_size"])
def test_dflash_fields_are_checked_inside_their_section_too(key):
    with pytest.raises(ValueError, match=f"config.json {key}: found 'x', expected"):
        read(DRAFTER | {"dflash_config": {key: "x"}})


@pytest.mark.parametrize("base", [TARGET, DRAFTER])
@pytest.mark.parametrize("key", sorted(set(SHAPE) - {"num_key_value_heads", "head_dim"}))
@pytest.mark.parametrize("absent", [True, False])
def test_required_fields_are_missed_by_name(base, key, absent):
    raw = {name: value for name, value in base.items() if name != key} | ({} if absent else {key: None})
    with pytest.raises(ValueError, match=rf"^config\.json {key}: missing"):
        read(raw)


@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"factor": None}, "factor: missing"),
        ({"factor": 0}, "factor: found 0"),
        ({"factor": "x"}, "factor: found 'x'"),
        ({"factor": math.nan}, "factor: found nan"),
        ({"low_freq_factor": 0}, "low_freq_factor: found 0"),
        ({"high_freq_factor": 1.0}, r"high_freq_factor: found 1\.0, expected more than low_freq_factor \(1\)"),
        ({"high_freq_factor": [4]}, "high_freq_factor: found"),
        ({"original_max_position_embeddings": 0}, "original_max_position_embeddings: found 0"),
        ({"original_max_position_embeddings": None}, "original_max_position_embeddings: missing"),
        ({"rope_theta": "x"}, "rope_theta: found 'x'"),
        ({"rope_type": ["llama3"]}, r"found type \['llama3'\]"),
        ({"rope_type": "linear"}, "found type 'linear'"),
    ],
)
def test_rope_scaling_is_checked_field_by_field(place, changes, message):
    assert read(TARGET | {place: LLAMA3}).rope == RopeConfig(1e4, "llama3", 8.0, 1.0, 4.0, 8192)
    with pytest.raises(ValueError, match=rf"^config\.json rope_scaling.*{message}"):
        read(TARGET | {place: LLAMA3 | changes})


def test_the_width_of_a_head_follows_only_where_it_divides():
    assert read(TARGET | {"head_dim": None}).head_dim == 4
    assert read(TARGET | {"hidden_size": 36}).head_dim == 4
    with pytest.raises(ValueError, match=r"hidden_size: found 36, expected a multiple of num_attention_heads \(8\)"):
        read(TARGET | {"hidden_size": 36, "head_dim": None})
    with pytest.raises(ValueError, match="head_dim: missing, expected an even number"):
        read(TARGET | {"hidden_size": 40, "head_dim": None})


def test_taps_by_default_must_be_different_layers_of_the_target():
    with pytest.raises(ValueError, match="target_layer_ids: missing, expected different layers from 0 to 0"):
        read(DRAFTER | {"num_target_layers": 2, "target_layer_ids": None})


def test_end_ids():
    for found, expected in ((None, ()), ([], ()), (0, (0,)), ([63, 2], (63, 2))):
        assert read(TARGET | {"eos_token_id": found}).eos_token_ids == expected


def refusal(call: Callable[[], object]) -> str | None:
    """What `call` is refused with, if it is; any other exception passes through."""
    try:
        call()
    except ValueError as error:
        return str(error)
    return None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
KEYS = sorted({*TARGET, *DRAFTER, *LLAMA3, "rope_scaling", "rope_parameters", "dflash_config"})


@given(st.sampled_from([TARGET, DRAFTER]), st.dictionaries(st.sampled_from(KEYS), JSON, min_size=1, max_size=3))
def test_whatever_stands_in_a_config_it_is_read_or_refused_in_one_line(base, changes):
    raw = json.loads(json.dumps(base | changes))
    for reader in (family_of, read_model_config, read_dflash_config):
        message = refusal(lambda reader=reader: reader(raw))
        assert message is None or re.fullmatch("config.json .+", message)
