"""What rounds leave in the caches and in the state: the accepted rows and nothing else, the same on every device."""

from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from jaxspec.config import SpeculationConfig
from jaxspec.model.layers.batch import ForwardBatch
from jaxspec.model.layers.cache import empty_cache
from jaxspec.sharding.mesh import make_mesh
from tests.support.builders import DFLASH, Plan, on_mesh
from tests.support.round_bench import (
    ANSWER,
    PROMPTS,
    SEEDS,
    SLOTS,
    SPECULATION,
    Bench,
    assert_only_these_changed,
    assert_same_rows,
    run_to_the_end,
)


@pytest.fixture(scope="module")
def plain() -> Bench:
    """Plain decoding on one device; the drafter's cache is written there too."""
    bench = Bench([Plan(0, [0], [])], 1)
    bench.prefill(16)
    for _ in range(5):
        bench.decode(SpeculationConfig(budget=0, top_k_cap=3, rounds_per_call=8), [64] * SLOTS)
    assert [len(answer) for answer in bench.answers()] == [ANSWER] * 3 + [0]
    return bench


@pytest.mark.parametrize("devices", [2, 8])
def test_only_accepted_rows_are_written_and_they_are_plain_decodings(plain: Bench, devices: int) -> None:
    """K/V heads are split on 2 devices and replicated on 8; copies are compared after every call."""
    answers = plain.answers()
    rounds = [[(7, 0), (3, 1), (0, 0), (5, 2)] * 10, [], [(1, 2), (6, 0)] * 20]
    plans = [Plan(*of) for of in zip(SEEDS, PROMPTS, answers, rounds, strict=False)]
    bench = Bench(plans, devices)
    lengths_seen = run_to_the_end(bench)
    assert lengths_seen >= {0, 1, 3, 5, 6, 7}
    assert bench.answers() == answers
    assert_same_rows(bench, plain)


def test_a_slot_without_room_freezes_unharmed_and_goes_on_later(plain: Bench) -> None:
    answers = plain.answers()
    plans = [Plan(*of) for of in zip(SEEDS, PROMPTS, answers, [[(7, 0)] * 10, [(4, 0)] * 20, []], strict=False)]
    bench = Bench(plans, 1)
    bench.prefill(16)
    start = bench.lengths()
    # Slot 0 lacks one place, slot 1 holds exactly one round, slot 2 holds all.
    before, state = bench.pools(), jax.tree.map(np.array, bench.carry.slots)
    result = bench.decode(SPECULATION, [start[0] + DFLASH.depth, start[1] + DFLASH.block_size, 64, 0])
    assert result.count[:, 0].tolist() == [0, 0]
    assert result.drafted[:, 0].tolist() == [0, 0]
    assert result.count[:, 1].tolist() == [5, 0]
    assert (result.count[:, 2] > 0).all()
    assert not result.finished[:, :3].any()
    for old, new in zip(jax.tree.leaves(state), jax.tree.leaves(bench.carry.slots), strict=True):
        np.testing.assert_array_equal(old[[0, 3]], np.asarray(new)[[0, 3]])
    assert_only_these_changed(
        before,
        bench.pools(),
        [place for row in (1, 2) for place in bench.slots_of(row, start[row], bench.lengths()[row])],
    )
    # Near its limit a slot needs room for no more than what remains.
    while not np.asarray(bench.carry.slots.finished).all():
        bench.decode(SPECULATION, [len(prompt) - 1 + ANSWER for prompt in PROMPTS] + [0])
    assert bench.answers() == answers


def test_decoded_rows_are_those_of_one_pass_over_the_whole_sequence(plain: Bench) -> None:
    """Positions and taps of what rounds commit, in both caches, against a pass that knows neither pages nor rounds."""
    drafter = plain.programs.drafter.drafter

    def whole(pair: Any, batch: ForwardBatch, pools: Any) -> Any:
        output = pair.target(batch, pools, DFLASH.target_layer_ids)
        return output.rows, pair.drafter.context_keys_values(output.tapped, batch.positions)

    class Pair(nnx.Module):
        def __init__(self) -> None:
            self.target, self.drafter = plain.programs.target, drafter

    run = on_mesh(1, Pair(), whole)
    empty = empty_cache(plain.programs.target.cache_rows, 1, 1, plain.programs.target.layout, make_mesh(1), "float32")
    answers = plain.answers()
    for row, prompt in enumerate(PROMPTS):
        tokens = np.array([[*prompt, *answers[row]][:-1]], np.int32)
        count = tokens.shape[1]
        batch = ForwardBatch(
            tokens=tokens,
            positions=np.arange(count, dtype=np.int32)[None],
            page_table=np.ones((1, 1), np.int32),
            context_length=np.zeros(1, np.int32),
            visibility=np.tril(np.ones((1, count, count), bool)),
        )
        pages, places = np.array(plain.slots_of(row, 0, count)).T
        expected = jax.tree.leaves(run(batch, empty))
        for pool, rows in zip(plain.pools(), expected, strict=True):
            np.testing.assert_allclose(pool[pages, places], rows[0], rtol=2e-4, atol=2e-5)


def test_chunks_of_a_prompt_leave_what_one_pass_leaves() -> None:
    pieces, whole = Bench([Plan(0, [0], [])], 1), Bench([Plan(0, [0], [])], 1)
    pieces.prefill(3)
    whole.prefill(19)
    for found, expected in zip(pieces.pools(), whole.pools(), strict=True):
        np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-5)
