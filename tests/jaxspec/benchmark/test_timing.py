"""The benchmark on a tiny shape: bytes counted twice, parts that make the round, and the command's report."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from typer.testing import CliRunner

from jaxspec.benchmark import profiling, shapes
from jaxspec.benchmark import timing as benchmarking
from jaxspec.benchmark.round_parts import RoundParts
from jaxspec.benchmark.shapes import SHAPES, ModelPair, pair_of
from jaxspec.benchmark.synthetic import random_cache, random_models
from jaxspec.benchmark.timing import PartTiming, RoundTiming, bytes_moved, make_engine, seconds_ahead
from jaxspec.config import SamplingParams, SpeculationConfig
from jaxspec.model.families import kimi
from jaxspec.model.families.config import check_drafter, default_target_layers
from jaxspec.model.families.registry import FAMILIES
from jaxspec.model.layers.parameters import weight_specs
from jaxspec.sharding.mesh import make_mesh
from scripts.benchmark import app

TINY = pair_of(
    dataclasses.replace(
        SHAPES["smollm2"].target,
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
    ),
    layers=1,
    block_size=4,
)
UNTIED = dataclasses.replace(TINY, target=dataclasses.replace(TINY.target, tie_word_embeddings=False, qk_norm=True))


@pytest.fixture(scope="module")
def engine():
    """An engine that has decoded at N = 6."""
    mesh = make_mesh(1)
    target, drafter = random_models(TINY, mesh, jnp.float32)
    engine = make_engine(target, drafter, mesh, SpeculationConfig(budget=6, top_k_cap=4), 40, 2)
    engine.generate([[1] * 41] * 2, SamplingParams(temperature=0, max_tokens=4))
    return engine


def language_parameters(config):
    """Two numbers in each packed byte; their scales not counted."""
    specs = weight_specs(FAMILIES["kimi"].build(config, 1, jnp.bfloat16))
    kept = [spec for spec in specs if not spec.name.endswith("weight_scale")]
    return sum(math.prod(spec.shape) * (8 if spec.dtype == jnp.int32 else 1) for spec in kept)


def test_a_share_of_kimi_is_what_one_of_eight_devices_holds():
    pair = SHAPES["kimi-k2.6"]
    layout = kimi.layout_of(pair.target, 8)
    held = 0
    for spec in weight_specs(FAMILIES["kimi"].build(pair.target, 8, jnp.bfloat16)):
        shares = max([layout.shares(axis) for axis in spec.axes if axis], default=1)
        held += math.prod(spec.shape) // shares * spec.dtype.itemsize
    share = pair.share(8)
    specs = weight_specs(FAMILIES["kimi"].build(share.target, 1, jnp.bfloat16))
    assert sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in specs) == held
    assert held == pytest.approx(76.18e9, rel=1e-4)
    assert (share.target.moe_intermediate_size, share.target.n_routed_experts) == (256, 384)
    check_drafter(share.target, share.drafter)
    with pytest.raises(ValueError, match=r"--shard: found 16, which does not divide the kv_heads"):
        pair.share(16)


TINY_KIMI = ModelPair(
    dataclasses.replace(
        SHAPES["kimi-k2.6"].target,
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
        n_routed_experts=32,
        num_experts_per_tok=3,
        max_position_embeddings=2048,
    ),
    dataclasses.replace(TINY.drafter, hidden_size=64, num_target_layers=3, target_layer_ids=(1,)),
)


def test_a_share_is_timed_pass_by_pass():
    result = run_share("--budget", "0,6", "--context", "20,90", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["settings"] == {
        "shape": "tiny", "shard": 2, "budgets": [0, 6], "contexts": [20, 90], "dtype": "bfloat16"
    }  # fmt: skip
    passes = report["passes"]
    assert [(one["nodes"], one["context"]) for one in passes] == [(0, 20), (6, 20), (0, 90), (6, 90)]
    assert [one["experts"] for one in passes[::2]] == [3, 3]
    # Seven different tokens choose nearly independently: 32 · (1 - (1 - 3/32)^7) = 15.9 different experts.
    assert all(12 <= one["experts"] <= 20 for one in passes[1::2])
    expert = 3 * 64 * 32 * (0.5 + 2 / 32)  # bytes
    rest = report["weight_bytes"] - 2 * 32 * expert - 32 * 64 * 2
    for one in passes:
        assert one["seconds"] > 0
        moved = rest + 2 * one["experts"] * expert + one["context"] * 3 * 24 * 2 + (one["nodes"] + 1) * 32 * 8
        assert one["bytes_moved"] == pytest.approx(moved, rel=1e-12)
        assert one["bound_share"] == pytest.approx(one["bytes_moved"] / 1e9 / one["seconds"])
    table = run_share("--budget", "0", "--context", "20")
    assert "one of 2 shares of tiny" in table.stdout
    assert "plain" in table.stdout


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_are_the_published_ones(name):
    pair = SHAPES[name]
    check_drafter(pair.target, pair.drafter)
    if name == "qwen3-8b":
        assert pair.drafter.target_layer_ids == (1, 9, 17, 25, 33)
        assert (pair.drafter.num_hidden_layers, pair.drafter.block_size) == (5, 16)
    target = pair.target
    if name == "kimi-k2.6":
        assert language_parameters(target) == 1_026_408_232_448
        assert pair.drafter.target_layer_ids == default_target_layers(61, 6)
        return
    heads = 2 * target.head_dim * (target.num_attention_heads + target.num_key_value_heads)
    layer = target.hidden_size * (heads + 3 * target.intermediate_size)
    tables = (1 if target.tie_word_embeddings else 2) * target.vocab_size * target.hidden_size
    parameters = target.num_hidden_layers * layer + tables  # norms aside
    assert parameters == pytest.approx({"smollm2": 134.5e6, "qwen3-8b": 8.19e9}[name], rel=2e-3)


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("pair", [TINY, UNTIED], ids=["tied", "untied"])
def test_bytes_against_a_sum_over_arrays(pair, devices):
    mesh = make_mesh(devices)
    target, drafter = random_models(pair, mesh, jnp.bfloat16)
    context, batch, budget = 40, 3, 6
    speculation = SpeculationConfig(budget=budget, top_k_cap=4)
    found = bytes_moved(target, drafter, speculation, context, batch)

    def local(*arrays):
        return sum(array.addressable_shards[0].data.nbytes for array in arrays)

    def weights(module):
        return [
            param.get_value() for param in jax.tree.leaves(nnx.state(module), is_leaf=lambda x: hasattr(x, "get_value"))
        ]

    def row(module):
        return local(*jax.tree.leaves(random_cache(module, 1, 1, mesh, jnp.bfloat16)))

    table = target.embed_tokens.weight.get_value()
    head = table if pair is TINY else target.lm_head.weight.get_value()
    logits = 2 * 4 * batch * 64 // devices
    # A tied table is read once, as the head; an untied one only a few rows at a time.
    read = local(*weights(target)) - (0 if pair is TINY else local(table))
    assert found["verify"] == read + batch * context * row(target) + (budget + 1) * logits

    (layer,) = drafter.layers
    context_side = [drafter.fc.weight, drafter.hidden_norm.weight]
    attention = layer.self_attn
    shared = [attention.k_proj.weight, attention.v_proj.weight, attention.k_norm.weight]
    kept = local(*(p.get_value() for p in context_side + shared))
    assert found["commit"] == kept + batch * 4 * (row(target) + row(drafter))
    block = local(*weights(drafter)) - local(*(p.get_value() for p in context_side))
    assert found["draft"] == block + local(head) + batch * context * row(drafter) + 3 * logits
    assert found["grow"] < found["draft"] / 10
    assert set(found) == {"draft", "grow", "verify", "commit"}

    plain = bytes_moved(target, None, SpeculationConfig(budget=0), context, batch)
    assert plain == {"verify": found["verify"] - budget * logits, "commit": batch * row(target)}
    undrafted = bytes_moved(target, drafter, SpeculationConfig(budget=0), context, batch)
    assert undrafted == {"verify": plain["verify"], "commit": kept + batch * (row(target) + row(drafter))}


def test_random_models_are_random_and_lie_where_they_belong():
    mesh = make_mesh(2)
    target, drafter = random_models(TINY, mesh, jnp.bfloat16)
    query = target.layers[0].self_attn.q_proj.weight.get_value()
    assert {shard.data.shape for shard in query.addressable_shards} == {(16, 32)}
    arrays = [np.asarray(a, np.float32) for a in jax.tree.leaves((nnx.state(target), nnx.state(drafter)))]
    matrices = [a for a in arrays if a.ndim == 2]
    assert len({a.tobytes() for a in arrays}) == len(arrays)
    for matrix in matrices:
        assert matrix.std() == pytest.approx(matrix.shape[1] ** -0.5, rel=0.2)
    cache = jax.tree.leaves(random_cache(target, 5, 4, mesh, jnp.bfloat16))
    values = [np.asarray(pool).view(jnp.bfloat16).astype(np.float32) for pool in cache]  # Kept as bits on a CPU.
    assert all(pool.std() == pytest.approx(1, rel=0.2) for pool in values)
    assert len({np.asarray(pool).tobytes() for pool in cache}) == len(cache)


def test_parts_together_are_the_round(engine):
    """Draft, grow, verify and commit, run one after another, leave the caches and the state that the round leaves."""
    whole, apart = RoundParts(engine, 40), RoundParts(engine, 40)
    expected = whole.round()
    parts = apart.parts()  # Runs each but the last, in order.
    assert list(parts) == ["draft", "grow", "verify", "commit"]
    result = parts["commit"]()
    for name in ("tokens", "count", "accepted", "drafted"):
        np.testing.assert_array_equal(getattr(result, name), getattr(expected, name)[0])
    for found, wanted in zip(*(jax.tree.leaves(p.carry) for p in (apart, whole)), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
    assert (np.asarray(expected.count) >= 1).all()  # Every slot was live.


def test_reset_returns_to_the_given_context(engine):
    parts = RoundParts(engine, 40)
    parts.round()
    assert (np.asarray(parts.carry.slots.length) > 40).all()
    parts.reset()
    assert (np.asarray(parts.carry.slots.length) == 40).all()


def test_host_wait_and_share_of_the_bound():
    part = PartTiming(seconds=0.004, waited_seconds=0.005, bytes_moved=8_000_000)
    assert part.bound_share(4e9) == pytest.approx(0.5)
    assert RoundTiming(16, part, {}, 0.0065).host_wait == pytest.approx(0.0025)


def test_calls_ahead_are_waited_for_once_two_are_in_flight(monkeypatch):
    events = []
    monkeypatch.setattr(benchmarking.jax, "block_until_ready", lambda x: events.append(("wait", x)))
    numbers = iter(range(100))

    def call():
        events.append(("call", number := next(numbers)))
        return number

    seconds_ahead(call, repeats=2)
    assert benchmarking.CALLS_AHEAD == 2
    assert events == [
        ("call", 0), ("call", 1), ("wait", 0), ("call", 2), ("wait", 1), ("call", 3), ("wait", 2), ("call", 4),
        ("wait", 3), ("wait", [4]),
    ]  # fmt: skip


def run(*options):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(shapes.SHAPES, "tiny", TINY)
        patch.setattr(benchmarking, "measure_bandwidth", lambda device: 1e9)
        patch.setattr("jaxspec.serve.cli.bench.use_compilation_cache", lambda: None)
        return CliRunner().invoke(app, ["--shape", "tiny", *map(str, options)])


def run_share(*options):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(shapes.SHAPES, "tiny", TINY_KIMI)
        patch.setattr(benchmarking, "measure_bandwidth", lambda device: 1e9)
        patch.setattr("jaxspec.serve.cli.bench.use_compilation_cache", lambda: None)
        return CliRunner().invoke(app, ["--shape", "tiny", "--shard", "2", *map(str, options)])


def test_command_reports_every_setting(tmp_path):
    options = ["--budget", 6, "--context", 40, "--batch", 2, "--top-k-cap", 4, "--rounds-per-call", 2]
    result = run(*options, "--profile", tmp_path, "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["jax"] == jax.__version__
    assert (report["device"], report["bandwidth"]) == ("cpu", 1e9)
    assert report["settings"]["block_size"] == 4
    assert [(e["name"], e["budget"]) for e in report["rounds"]] == [("plain", None), ("N = 6", 6)]
    for entry in report["rounds"]:
        parts = entry["parts"]
        assert list(parts) == (["round", "draft", "grow"] if entry["budget"] else ["round"]) + ["verify", "commit"]
        for part in parts.values():
            assert part["seconds"] > 0
            assert part["waited_seconds"] > 0
            assert part["bound_share"] == pytest.approx(part["bytes_moved"] / 1e9 / part["seconds"])
        assert parts["round"]["bytes_moved"] == sum(p["bytes_moved"] for n, p in parts.items() if n != "round")
        assert entry["host_wait_seconds"] == pytest.approx(entry["engine_seconds"] - parts["round"]["seconds"])
        kernels = entry["kernels"]
        assert [k["seconds"] for k in kernels] == sorted((k["seconds"] for k in kernels), reverse=True)
        # Every target layer multiplies seven matrices, fused or not.
        assert sum(k["count"] for k in kernels) >= 4 * 7
    assert report["rounds"][0]["parts"]["round"]["bytes_moved"] < report["rounds"][1]["parts"]["round"]["bytes_moved"]
    assert list(tmp_path.rglob("*.xplane.pb"))


def test_kernels_are_added_up():
    class Named:
        def __init__(self, name, **fields):
            self.name = name
            self.__dict__.update(fields)

    once = [Named("fusion_1", duration_ns=3000), Named("fusion_22.1", duration_ns=1000), Named("sort", duration_ns=500)]
    shared = [Named("fusion_7", duration_ns=200)] * 6
    streams = [Named("Stream #1", events=once), Named("Stream #2", events=shared)]
    device = Named("/device:GPU:0", lines=[*streams, Named("XLA Ops", events=once)])
    kernels = profiling.kernel_times(Named("", planes=[Named("/host:CPU", lines=[]), device]), rounds=2)
    assert [(k.name, k.count, k.seconds) for k in kernels] == [
        ("fusion", 1, pytest.approx(2e-6)),
        ("fusion_7", 3, pytest.approx(0.6e-6)),
        ("sort", 0.5, pytest.approx(0.25e-6)),
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--shape", "gpt"], "--shape: found 'gpt'"),
        (["--budget", "1,b"], "--budget: found 'b'"),
        (["--budget", "5000"], "SpeculationConfig.budget: found 5000"),
        (["--context", 0], "--context: found 0"),
        (["--context", 9000], "--context: found 9000, expected 1 to"),
        (["--batch", 1000], "EngineConfig.slots: found 1000"),
        (["--devices", 64], "devices: found 64"),
        (["--drafter-layers", 9], "drafter layers: found 9"),
        (["--block-size", 1], "block size: found 1"),
        (["--dtype", "int8"], "--dtype: found 'int8'"),
        (["--context", "40,80"], "--context: found '40,80', expected one number without --shard"),
        (["--shard", 0], "--shard: found 0, expected 2 to"),
        (["--shard", 3], "--shard: found 3, which does not divide the heads"),
        (["--shard", 2, "--batch", 2], "--shard: found beside options of whole rounds"),
        (["--shard", 2, "--context", 9000], "--context: found 9000, expected 1 to"),
    ],
)
def test_bad_options_are_one_line(options, message):
    result = run(*options)
    assert result.exit_code == 2
    errors = [line for line in result.stderr.splitlines() if line.startswith("error:")]
    assert len(errors) == 1
    assert message in errors[0]
