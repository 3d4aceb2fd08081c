"""Compiled rounds over caches full of noise: what they write, and that all devices' copies agree."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxspec.config import SpeculationConfig
from jaxspec.engine.programs import DecodeShape, PrefillShape, Programs
from jaxspec.model.families.protocols import Target
from jaxspec.model.layers.cache import pool_spec
from jaxspec.sharding.mesh import make_mesh
from jaxspec.speculation.logits_processors import everything_allowed
from jaxspec.speculation.prefill import PromptChunk
from jaxspec.speculation.round import Batch, Caches, Carry
from jaxspec.speculation.sampling import SamplingLevel, SamplingMode
from jaxspec.speculation.slot_table import column_names, empty_slots, slot_specs
from tests.support.builders import DFLASH, GROUPED, Guided, Plan, guided_drafting, oracle, tiny_dflash, tiny_target

SLOTS, CONTEXT, PAGES = 4, 64, 70
BLOCK = DFLASH.block_size
PROMPTS = [
    np.random.default_rng(row).integers(0, GROUPED.vocab_size, length).tolist() for row, length in enumerate((20, 9, 2))
]
SEEDS = (50, 51, 52)
ANSWER = 40
SPECULATION = SpeculationConfig(budget=12, top_k_cap=3, rounds_per_call=2)


class Bench:
    """Compiled programs over caches that start full of noise, so that a stray write can't hide among zeros."""

    def __init__(self, plans: Sequence[Plan], devices: int, target: Target | None = None, page: int = 4):
        mesh = make_mesh(devices)
        self.page, self.width = page, CONTEXT // page
        target, drafter = target or tiny_target(GROUPED, devices), tiny_dflash(DFLASH, devices)
        guided = Guided(oracle(plans, SPECULATION.budget, DFLASH.depth, devices), drafter)
        self.programs = Programs(mesh, target, guided, guided_drafting)
        rng = np.random.default_rng(9)

        def noise(module: Any) -> Any:
            return tuple(
                tuple(
                    jax.device_put(
                        rng.normal(size=(PAGES, page, *row.shape)).astype(np.float32),
                        jax.sharding.NamedSharding(mesh, pool_spec(row, module.layout)),
                    )
                    for row in layer
                )
                for layer in module.cache_rows
            )

        self.vocab = target.config.vocab_size
        slots = self.programs.place(empty_slots(SLOTS, self.vocab), slot_specs(target.layout))
        self.carry = Carry(Caches(noise(target), noise(guided)), slots)
        self.table = rng.permutation(PAGES)[: SLOTS * self.width].reshape(SLOTS, -1).astype(np.int32)
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
            shape = PrefillShape(SLOTS, self.width, chunk)
            part = PromptChunk(tokens, np.zeros_like(tokens), done, count, self.table)
            self.carry, _ = self.programs.prefill(shape, self.carry, part)
            done = done + count
        rows = empty_slots(SLOTS, self.vocab)
        rows.anchor[:3] = [prompt[-1] for prompt in PROMPTS]
        rows.length[:] = wanted
        rows.remaining[:3] = ANSWER
        rows.finished[:3] = False
        rows.temperature[:3] = (0, 1, 1)
        rows.seed[:3] = SEEDS
        columns = {name: getattr(rows, name) for name in column_names(per_token=False)}
        slots = self.programs.admit(self.carry.slots, np.arange(SLOTS, dtype=np.int32), columns)
        self.carry = Carry(self.carry.caches, slots)

    def decode(self, speculation: SpeculationConfig, capacity: Sequence[int]) -> Any:
        shape = DecodeShape(SLOTS, self.width, SamplingMode(SamplingLevel.TEMPERATURE), speculation)
        slots = np.arange(SLOTS, dtype=np.int32)
        batch = Batch(slots, self.table, np.array(capacity, np.int32), everything_allowed(SLOTS))
        self.carry, result = self.programs.decode(shape, self.carry, batch)
        self.results.append(jax.tree.map(np.asarray, result))
        assert_copies_agree((self.carry, result))
        return self.results[-1]

    def pools(self) -> list[np.ndarray]:
        return [np.array(pool) for pool in jax.tree.leaves(self.carry.caches)]

    def lengths(self) -> np.ndarray:
        return np.array(self.carry.slots.length)

    def slots_of(self, row: int, start: int, stop: int) -> list[tuple[int, int]]:
        """(page, place) of positions start … stop - 1."""
        return [(int(self.table[row, p // self.page]), p % self.page) for p in range(start, stop)]

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
    allowed = np.zeros(before[0].shape[:2], bool)
    for page, place in places:
        allowed[page, place] = True
    for old, new in zip(before, after, strict=True):
        assert old[~allowed].tobytes() == new[~allowed].tobytes()
        changed = (old[allowed] != new[allowed]).reshape(len(places), -1).any(axis=1)
        assert changed.all(), "an accepted row was not written"


def run_to_the_end(bench: Bench) -> set[int]:
    """Prefills and decodes under `SPECULATION`, comparing caches after every call; the accepted lengths seen."""
    before = bench.pools()
    bench.prefill(16)
    committed = [place for row, prompt in enumerate(PROMPTS) for place in bench.slots_of(row, 0, len(prompt) - 1)]
    assert_only_these_changed(before, bench.pools(), committed)
    lengths_seen = set()
    while not np.asarray(bench.carry.slots.finished).all():
        before, start = bench.pools(), bench.lengths()
        result = bench.decode(SPECULATION, [64, 64, 64, 64])
        places = [place for row in range(SLOTS) for place in bench.slots_of(row, start[row], bench.lengths()[row])]
        assert_only_these_changed(before, bench.pools(), places)
        assert (bench.lengths() - start == result.count.sum(0)).all()
        lengths_seen |= set(result.accepted[result.count > 0].tolist())
    return lengths_seen


def assert_same_rows(found: Bench, expected: Bench) -> None:
    """Both benches' caches hold, within float32's rounding, the same rows of all three sequences."""
    for ours, theirs in zip(found.pools(), expected.pools(), strict=True):
        for row, prompt in enumerate(PROMPTS):
            last = len(prompt) - 1 + ANSWER
            (pages, places), (other_pages, other_places) = (
                np.array(bench.slots_of(row, 0, last)).T for bench in (found, expected)
            )
            np.testing.assert_allclose(ours[pages, places], theirs[other_pages, other_places], rtol=2e-4, atol=2e-5)
