"""The drafter in `drafters/`: what training measured is what serving gets, and its τ does not sink."""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.config import EngineConfig, SamplingParams, SpeculationConfig
from jaxspec.engine.engine import Engine
from jaxspec.engine.request import RequestStatistics
from jaxspec.serve.cli.demo_prompts import DEMO_PROMPTS
from jaxspec.training.loss import block_hidden, tapped_features

LONGEST = 96
# τ over all prompts, greedy, float32, by tokens an answer: as measured when the drafter was shipped.
MEASURED = {("chain", 32): 2.177, ("DDTree 16", 16): 2.883, ("DDTree 16", 32): 2.700}
SETTINGS = {"chain": SpeculationConfig(budget=7, top_k_cap=1), "DDTree 16": SpeculationConfig(budget=16)}


@pytest.fixture(scope="module")
def engine(smollm2_checkpoint, smollm2_drafter):
    slots = len(DEMO_PROMPTS)
    config = EngineConfig(slots=slots, batch_buckets=(slots,), max_context=LONGEST, prefill_chunk=64)
    return Engine.from_checkpoints(smollm2_checkpoint, smollm2_drafter, config=config)


@pytest.fixture(scope="module")
def prompts(engine):
    return [engine.tokenizer.encode_chat([{"role": "user", "content": text}]) for _, text in DEMO_PROMPTS]


def test_prompts_are_twenty_of_three_kinds():
    assert len({text for _, text in DEMO_PROMPTS}) == 20
    assert {kind for kind, _ in DEMO_PROMPTS} == {"chat", "maths", "code"}


def test_no_prompt_was_trained_on():
    from jaxspec.training.prompts import without_duplicates
    from jaxspec.training.templates import template_prompts

    templates = template_prompts(10**5, 0)
    mixed = without_duplicates([*templates, *(type(templates[0])(text, "demo") for _, text in DEMO_PROMPTS)])
    assert len(mixed) == len(templates) + len(DEMO_PROMPTS)


@dataclass
class Served:
    """What one setting made of the prompts, greedily: whole sequences, and (anchor, drafts accepted) of every round."""

    sequences: list[list[int]]
    rounds: list[list[tuple[int, int]]]
    total: RequestStatistics


@pytest.fixture(scope="module")
def served(engine, prompts):
    @functools.cache
    def serve(name, tokens):
        engine.speculation = SETTINGS[name]
        rows = {engine.add(p, SamplingParams(temperature=0, max_tokens=tokens)): i for i, p in enumerate(prompts)}
        result = Served([list(prompt) for prompt in prompts], [[] for _ in prompts], RequestStatistics())
        while engine.has_work:
            for output in engine.step():
                sequence = result.sequences[rows[output.request_id]]
                if output.statistics is None:  # the last round may be cut short
                    result.rounds[rows[output.request_id]].append((len(sequence) - 1, len(output.tokens) - 1))
                else:
                    result.total.merge(output.statistics)
                sequence += output.tokens
        return result

    return serve


@pytest.mark.parametrize(
    ("name", "tokens"),
    [("chain", 32), ("DDTree 16", 16), pytest.param("DDTree 16", 32, marks=pytest.mark.slow)],
)
def test_tau_does_not_sink(served, name, tokens):
    assert served(name, tokens).total.tau >= 0.95 * MEASURED[name, tokens]


def test_depth_one_is_accepted_as_often_as_training_measures(engine, served):
    """A shifted tap, position or mask would make the two differ; both look at the very same anchors."""
    chain = served("chain", 32)
    tokens = np.zeros((len(chain.sequences), LONGEST), np.int32)
    shape = len(chain.sequences), max(map(len, chain.rounds))
    anchors = np.zeros(shape, np.int32)
    accepted, counted = np.zeros((2, *shape), bool)
    for row, (sequence, rounds) in enumerate(zip(chain.sequences, chain.rounds, strict=True)):
        tokens[row, : len(sequence)] = sequence
        for column, (anchor, drafts) in enumerate(rounds):
            anchors[row, column], accepted[row, column], counted[row, column] = anchor, drafts > 0, True

    @jax.jit
    def guesses(target, drafter, tokens, anchors):
        tapped = tapped_features(target, tokens, drafter.config.target_layer_ids)
        first = block_hidden(drafter, target, tokens, tapped, anchors)[:, :, 0]
        return jnp.argmax(drafter.scaled(target.logits(first)), axis=-1)

    right = np.asarray(guesses(engine.target, engine.drafter, tokens, anchors)) == np.take_along_axis(
        tokens, anchors + 1, axis=1
    )
    assert counted.sum() > 200
    assert abs(right[counted].mean() - accepted[counted].mean()) < 0.03
    assert (right == accepted)[counted].mean() > 0.99
