"""Speculative decoding answers token for token what plain decoding answers (float32).

The drafter is a noisy oracle: it knows the plain answer, and by plan puts the true token at one rank or another, or
leaves it out. Two requests follow plans whose accepted lengths are known beforehand, and are compared; a third is
drafted for at random ranks. `make test` covers every pair of option values; the full product is marked slow.
"""

import functools
import itertools
from dataclasses import replace

import numpy as np
import pytest

from jaxspec.config import EngineConfig, SamplingParams, SpeculationConfig
from jaxspec.engine.engine import Engine
from jaxspec.model.families.config import ModelConfig
from jaxspec.sharding.mesh import make_mesh
from jaxspec.speculation.drafting import dflash_drafting
from tests.support.builders import (
    GROUPED,
    UNEVEN,
    Plan,
    accepted_by,
    finish,
    oracle,
    oracle_drafting,
    tiny_dflash,
    tiny_target,
)

SAMPLINGS = {
    "greedy": SamplingParams(temperature=0),
    "temperature": SamplingParams(temperature=1),
    "top_p": SamplingParams(temperature=1, top_p=0.8),
    "top_k": SamplingParams(temperature=1.3, top_k=5),
}
MODELS: dict[str, ModelConfig] = {"grouped": GROUPED, "uneven": UNEVEN}
AXES = {
    "sampling": tuple(SAMPLINGS),
    "budget": (1, 8, 32, 64),
    "top_k_cap": (1, 4, 8),
    "block": (4, 8, 16),
    "page_size": (1, 16),
    "rounds_per_call": (1, 8),
    "devices": (1, 2, 8),
    "model": tuple(MODELS),
}
Case = tuple[str, int, int, int, int, int, int, str]

CONTEXT = 160
ANSWER = 100
PROMPT_LENGTHS = (45, 38, 1)


# Every pair of values in as few cases as sampling and budget alone need;
# the dearest, filters on eight devices, verify small trees.
CASES: list[Case] = [
    ("greedy", 1, 4, 16, 16, 8, 1, "uneven"),
    ("greedy", 8, 1, 4, 16, 1, 1, "grouped"),
    ("greedy", 32, 4, 8, 1, 1, 2, "uneven"),
    ("greedy", 64, 8, 8, 16, 1, 8, "uneven"),
    ("temperature", 1, 8, 8, 1, 1, 1, "grouped"),
    ("temperature", 8, 8, 16, 1, 8, 2, "uneven"),
    ("temperature", 32, 1, 16, 16, 1, 8, "grouped"),
    ("temperature", 64, 4, 4, 1, 1, 2, "grouped"),
    ("top_k", 1, 1, 4, 16, 8, 2, "grouped"),
    ("top_k", 8, 4, 16, 1, 1, 8, "uneven"),
    ("top_k", 32, 8, 4, 1, 1, 1, "grouped"),
    ("top_k", 64, 4, 8, 1, 1, 1, "uneven"),
    ("top_p", 1, 8, 4, 16, 8, 8, "uneven"),
    ("top_p", 8, 4, 8, 1, 1, 2, "grouped"),
    ("top_p", 32, 1, 8, 1, 8, 1, "uneven"),
    ("top_p", 64, 1, 16, 1, 8, 1, "grouped"),
]


def test_the_cases_cover_every_pair_of_values() -> None:
    for (i, first), (j, second) in itertools.combinations(enumerate(AXES.values()), 2):
        for pair in itertools.product(first, second):
            assert any((case[i], case[j]) == pair for case in CASES)


def request(sampling: str, index: int) -> SamplingParams:
    seed = 100 + 10 * tuple(SAMPLINGS).index(sampling) + index
    return replace(SAMPLINGS[sampling], seed=seed, max_tokens=ANSWER, ignore_eos=True)


@functools.cache
def prompts(model: str) -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [rng.integers(0, MODELS[model].vocab_size, length).tolist() for length in PROMPT_LENGTHS]


@functools.cache
def plain_answers(model: str) -> dict[str, list[list[int]]]:
    """By sampling: what one device answers without a drafter, all in one batch."""
    asked = [(name, index) for name in SAMPLINGS for index in range(len(PROMPT_LENGTHS))]
    engine = Engine(
        tiny_target(MODELS[model]),
        mesh=make_mesh(1),
        speculation=SpeculationConfig(budget=0),
        config=EngineConfig(slots=len(asked), batch_buckets=(len(asked),), max_context=CONTEXT, prefill_chunk=64),
    )
    done = engine.generate([prompts(model)[index] for _, index in asked], [request(*one) for one in asked])
    answers: dict[str, list[list[int]]] = {name: [] for name in SAMPLINGS}
    for (name, _), completion in zip(asked, done, strict=True):
        assert completion.statistics.tau == 1
        answers[name].append(completion.tokens)
    return answers


def planned_rounds(budget: int, depth: int, top_k_cap: int, first: int) -> list[tuple[int, int]]:
    """Every second accepted length from `first` down, then true tokens at ranks above 0, over and over."""
    best = min(budget, depth)
    straight = [(b, 0) for b in range(best - first, -1, -2)]
    ranks = itertools.cycle(range(1, top_k_cap))
    sideways = [(b, rank) for b in range(1, best + 1) if top_k_cap > 1 and b + (rank := next(ranks)) <= budget]
    return list(itertools.islice(itertools.cycle(straight + sideways), ANSWER))


def histogram(rounds: list[tuple[int, int]], budget: int, depth: int) -> list[int]:
    """How often each length is accepted until the answer is full."""
    counts, left = [0] * (depth + 1), ANSWER
    for accepted in accepted_by(rounds, budget):
        new = min(accepted + 1, left)
        counts[min(accepted, new)] += 1
        left -= new
        if not left:
            return counts
    raise AssertionError("the plan ends before the answer")


def two_slots(page_size: int) -> EngineConfig:
    """Room for two requests of three, so that one takes over another's slot and pages; one size of batch."""
    return EngineConfig(slots=2, batch_buckets=(2,), page_size=page_size, max_context=CONTEXT, prefill_chunk=32)


Rounds = dict[int, list[tuple[int, int]]]  # by index of the prompt


def run_with_oracle(case: Case, rounds: Rounds, samplings: list[str]) -> dict[str, list[tuple]]:
    """(tokens, finish reason, statistics) of each prompt's answer, by sampling, from one engine."""
    _, budget, top_k_cap, block, page_size, rounds_per_call, devices, model = case
    plans = [
        Plan(request(sampling, index).seed, prompt, plain_answers(model)[sampling][index], rounds[index])
        for sampling in samplings
        for index, prompt in enumerate(prompts(model))
    ]
    engine = Engine(
        tiny_target(MODELS[model], devices),
        oracle(plans, budget, block - 1, devices),
        mesh=make_mesh(devices),
        speculation=SpeculationConfig(budget=budget, top_k_cap=top_k_cap, rounds_per_call=rounds_per_call),
        config=two_slots(page_size),
        make_drafting=oracle_drafting,
    )
    results: dict[str, list[tuple]] = {}
    for sampling in samplings:
        ids = [engine.add(prompt, request(sampling, index)) for index, prompt in enumerate(prompts(model))]
        done = finish(engine, ids)
        assert engine._scheduler.pages.free == engine.page_count
        results[sampling] = [done[request_id] for request_id in ids]
    return results


def check(case: Case, samplings: list[str]) -> None:
    """Runs a case for each sampling and compares tokens and accepted lengths."""
    budget, top_k_cap, depth, model = case[1], case[2], case[3] - 1, case[-1]
    rounds: Rounds = {
        0: planned_rounds(budget, depth, top_k_cap, 0),
        1: [],  # random ranks
        2: planned_rounds(budget, depth, top_k_cap, 1),
    }
    for sampling, done in run_with_oracle(case, rounds, samplings).items():
        seen = np.zeros(depth + 1, int)
        for index, (tokens, reason, statistics) in enumerate(done):
            assert tokens == plain_answers(model)[sampling][index]
            assert reason == "length"
            assert statistics.produced == ANSWER
            seen += statistics.accepted_lengths
            if rounds[index]:
                assert statistics.accepted_lengths == histogram(rounds[index], budget, depth)
        best = min(budget, depth)
        assert (seen[: best + 1] > 0).all()
        assert (seen[best + 1 :] == 0).all()


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_every_pair_of_options(case: Case) -> None:
    check(case, [case[0]])


def full_product() -> list[Case]:
    """Every combination but of the model, which alternates, and of the sampling: each case runs all of them."""
    axes = [list(enumerate(values)) for values in list(AXES.values())[1:-1]]
    models = tuple(MODELS)
    return [
        ("all", *(value for _, value in picked), models[sum(place for place, _ in picked) % len(models)])
        for picked in itertools.product(*axes)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("case", full_product(), ids=lambda case: "-".join(map(str, case)))
def test_the_full_product(case: Case) -> None:
    check(case, list(SAMPLINGS))


def test_true_tokens_at_ranks_above_0_are_accepted_somewhere() -> None:
    """What the plans promise of the cases above, each of which is held to its plan."""
    accepted = set()
    for _, budget, top_k_cap, block, *_ in CASES:
        for first in (0, 1):
            rounds, left = planned_rounds(budget, block - 1, top_k_cap, first), ANSWER
            for (b, rank), length in zip(rounds, accepted_by(rounds, budget), strict=True):
                if left > b and length == b and rank:
                    accepted.add((top_k_cap, rank))
                left -= length + 1
    assert accepted >= {(4, 1), (4, 2), (4, 3), *((8, rank) for rank in range(1, 8))}


def test_a_perfect_drafter_fills_every_round_and_a_wrong_one_none() -> None:
    budget, depth, model = 8, 3, "grouped"
    rounds = {0: [(depth, 0)] * ANSWER, 1: [(0, 0)] * ANSWER, 2: [(depth, 1)] * ANSWER}
    case = ("temperature", budget, 4, depth + 1, 16, 1, 1, model)
    done = run_with_oracle(case, rounds, ["temperature"])["temperature"]
    assert [tokens for tokens, *_ in done] == plain_answers(model)["temperature"]
    perfect, wrong, sibling = (statistics for *_, statistics in done)
    assert wrong.tau == 1
    assert wrong.accepted_lengths == [ANSWER, 0, 0, 0]
    for statistics in (perfect, sibling):
        assert statistics.accepted_lengths == [0, 0, 0, ANSWER // (depth + 1)]
        assert statistics.tau == depth + 1


@pytest.mark.parametrize(
    ("devices", "page_size", "rounds_per_call", "sampling"), [(8, 1, 8, "top_p"), (2, 16, 1, "greedy")]
)
def test_the_dflash_drafter_with_its_own_cache(
    devices: int, page_size: int, rounds_per_call: int, sampling: str
) -> None:
    engine = Engine(
        tiny_target(GROUPED, devices),
        tiny_dflash(devices=devices),
        mesh=make_mesh(devices),
        speculation=SpeculationConfig(budget=16, top_k_cap=8, rounds_per_call=rounds_per_call),
        config=two_slots(page_size),
        make_drafting=dflash_drafting,
    )
    ids = [engine.add(prompt, request(sampling, index)) for index, prompt in enumerate(prompts("grouped"))]
    done = finish(engine, ids)
    assert [done[i][0] for i in ids] == plain_answers("grouped")[sampling]
    assert any(sum(done[i][2].accepted_lengths[1:]) for i in ids), "a lucky guess is accepted now and then"
