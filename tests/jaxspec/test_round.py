"""What rounds leave in the caches and in the state: the accepted rows and nothing else, the same on every device."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.adjustments import no_adjustments
from jaxspec.config import SpeculationConfig
from jaxspec.programs import DecodeShape, PrefillShape, Programs, bucket, replicate
from jaxspec.round import Caches
from jaxspec.sampling import SamplingLevel, SamplingWork
from jaxspec.state import emitted_tokens, empty_rows, put_slots, take_slots
from model.batch import ForwardBatch
from model.cache import empty_cache
from sharding.mesh import make_mesh
from tests.builders import DFLASH, GROUPED, Guided, Plan, guided_drafting, on_mesh, oracle, tiny_dflash, tiny_target

pytestmark = pytest.mark.usefixtures("quick_compile")

SLOTS, PAGE, WIDTH, PAGES = 4, 4, 16, 70
BLOCK = DFLASH.block_size
PROMPTS = [
    np.random.default_rng(row).integers(0, GROUPED.vocab_size, length).tolist() for row, length in enumerate((20, 9, 2))
]
SEEDS = (50, 51, 52)
ANSWER = 40
SPECULATION = SpeculationConfig(budget=12, top_k_cap=3, rounds_per_call=2)


class Bench:
    """Compiled programs over caches that start full of noise, so that a stray write can't hide among zeros."""

    def __init__(self, plans: Sequence[Plan], devices: int):
        mesh = make_mesh(devices)
        target, drafter = tiny_target(GROUPED, devices), tiny_dflash(DFLASH, devices)
        guided = Guided(oracle(plans, SPECULATION.budget, DFLASH.depth, devices), drafter)
        self.programs = Programs(mesh, target, guided, guided_drafting)
        rng = np.random.default_rng(9)

        def noise(module: Any) -> Any:
            return tuple(
                tuple(
                    jax.device_put(
                        rng.normal(size=(PAGES, PAGE, *row.shape)).astype(np.float32),
                        jax.sharding.NamedSharding(mesh, module.layout.spec((None, None, *row.axes))),
                    )
                    for row in layer
                )
                for layer in module.cache_rows
            )

        self.caches = Caches(noise(target), noise(guided))
        self.state = replicate(empty_rows(SLOTS, 8), mesh)
        self.adjustments = self.programs.place(no_adjustments(SLOTS, target.config.vocab_size))
        self.table = rng.permutation(PAGES)[: SLOTS * WIDTH].reshape(SLOTS, WIDTH).astype(np.int32)
        self.results: list[Any] = []

    def prefill(self, chunk: int) -> None:
        """Processes all prompts but their last tokens, and admits them to slots 0, 1, 2; slot 3 stays empty."""
        done = np.zeros(SLOTS, np.int32)
        wanted = np.array([len(prompt) - 1 for prompt in PROMPTS] + [0], np.int32)
        while (done < wanted).any():
            count = np.minimum(wanted - done, chunk)
            tokens = np.full((SLOTS, chunk), 5, np.int32)
            for row, prompt in enumerate(PROMPTS):
                tokens[row, : count[row]] = prompt[done[row] : done[row] + count[row]]
            shape, following = PrefillShape(SLOTS, WIDTH, chunk), np.zeros_like(tokens)
            self.caches, _ = self.programs.prefill(shape, self.caches, tokens, done, count, self.table, following)
            done = done + count
        rows = empty_rows(SLOTS, 8)
        rows.anchor[:3] = [prompt[-1] for prompt in PROMPTS]
        rows.length[:] = wanted
        rows.remaining[:3] = ANSWER
        rows.finished[:3] = False
        rows.temperature[:3] = (0, 1, 1)
        rows.seed[:3] = SEEDS
        self.state = self.programs.admit(self.state, np.arange(SLOTS, dtype=np.int32), rows)

    def decode(self, speculation: SpeculationConfig, capacity: Sequence[int]) -> Any:
        shape = DecodeShape(SLOTS, WIDTH, SamplingWork(SamplingLevel.TEMPERATURE), speculation)
        slots = np.arange(SLOTS, dtype=np.int32)
        self.caches, self.state, self.adjustments, result = self.programs.decode(
            shape, self.caches, self.state, self.adjustments, slots, self.table, np.array(capacity, np.int32)
        )
        self.results.append(jax.tree.map(np.asarray, result))
        assert_copies_agree((self.caches, self.state, result))
        return self.results[-1]

    def pools(self) -> list[np.ndarray]:
        return [np.array(pool) for pool in jax.tree.leaves(self.caches)]

    def lengths(self) -> np.ndarray:
        return np.array(self.state.length)

    def slots_of(self, row: int, start: int, stop: int) -> list[tuple[int, int]]:
        """(page, place) of positions start … stop - 1."""
        return [(int(self.table[row, p // PAGE]), p % PAGE) for p in range(start, stop)]

    def answers(self) -> list[list[int]]:
        tokens: list[list[int]] = [[] for _ in range(SLOTS)]
        for result in self.results:
            for index in np.ndindex(result.count.shape):
                tokens[index[1]] += result.tokens[index][: result.count[index]].tolist()
        return tokens


def assert_copies_agree(tree: Any) -> None:
    """Every device that holds a part of an array holds the same bytes as the others that hold it."""
    for array in jax.tree.leaves(tree):
        parts: dict[str, np.ndarray] = {}
        for shard in array.addressable_shards:
            first = parts.setdefault(str(shard.index), np.asarray(shard.data))
            np.testing.assert_array_equal(first, np.asarray(shard.data))


def assert_only_these_changed(before: list[np.ndarray], after: list[np.ndarray], places: list[tuple[int, int]]) -> None:
    allowed = np.zeros((PAGES, PAGE), bool)
    for page, place in places:
        allowed[page, place] = True
    for old, new in zip(before, after, strict=True):
        assert old[~allowed].tobytes() == new[~allowed].tobytes()
        assert (old[allowed] != new[allowed]).any(axis=(1, 2)).all(), "an accepted row was not written"


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
    before = bench.pools()
    bench.prefill(16)
    committed = [place for row, prompt in enumerate(PROMPTS) for place in bench.slots_of(row, 0, len(prompt) - 1)]
    assert_only_these_changed(before, bench.pools(), committed)
    lengths_seen = set()
    while not np.asarray(bench.state.finished).all():
        before, start = bench.pools(), bench.lengths()
        result = bench.decode(SPECULATION, [64, 64, 64, 64])
        places = [place for row in range(SLOTS) for place in bench.slots_of(row, start[row], bench.lengths()[row])]
        assert_only_these_changed(before, bench.pools(), places)
        assert (bench.lengths() - start == result.count.sum(0)).all()
        lengths_seen |= set(result.accepted[result.count > 0].tolist())
    assert lengths_seen >= {0, 1, 3, 5, 6, 7}
    assert bench.answers() == answers
    for found, expected in zip(bench.pools(), plain.pools(), strict=True):
        for row, prompt in enumerate(PROMPTS):
            for ours, theirs in zip(
                bench.slots_of(row, 0, len(prompt) - 1 + ANSWER),
                plain.slots_of(row, 0, len(prompt) - 1 + ANSWER),
                strict=True,
            ):
                np.testing.assert_allclose(found[ours], expected[theirs], rtol=2e-4, atol=2e-5)


def test_a_slot_without_room_freezes_unharmed_and_goes_on_later(plain: Bench) -> None:
    answers = plain.answers()
    plans = [Plan(*of) for of in zip(SEEDS, PROMPTS, answers, [[(7, 0)] * 10, [(4, 0)] * 20, []], strict=False)]
    bench = Bench(plans, 1)
    bench.prefill(16)
    start = bench.lengths()
    # Slot 0 lacks one place, slot 1 holds exactly one round, slot 2 holds all.
    before, state = bench.pools(), jax.tree.map(np.array, bench.state)
    result = bench.decode(SPECULATION, [start[0] + BLOCK - 1, start[1] + BLOCK, 64, 0])
    assert result.count[:, 0].tolist() == [0, 0]
    assert result.drafted[:, 0].tolist() == [0, 0]
    assert result.count[:, 1].tolist() == [5, 0]
    assert (result.count[:, 2] > 0).all()
    assert not result.finished[:, :3].any()
    for old, new in zip(jax.tree.leaves(state), jax.tree.leaves(bench.state), strict=True):
        np.testing.assert_array_equal(old[[0, 3]], np.asarray(new)[[0, 3]])
    assert_only_these_changed(
        before,
        bench.pools(),
        [place for row in (1, 2) for place in bench.slots_of(row, start[row], bench.lengths()[row])],
    )
    # Near its limit a slot needs room for no more than what remains.
    while not np.asarray(bench.state.finished).all():
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


@given(st.integers(0, 2**31))
@settings(max_examples=100, deadline=None)
def test_tokens_count_up_to_the_first_stop_or_the_limit(seed: int) -> None:
    rng = np.random.default_rng(seed)
    batch, width = 6, 5
    tokens = rng.integers(0, 8, (batch, width)).astype(np.int32)
    accepted = rng.integers(0, width, batch).astype(np.int32)
    live = rng.random(batch) < 0.8
    state = empty_rows(batch, 3)
    state.remaining[:] = rng.integers(1, 8, batch)
    state.finished[:] = rng.random(batch) < 0.3
    state.stop_ids[:, :2] = rng.integers(-1, 8, (batch, 2))
    count, finished = emitted_tokens(jax.tree.map(jnp.asarray, state), tokens, accepted, jnp.asarray(live))
    for row in range(batch):
        if not live[row]:
            assert (int(count[row]), bool(finished[row])) == (0, bool(state.finished[row]))
            continue
        offered = tokens[row, : min(accepted[row] + 1, state.remaining[row])].tolist()
        stops = [place for place, token in enumerate(offered) if token in state.stop_ids[row]]
        expected = stops[0] + 1 if stops else len(offered)
        assert int(count[row]) == expected
        assert bool(finished[row]) == (bool(stops) or expected == state.remaining[row])


def test_rows_of_slots_are_taken_and_put_back() -> None:
    state = replace(empty_rows(4, 2), anchor=np.arange(4, dtype=np.int32), finished=np.zeros(4, bool))
    state = jax.tree.map(jnp.asarray, state)
    slots = jnp.array([2, 0, 4], jnp.int32)  # 4: no slot
    rows = take_slots(state, slots)
    assert rows.anchor[:2].tolist() == [2, 0]
    assert rows.finished.tolist() == [False, False, True]
    changed = put_slots(state, slots, replace(rows, anchor=jnp.array([20, 10, 99], jnp.int32)))
    assert changed.anchor.tolist() == [10, 1, 20, 3]


def test_buckets_grow_fourfold_up_to_the_largest() -> None:
    assert [bucket(n, 40) for n in (1, 2, 4, 5, 16, 17, 40)] == [1, 4, 4, 16, 16, 40, 40]
    assert [bucket(n, 512, 32) for n in (1, 32, 33, 129, 512)] == [32, 32, 128, 512, 512]
    assert bucket(3, 2, 8) == 2
