"""Penalties, biases, a least length and log-probabilities: right at every row of a tree, and the same without trees."""

import functools
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jaxspec.config import EngineConfig, SamplingParams, SpeculationConfig
from jaxspec.engine.engine import Engine
from jaxspec.engine.request import Completion
from jaxspec.engine.scheduler import Scheduler
from jaxspec.model.layers.batch import ForwardBatch
from jaxspec.model.layers.cache import empty_cache
from jaxspec.sharding.mesh import make_mesh
from tests.support.builders import GROUPED, Plan, on_mesh, oracle, oracle_drafting, tiny_target

VOCAB, CONTEXT, LIMIT = GROUPED.vocab_size, 96, 40
GREEDY = SamplingParams(temperature=0, max_tokens=LIMIT, ignore_eos=True, log_probs=4)
# Without options the tiny model soon repeats itself; with them each answer goes its own way.
OPTIONS = {
    "none": GREEDY,
    "repetition": replace(GREEDY, repetition_penalty=1.7),
    "presence": replace(GREEDY, presence_penalty=1.9, log_probs=None),
    "frequency": replace(GREEDY, frequency_penalty=0.8, prompt_log_probs=3),
    "bias": replace(GREEDY, logit_bias=((3, 4.0), (9, -100.0), (60, 2.5)), log_probs=0),
    "least": replace(GREEDY, min_tokens=17, stop_token_ids=tuple(range(0, VOCAB, 4))),
    "sampled": replace(GREEDY, temperature=1.0, repetition_penalty=0.8, presence_penalty=-1.5, log_probs=20),
    "all": replace(
        GREEDY,
        temperature=1.2,
        top_p=0.9,
        repetition_penalty=1.3,
        presence_penalty=0.5,
        frequency_penalty=0.5,
        logit_bias=((5, 3.0),),
        min_tokens=30,
        stop_token_ids=tuple(range(8)),
        prompt_log_probs=0,
    ),
}


def prompt(index: int) -> list[int]:
    return np.random.default_rng(index).integers(0, VOCAB, 4 + 7 * index).tolist()


def requests() -> tuple[list[list[int]], list[SamplingParams]]:
    params = [replace(params, seed=70 + index) for index, params in enumerate(OPTIONS.values())]
    return [prompt(index) for index in range(len(params))], params


def engine(budget: int, devices: int = 1, drafter: Any = None, **sizes: int) -> Engine:
    sizes = {"slots": 4, "page_size": 4, "prefill_chunk": 32} | sizes
    return Engine(
        tiny_target(devices=devices),
        drafter,
        mesh=make_mesh(devices),
        speculation=SpeculationConfig(budget=budget, top_k_cap=3),
        config=EngineConfig(batch_buckets=(sizes["slots"],), max_context=CONTEXT, devices=devices, **sizes),
        make_drafting=oracle_drafting,
        eos_token_ids=(),
    )


@functools.cache
def plain() -> list[Completion]:
    return engine(0).generate(*requests())


def speculative(devices: int, **sizes: int) -> list[Completion]:
    """Answers with trees, half of the requests drafted for perfectly and half at random ranks."""
    prompts, params = requests()
    plans = [
        Plan(p.seed or 0, prompt, done.tokens, [(7, 0)] * LIMIT if i % 2 else [])
        for i, (prompt, p, done) in enumerate(zip(prompts, params, plain(), strict=True))
    ]
    return engine(8, devices, oracle(plans, 8, 7, devices), **sizes).generate(prompts, params)


def logits_after(tokens: list[int]) -> np.ndarray:
    """The target's logits after each token, [tokens, vocab], from one pass that knows neither pages nor rounds."""
    width = CONTEXT
    padded = np.zeros((1, width), np.int32)
    padded[0, : len(tokens)] = tokens
    batch = ForwardBatch(
        tokens=padded,
        positions=np.arange(width, dtype=np.int32)[None],
        page_table=np.ones((1, 1), np.int32),
        context_length=np.zeros(1, np.int32),
        visibility=np.tril(np.ones((1, width, width), bool)),
    )
    run, pools = whole_pass()
    return np.asarray(run(batch, pools), np.float64)[0, : len(tokens)]


@functools.cache
def whole_pass() -> Any:
    target = tiny_target()
    pools = empty_cache(target.cache_rows, 1, 1, target.layout, make_mesh(1), "float32")
    return on_mesh(1, target, lambda t, batch, pools: t.logits(t(batch, pools, ()).hidden)), pools


def adjusted(logits: np.ndarray, prompt: list[int], answer: list[int], params: SamplingParams) -> np.ndarray:
    """The options read one token at a time."""
    scores = logits.copy()
    for token, bias in params.logit_bias:
        scores[token] += bias
    if len(answer) < params.min_tokens:
        scores[list(params.stop_token_ids)] = -np.inf
    counts = Counter(answer)
    for token in {*prompt, *answer}:
        scores[token] *= params.repetition_penalty if scores[token] < 0 else 1 / params.repetition_penalty
    for token, count in counts.items():
        scores[token] -= params.frequency_penalty * count + params.presence_penalty
    return scores


def test_greedy_answers_take_the_best_adjusted_token_at_every_place() -> None:
    for prompt, params, done in zip(*requests(), plain(), strict=True):
        after = logits_after(prompt + done.tokens)
        for place, token in enumerate(done.tokens):
            scores = adjusted(after[len(prompt) - 1 + place], prompt, done.tokens[:place], params)
            if params.greedy:
                assert scores[token] >= scores.max() - 1e-4
            assert scores[token] > -np.inf
        stops = [place for place, token in enumerate(done.tokens) if token in params.stop_token_ids]
        assert stops in ([], [len(done.tokens) - 1])
        assert len(done.tokens) > params.min_tokens


def test_each_option_changes_the_answer() -> None:
    """So that none of the comparisons here holds for want of an effect."""
    prompts, params = requests()
    bare = [replace(GREEDY, temperature=p.temperature, seed=p.seed, stop_token_ids=p.stop_token_ids) for p in params]
    without = [done.tokens for done in engine(0, slots=16).generate(prompts, bare)]
    for name, done, other in zip(OPTIONS, plain(), without, strict=True):
        assert (done.tokens == other) == (name == "none")


def test_log_probs_are_the_models_own() -> None:
    for prompt, params, done in zip(*requests(), plain(), strict=True):
        logits = logits_after(prompt + done.tokens)
        expected = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        parts = [(params.log_probs, done.log_probs, done.tokens, len(prompt))]
        parts.append((params.prompt_log_probs, done.prompt_log_probs, prompt[1:], 1))
        for top, entries, tokens, start in parts:
            assert len(entries) == (0 if top is None else len(tokens))
            for place, entry in enumerate(entries):
                row = expected[start + place - 1]
                assert entry.token == tokens[place]
                np.testing.assert_allclose(entry.log_prob, row[entry.token], atol=1e-4)
                assert len(entry.top) == top
                np.testing.assert_allclose([value for _, value in entry.top], np.sort(row)[::-1][:top], atol=1e-4)
                np.testing.assert_allclose([row[token] for token, _ in entry.top], np.sort(row)[::-1][:top], atol=1e-4)


@pytest.fixture
def paused(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Requests that lost their pages before their end."""
    ids: list[int] = []
    pause_last = Scheduler.pause_last

    def watched(self: Scheduler) -> None:
        before = list(self.waiting)
        pause_last(self)
        ids.extend(request.id for request in self.waiting if request not in before and request.generated)

    monkeypatch.setattr(Scheduler, "pause_last", watched)
    return ids


@pytest.mark.parametrize(("devices", "sizes"), [(1, {"cache_tokens": CONTEXT + 24}), (8, {})])
def test_neither_trees_nor_pauses_change_tokens_and_log_probs(
    devices: int, sizes: dict[str, int], paused: list[int]
) -> None:
    answers = speculative(devices, **sizes)
    assert bool(paused) == bool(sizes)
    accepted = np.zeros(8, int)
    for done, other in zip(answers, plain(), strict=True):
        assert done.tokens == other.tokens
        assert done.finish_reason == other.finish_reason
        accepted[: len(done.statistics.accepted_lengths)] += done.statistics.accepted_lengths
        for ours, theirs in (
            (done.log_probs, other.log_probs),
            (done.prompt_log_probs, other.prompt_log_probs),
        ):
            assert [entry.token for entry in ours] == [entry.token for entry in theirs]
            np.testing.assert_allclose([e.log_prob for e in ours], [e.log_prob for e in theirs], atol=1e-4)
            np.testing.assert_allclose(
                [value for e in ours for _, value in e.top], [value for e in theirs for _, value in e.top], atol=1e-4
            )
    assert (accepted[[0, 1, 7]] > 0).all()


def test_a_request_without_options_is_not_touched_by_those_of_its_slots_last_request() -> None:
    made = engine(0, slots=1)
    prompts, params = requests()
    made.generate(prompts[:2], [replace(params[1], log_probs=None)] * 2)
    # In the same sampling mode, so that the program reads what the slot holds for its processors.
    unchanged = replace(params[0], logit_bias=((0, 0.0),))
    assert unchanged.processes_logits
    (mixed,) = made.generate(prompts[:1], [unchanged])
    (bare,) = made.generate(prompts[:1], [params[0]])
    assert mixed.tokens == bare.tokens == plain()[0].tokens
    assert np.asarray(made.runner.carry.slots.repetition).tolist() == [1.0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"repetition_penalty": 0.0}, "repetition_penalty: found 0.0, expected 0.01 to 100"),
        ({"presence_penalty": 2.5}, "presence_penalty: found 2.5"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty: found nan"),
        ({"min_tokens": 300}, "min_tokens: found 300, expected 0 to 256"),
        ({"log_probs": 21}, "log_probs: found 21, expected 0 to 20"),
        ({"prompt_log_probs": -1}, "prompt_log_probs: found -1"),
        ({"logit_bias": {3: 1.0}}, "expected a tuple of"),
        ({"logit_bias": ((3, 101.0),)}, "-100 to 100"),
        ({"logit_bias": ((3, 1.0), (3, 2.0))}, "a token id twice"),
        ({"logit_bias": tuple((i, 1.0) for i in range(301))}, "found 301 tokens, expected at most 300"),
    ],
)
def test_bad_options_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**changes)


def test_a_bias_beyond_the_vocabulary_is_named() -> None:
    with pytest.raises(ValueError, match=f"logit_bias: found token id {VOCAB}, expected 0 to {VOCAB - 1}"):
        engine(0).add([1], SamplingParams(logit_bias=((VOCAB, 1.0),)))
