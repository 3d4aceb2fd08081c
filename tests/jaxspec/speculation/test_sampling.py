"""Filters against transformers, noise on any mesh, and the law of sampled tokens."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import PartitionSpec
from scipy import stats
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from jaxspec.config import EngineConfig, SamplingParams, SpeculationConfig
from jaxspec.engine.engine import Engine
from jaxspec.model.layers.batch import ForwardBatch
from jaxspec.model.layers.cache import empty_cache
from jaxspec.sharding.compilation import REPLICATED, jit_on_mesh
from jaxspec.sharding.mesh import TENSOR_AXIS, make_mesh
from jaxspec.sharding.vocab_shard import VocabShard
from jaxspec.speculation.sampling import SamplingLevel, gumbel_noise, kept, level_of, sample
from jaxspec.speculation.slot_table import SlotTable, empty_slots
from tests.support.builders import GROUPED, Plan, on_mesh, oracle, oracle_drafting, tiny_target

VOCAB = 64
WHOLE = VocabShard(VOCAB, False)


def state_of(params: list[SamplingParams], length: int = 0) -> SlotTable:
    state = empty_slots(len(params), VOCAB)
    for row, one in enumerate(params):
        for name in ("temperature", "top_p", "min_p", "top_k", "choice"):
            getattr(state, name)[row] = getattr(one, name)
        state.seed[row] = one.seed or 0
    state.length[:] = length
    return jax.tree.map(jnp.asarray, state)


def on_devices(
    devices: int, body: Callable[[jax.Array, VocabShard], Any], scores: np.ndarray, split_result: bool
) -> Any:
    """`body(scores of a device, its part of the vocabulary)` with the vocabulary, last, split over the mesh."""
    split = PartitionSpec(*[None] * (scores.ndim - 1), TENSOR_AXIS) if devices > 1 else REPLICATED
    out_specs = split if split_result else REPLICATED

    def run(part: jax.Array) -> Any:
        return body(part, VocabShard(scores.shape[-1], devices > 1))

    return jit_on_mesh(run, make_mesh(devices), split, out_specs)(scores)


def survivors(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Which tokens transformers keeps."""
    scores = TemperatureLogitsWarper(float(params.temperature))(None, torch.tensor(logits))
    if params.top_k:
        scores = TopKLogitsWarper(params.top_k)(None, scores)
    if params.top_p < 1:
        scores = TopPLogitsWarper(params.top_p)(None, scores)
    if params.min_p:
        scores = MinPLogitsWarper(params.min_p)(None, scores)
    return np.isfinite(scores.numpy())


FILTERS = [
    SamplingParams(temperature=t, top_k=k, top_p=p, min_p=m)
    for t in (0.6, 1.0, 1.7)
    for k in (0, 1, 7, 500)
    for p in (1.0, 0.9, 0.3, 1e-6)
    for m in (0.0, 0.05, 1.0)
]


@pytest.mark.parametrize("devices", [1, 2, 8])
def test_filters_keep_what_transformers_keeps(devices: int) -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 2.5, (len(FILTERS), 12, VOCAB)).astype(np.float32)
    state = state_of(FILTERS)
    scaled = logits / np.asarray(state.temperature)[:, None, None]
    found = np.asarray(on_devices(devices, lambda part, vocab: kept(part, state, vocab), scaled, True))
    for row, params in enumerate(FILTERS):
        np.testing.assert_array_equal(found[row], survivors(logits[row], params), err_msg=str(params))


def test_equal_scores_are_kept_or_dropped_together() -> None:
    scores = np.array([[[3, 3, 1, 1, 0]]], np.float32)

    def keep(**params: Any) -> list[bool]:
        state = state_of([SamplingParams(**params)])
        return np.asarray(jax.jit(lambda s: kept(s, state, VocabShard(5, False)))(scores))[0, 0].tolist()

    assert keep(top_k=1) == [True, True, False, False, False]
    assert keep(top_k=3) == [True, True, True, True, False]
    assert keep(top_p=0.3) == [True, True, False, False, False]
    assert keep(min_p=1.0) == [True, True, False, False, False]


def test_the_level_is_the_least_that_serves() -> None:
    assert level_of(SamplingParams(temperature=0, top_k=4, top_p=0.5)) == SamplingLevel.GREEDY
    assert level_of(SamplingParams(temperature=0.1)) == SamplingLevel.TEMPERATURE
    for params in ({"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}):
        assert level_of(SamplingParams(**params)) == SamplingLevel.FILTERED


def test_noise_is_one_table_on_any_mesh() -> None:
    seed, choice = jnp.array([1, 1, 2**32 - 1], jnp.uint32), jnp.array([0, 1, 0], jnp.int32)
    positions = jnp.array([[0, 7], [0, 7], [3, 100000]], jnp.int32)
    tables = [
        np.asarray(
            on_devices(
                devices,
                lambda part, vocab: gumbel_noise(seed, choice, positions, vocab),
                np.zeros((1, 1, VOCAB), np.float32),
                True,
            )
        )
        for devices in (1, 2, 8)
    ]
    for table in tables[1:]:
        np.testing.assert_array_equal(table, tables[0])
    flat = tables[0].reshape(6, VOCAB)
    assert len({row.tobytes() for row in flat}) == 6, "seed, choice and position each change the noise"
    # A row depends on nothing but its key: not on the batch, nor on the positions beside it.
    alone = gumbel_noise(seed[2:], choice[2:], positions[2:, 1:], WHOLE)
    np.testing.assert_array_equal(alone[0, 0], tables[0][2, 1])


def test_rows_of_one_depth_share_their_noise_and_positions_do_not() -> None:
    rng = np.random.default_rng(1)
    logits = np.repeat(rng.normal(size=(1, 1, VOCAB)).astype(np.float32), 40, axis=1)
    depths = np.arange(40, dtype=np.int32)[None] // 2
    params = SamplingParams(temperature=1, seed=4)
    for level in (SamplingLevel.TEMPERATURE, SamplingLevel.FILTERED):
        drawn = np.asarray(
            jax.jit(lambda x, level=level: sample(x, depths, state_of([params], 10), WHOLE, level, 19))(logits)
        )[0]
        np.testing.assert_array_equal(drawn[0::2], drawn[1::2])
        assert len(set(drawn[0::2].tolist())) > 5
        # The same position reached from a longer context: row d stands where row d + 3 stood.
        later = np.asarray(
            jax.jit(lambda x, level=level: sample(x, depths, state_of([params], 13), WHOLE, level, 19))(logits)
        )[0]
        np.testing.assert_array_equal(later[:-6], drawn[6:])


@pytest.mark.parametrize("devices", [1, 2, 8])
def test_a_greedy_row_is_greedy_at_every_level(devices: int) -> None:
    logits = np.random.default_rng(2).normal(size=(2, 5, VOCAB)).astype(np.float32)
    depths = np.zeros((2, 5), np.int32)
    state = state_of([SamplingParams(temperature=0, top_k=3), SamplingParams(temperature=2, seed=1)])
    for level in SamplingLevel:
        drawn = on_devices(
            devices,
            lambda part, vocab, level=level: sample(part, depths, state, vocab, level, 0),
            logits,
            False,
        )
        np.testing.assert_array_equal(drawn[0], logits[0].argmax(-1))


SMALL = replace(GROUPED, vocab_size=8)
PROMPT = [3, 1, 6]
LAWS = [
    SamplingParams(temperature=1),
    SamplingParams(temperature=0.7, top_k=3),
    SamplingParams(temperature=1.2, top_p=0.8),
    SamplingParams(temperature=1, min_p=0.15),
]
DRAWS = 2048


def two_token_logits(target: Any) -> np.ndarray:
    """float32 [vocab, 2, vocab]: after the prompt, and after the prompt and each first token."""
    vocab = SMALL.vocab_size
    tokens = np.array([[*PROMPT, first] for first in range(vocab)], np.int32)
    rows = tokens.shape[1]
    batch = ForwardBatch(
        tokens=tokens,
        positions=np.broadcast_to(np.arange(rows, dtype=np.int32), tokens.shape),
        page_table=np.ones((vocab, 1), np.int32),
        context_length=np.zeros(vocab, np.int32),
        visibility=np.broadcast_to(np.tril(np.ones((rows, rows), bool)), (vocab, rows, rows)),
    )
    pools = empty_cache(target.cache_rows, 1, 1, target.layout, make_mesh(1), "float32")
    return np.asarray(on_mesh(1, target, lambda m, b, c: m.logits(m(b, c, ()).hidden))(batch, pools))[:, -2:]


def two_token_law(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """[vocab, vocab], exact, with transformers' filters."""
    weights = np.exp(logits.astype(np.float64) / params.temperature)
    weights *= survivors(logits.reshape(-1, logits.shape[-1]), params).reshape(logits.shape)
    law = weights / weights.sum(-1, keepdims=True)
    return law[0, 0][:, None] * law[:, 1]


def p_value(counts: np.ndarray, law: np.ndarray) -> float:
    """Of a chi-square test; cells with fewer than 5 draws expected are pooled."""
    expected = law * counts.sum()
    common = expected >= 5
    observed = np.array([*counts[common], counts[~common].sum()])
    wanted = np.array([*expected[common], expected[~common].sum()])
    if wanted[-1] == 0:
        if observed[-1]:
            return 0.0
        observed, wanted = observed[:-1], wanted[:-1]
    assert len(wanted) >= 8
    return float(stats.chisquare(observed, wanted).pvalue)


def test_sampled_tokens_follow_the_target_law() -> None:
    """Chi-square over two tokens of 2,048 speculative answers to each setting, random guesses as drafts."""
    target = tiny_target(SMALL)
    slots = 256
    engine = Engine(
        target,
        oracle([Plan(2**32 - 1, PROMPT, [])], budget=8, depth=3, devices=1),
        mesh=make_mesh(1),
        speculation=SpeculationConfig(budget=8, top_k_cap=4),
        config=EngineConfig(slots=slots, max_context=16),
        make_drafting=oracle_drafting,
    )
    # Waves that fill every slot and end within two rounds run one program only; all settings share it.
    params = [
        replace(law, seed=which * DRAWS + draw, max_tokens=2, ignore_eos=True)
        for draw in range(DRAWS)
        for which, law in enumerate(LAWS)
    ]
    counts = np.zeros((len(LAWS), SMALL.vocab_size, SMALL.vocab_size), int)
    accepted = 0
    for wave in range(0, len(params), slots):
        for one, completion in enumerate(engine.generate([PROMPT] * slots, params[wave : wave + slots])):
            counts[(wave + one) % len(LAWS), *completion.tokens] += 1
            accepted += sum(completion.statistics.accepted_lengths[1:])
    assert accepted > len(params) / 20, "second tokens come from drafts, too"
    logits = two_token_logits(target)
    laws = [two_token_law(logits, law) for law in LAWS]
    for which, law in enumerate(laws):
        assert counts[which].sum() == DRAWS
        assert counts[which][law == 0].sum() == 0, "a filtered token was drawn"
        assert p_value(counts[which], law) > 1e-3
        # And the test can tell: no other setting's law fits.
        for other in laws[:which] + laws[which + 1 :]:
            assert p_value(counts[which], other) < 1e-9
