"""Kimi's path through rounds: every layout answers what plain decoding on one device answers, and leaves no trace."""

import jax.numpy as jnp
import pytest
from flax import nnx

from jaxspec.benchmark.shapes import SHAPES
from jaxspec.config import EngineConfig, SpeculationConfig
from jaxspec.engine.memory import cache_bytes_per_token
from jaxspec.engine.memory_plan import placement_of
from jaxspec.model.families.protocols import Target
from jaxspec.model.families.registry import FAMILIES
from jaxspec.model.quantization.scheme import UNQUANTISED
from jaxspec.sharding.layout import Placement
from tests.support.builders import DFLASH, GROUPED, Plan
from tests.support.kimi_models import tiny_kimi, twin_of
from tests.support.round_bench import (
    ANSWER,
    PROMPTS,
    SEEDS,
    SLOTS,
    Bench,
    assert_same_rows,
    run_to_the_end,
)

PAGE = 8
CALLS = 5  # of eight plain rounds
LAYOUTS = {
    "experts split, cache by sequence": (8, Placement("tensor", PAGE)),
    "whole experts": (8, Placement("expert")),
    "whole experts, cache by sequence": (2, Placement("expert", PAGE)),
}


def decoded_plainly(target: Target) -> Bench:
    bench = Bench([Plan(0, [0], [])], 1, target, PAGE)
    bench.prefill(16)
    for _ in range(CALLS):
        bench.decode(SpeculationConfig(budget=0, top_k_cap=3, rounds_per_call=8), [64] * SLOTS)
    return bench


@pytest.fixture(scope="module")
def plain() -> Bench:
    """Plain decoding on one device, one request greedily and two sampled; the drafter's cache is written there too."""
    bench = decoded_plainly(tiny_kimi())
    assert [len(answer) for answer in bench.answers()] == [ANSWER] * 3 + [0]
    assert all(len(set(answer)) > 5 for answer in bench.answers()[:3]), "varied answers"
    return bench


@pytest.mark.parametrize("layout", LAYOUTS)
def test_only_accepted_rows_are_written_and_they_are_plain_decodings(plain: Bench, layout: str) -> None:
    devices, placement = LAYOUTS[layout]
    answers = plain.answers()
    rounds = [[(7, 0), (3, 1), (0, 0), (5, 2)] * 10, [], [(1, 2), (6, 0)] * 20]
    plans = [Plan(*of) for of in zip(SEEDS, PROMPTS, answers, rounds, strict=False)]
    bench = Bench(plans, devices, tiny_kimi(devices=devices, placement=placement), PAGE)
    target = bench.programs.target
    assert target.layout.splits("page_rows") == bool(placement.page_rows)
    assert target.layout.splits("experts") == (placement.experts == "expert") != target.layout.splits("expert_mlp")
    lengths_seen = run_to_the_end(bench)
    assert lengths_seen >= {0, 1, 3, 5, 6, DFLASH.depth}
    assert bench.answers() == answers
    assert_same_rows(bench, plain)


def test_int4_experts_answer_as_their_dequantised_twin(plain: Bench) -> None:
    twin = twin_of(plain.programs.target)
    assert twin.config.quantization.scheme == UNQUANTISED
    assert decoded_plainly(twin).answers() == plain.answers()


@pytest.mark.parametrize(("devices", "page", "bytes_a_token"), [(1, 0, 70_272), (8, 0, 70_272), (8, 16, 8_784)])
def test_a_token_of_k2_6_takes_the_published_bytes(devices: int, page: int, bytes_a_token: int) -> None:
    pair = SHAPES["kimi-k2.6"]
    target, drafter = (
        nnx.eval_shape(FAMILIES[name].build(config, devices, jnp.bfloat16, Placement(page_rows=page)))
        for name, config in (("kimi", pair.target), ("dflash", pair.drafter))
    )
    assert cache_bytes_per_token(target, None) == bytes_a_token
    assert cache_bytes_per_token(target, drafter) == bytes_a_token + 24_576 // devices


def test_settings_that_a_target_does_not_have_are_refused_by_name() -> None:
    assert placement_of(EngineConfig()) == Placement()
    assert placement_of(EngineConfig(page_size=32, shard_cache="sequence", expert_layout="expert")) == (
        Placement("expert", 32)
    )
    for settings, message in (
        ({"expert_layout": "data"}, "EngineConfig.expert_layout: found 'data', expected 'tensor' or 'expert'"),
        ({"shard_cache": "heads"}, "EngineConfig.shard_cache: found 'heads', expected 'sequence' or None"),
    ):
        with pytest.raises(ValueError, match=message):
            EngineConfig(**settings)
    for placement, message in (
        (Placement("expert"), "EngineConfig.expert_layout: found 'expert', but a llama target has no experts"),
        (Placement(page_rows=16), "EngineConfig.shard_cache: found 'sequence', but a llama target's cache is split"),
    ):
        with pytest.raises(ValueError, match=message):
            FAMILIES["llama"].build(GROUPED, 2, jnp.float32, placement)
