"""The plan against published sizes and tables, and against what loaded models really take."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from jaxspec.config import EngineConfig
from jaxspec.engine import loading
from jaxspec.engine.engine import Engine
from jaxspec.engine.expert_routing import busiest_experts, distinct_experts
from jaxspec.engine.memory import cache_bytes_per_token, weight_bytes
from jaxspec.engine.memory_plan import Plan, placement_of, plan_models
from jaxspec.model.checkpoint.description import Description, describe
from jaxspec.model.families.kimi_config import read_kimi_config
from jaxspec.model.families.registry import FAMILIES
from jaxspec.model.layers.cache import empty_cache
from jaxspec.model.layers.parameters import fill
from jaxspec.sharding.mesh import make_mesh
from tests.support.builders import GROUPED, tiny_target
from tests.support.kimi_configs import K26, K26_DRAFTER, TEXT

GB = 10**9
CARD, H200 = int(0.92 * 96 * GB), int(0.92 * 141 * GB)
QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12288,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def folder_of(path, config):
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    root = tmp_path_factory.mktemp("configs")
    return (
        describe(folder_of(root / "target", K26), "target"),
        describe(folder_of(root / "drafter", K26_DRAFTER), "drafter"),
    )


@pytest.fixture(scope="module")
def k26(pair):
    return plan_models(*pair, EngineConfig(devices=8))


@pytest.fixture(scope="module")
def spread(pair):
    return plan_models(*pair, EngineConfig(devices=8, shard_cache="sequence", expert_layout="expert"))


def gigabytes(plan: Plan) -> dict[tuple[str, bool], float]:
    return {(part.name, part.whole): part.device_bytes / GB for part in plan.target.parts}


def test_every_byte_of_the_published_checkpoint(k26):
    """595,148,192,736 bytes, of which 335 vision tensors and the experts' shapes are no weights of ours."""
    shapes = 60 * 384 * 3 * 2 * 4
    assert sum(part.total_bytes for part in k26.target.parts) == 595_148_192_736 - 2 * 471_143_920 - shapes


def test_weights_a_device(k26):
    found = gigabytes(k26)
    for part, expected in {
        ("routed experts", False): 71.35,
        ("attention", True): 1.85,
        ("attention", False): 1.31,
        ("shared experts", False): 0.66,
        ("MLP", False): 0.10,
        ("routers", True): 0.33,
    }.items():
        assert found[part] == pytest.approx(expected, rel=0.01), part
    assert found["embedding", False] + found["output head", False] == pytest.approx(0.59, rel=0.01)
    assert k26.target.device_bytes / GB == pytest.approx(76.18, rel=1e-4)
    assert k26.drafter.device_bytes / GB == pytest.approx(0.87, rel=0.01)
    assert sum(part.total_bytes for part in k26.drafter.parts) / GB == pytest.approx(6.96, rel=0.01)


def test_bytes_a_token_of_cache(k26, spread):
    assert (k26.target.cache_bytes_per_token, k26.drafter.cache_bytes_per_token) == (70_272, 3_072)
    assert (spread.target.cache_bytes_per_token, spread.drafter.cache_bytes_per_token) == (8_784, 3_072)
    assert spread.target.device_bytes == k26.target.device_bytes


def test_the_cache_that_fits(k26, spread):
    """What the weights leave of 92 % of a device, in whole pages."""
    for plan, room, about in ((k26, CARD, 11.27), (k26, H200, 52.67), (spread, CARD, 11.27)):
        tokens = plan.cache_tokens(room)
        free = room - plan.weight_bytes
        assert free / GB == pytest.approx(about, rel=0.01)
        assert tokens % 16 == 0
        assert 0 <= free - tokens * plan.cache_bytes_per_token < 16 * plan.cache_bytes_per_token
        assert plan.shortfall(room, tokens) is None
        assert plan.shortfall(room, tokens + 1) is not None
    assert k26.cache_tokens(10 * GB) == 0


def test_a_plan_that_does_not_fit_says_so(k26):
    assert k26.shortfall(CARD, 262144) == (
        "memory: the target's weights of 76.18 GB a device, the drafter's 0.87 GB and a cache of 262,144 tokens "
        "(19.23 GB) need 96.28 GB, found 88.32 GB, in which 153,616 tokens fit; use more devices, a smaller "
        "max_context or cache_tokens, or shard_cache"
    )
    alone = replace(k26, drafter=None)
    assert "target's weights of 76.18 GB a device and a cache of 1 tokens" in alone.shortfall(70 * GB, 1)


def test_a_pass_of_independently_routed_rows(k26):
    for rows, expected, ratio in (
        (1, 6.03, 1.0),
        (4, 10.30, 1.71),
        (8, 15.60, 2.59),
        (16, 24.95, 4.14),
        (32, 39.51, 6.55),
        (64, 57.34, 9.51),
    ):
        assert k26.read_bytes(rows) / GB == pytest.approx(expected, rel=0.001)
        assert k26.read_bytes(rows) / k26.read_bytes(1) == pytest.approx(ratio, rel=0.01)
    assert 4.8e12 / k26.read_bytes(1) == pytest.approx(796, rel=0.01)
    assert 1.79e12 / k26.read_bytes(1) == pytest.approx(297, rel=0.01)
    read = sum(
        part.total_bytes * (8 / 384 if part.experts else 1) for part in k26.target.parts if part.name != "embedding"
    )
    assert read / GB == pytest.approx(32.98, rel=0.001)
    assert k26.draft_bytes() / GB == pytest.approx(1.16, rel=0.01)


def test_whole_experts_are_read_on_the_busiest_device(k26, spread):
    experts = k26.target.parts[[part.name for part in k26.target.parts].index("routed experts")]
    for rows, busiest in ((1, 2.57), (8, 11.2), (16, 18.3), (32, 28.4), (64, 39.7)):
        more = spread.read_bytes(rows) - k26.read_bytes(rows)
        mean = distinct_experts(384, 8, rows) / 8
        assert more == pytest.approx((busiest - mean) / 48 * experts.device_bytes, rel=0.05)


def test_touched_experts():
    for rows, expected in zip(
        (1, 2, 4, 8, 12, 16, 24, 32, 48, 64),
        (8.0, 15.8, 31.0, 59.5, 85.7, 109.8, 152.3, 188.2, 244.2, 284.2),
        strict=True,
    ):
        assert distinct_experts(384, 8, rows) == pytest.approx(expected, abs=0.06)
    assert busiest_experts(8, 8, 3, 4) == 2  # Every row takes all.
    assert busiest_experts(8, 1, 1, 4) == 1
    # One device is as busy as all of them.
    assert busiest_experts(32, 4, 6, 1) == pytest.approx(distinct_experts(32, 4, 6), rel=0.02)


def test_a_dense_model(tmp_path):
    plan = plan_models(describe(folder_of(tmp_path / "q", QWEN3_8B), "target"), None, EngineConfig())
    assert plan.target.device_bytes / 2 == pytest.approx(8.191e9, rel=1e-3)
    assert plan.target.cache_bytes_per_token == 147_456
    assert plan.read_bytes(1) == plan.read_bytes(32) == plan.target.device_bytes - 2 * 151936 * 4096
    assert (plan.max_context, plan.draft_bytes(), plan.touched_experts(8)) == (40960, 0, 0)
    tied = replace(GROUPED, tie_word_embeddings=True)
    plan = plan_models(Description("llama", tied, "float32"), None, EngineConfig())
    assert plan.read_bytes(1) == plan.target.device_bytes


INT4 = TEXT["quantization_config"]
SMALL = TEXT | {
    "vocab_size": 64,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 16,
    "kv_lora_rank": 24,
    "intermediate_size": 80,
    "moe_intermediate_size": 256,
    "n_routed_experts": 16,
    "num_experts_per_tok": 2,
    "eos_token_id": 1,
}


@pytest.mark.parametrize(
    ("settings", "devices"),
    [
        ({}, 1),
        ({}, 8),
        ({"expert_layout": "expert", "shard_cache": "sequence"}, 8),
    ],
)
@pytest.mark.parametrize("quantization", [INT4, None])
def test_the_plan_is_what_loaded_weights_and_caches_take(settings, devices, quantization):
    config = read_kimi_config(SMALL | {"quantization_config": quantization})
    engine = EngineConfig(devices=devices, **settings)
    plan = plan_models(Description("kimi", config, "bfloat16"), None, engine)
    mesh = make_mesh(devices)
    placement = placement_of(engine)
    layout = FAMILIES["kimi"].placed(config, devices, placement)

    def leaf(spec):
        return jax.device_put(np.zeros(spec.shape, spec.dtype), NamedSharding(mesh, layout.spec(spec.axes)))

    module = fill(FAMILIES["kimi"].build(config, devices, jnp.bfloat16, placement), leaf)
    assert plan.target.device_bytes == sum(weight_bytes(module).values())
    pools = empty_cache(module.cache_rows, 3, engine.page_size, layout, mesh, jnp.bfloat16)
    held = sum(pool.addressable_shards[0].data.nbytes for layer in pools for pool in layer)
    assert plan.target.cache_bytes_per_token * 3 * engine.page_size == held


class TestStartUp:
    def test_an_engine_refuses_with_the_plan_before_anything_is_loaded(self, pair, k26, monkeypatch):
        monkeypatch.setattr(loading, "available_bytes", lambda mesh: 96 * GB)
        monkeypatch.setattr(loading, "plan_models", lambda *given: {(*pair, EngineConfig(devices=8)): k26}[given])
        monkeypatch.setattr(loading, "open_checkpoint", lambda path: path)
        monkeypatch.setattr(loading, "describe_checkpoint", lambda description, kind: description)
        monkeypatch.setattr(loading, "load_target", pytest.fail)
        with pytest.raises(ValueError, match="memory: the target's weights") as caught:
            Engine.from_checkpoints(*pair, config=EngineConfig(devices=8))
        assert str(caught.value) == k26.shortfall(CARD, 262144)
        monkeypatch.setattr(loading, "plan_models", lambda *given: k26)
        with pytest.raises(ValueError, match="max_context: found 262145, expected at most the models' 262144"):
            Engine.from_checkpoints(*pair, config=EngineConfig(devices=8, max_context=262145))

    @pytest.mark.parametrize("kept", [0, 4])
    def test_a_cache_takes_what_fits(self, monkeypatch, kept):
        """Four requests would take 64 pages; 40 are free beside the weights, of which memory_fraction keeps some."""
        target = tiny_target()
        free = 40 * 16 * cache_bytes_per_token(target, None)
        monkeypatch.setattr("jaxspec.engine.memory.available_bytes", lambda mesh: free + 1)
        fraction = 1 - kept / 40 * free / (free + sum(weight_bytes(target).values()))
        engine = Engine(target, mesh=make_mesh(1), config=EngineConfig(slots=4, memory_fraction=fraction))
        assert (engine.max_context, engine.page_count) == (256, 40 - kept)

    def test_a_cache_too_small_for_one_request_is_refused(self, monkeypatch):
        target = tiny_target()
        page = 16 * cache_bytes_per_token(target, None)
        monkeypatch.setattr("jaxspec.engine.memory.available_bytes", lambda mesh: 15 * page)
        with pytest.raises(ValueError, match="cache_tokens: 4096 tokens need .* within memory_fraction 1; lower"):
            Engine(target, mesh=make_mesh(1), config=EngineConfig(memory_fraction=1.0))

    @pytest.mark.parametrize("value", [0, 1.5, "a", float("nan")])
    def test_fractions_out_of_range_are_refused(self, value):
        with pytest.raises(
            ValueError, match="EngineConfig.memory_fraction: found .*, expected a? ?(number from )?0.01"
        ):
            EngineConfig(memory_fraction=value)
