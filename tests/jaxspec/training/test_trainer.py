"""Steps that learn."""

import dataclasses

import numpy as np

from jaxspec.training.trainer import OptimiserConfig, Trainer
from tests.support.training import FULL, random_batch


def test_a_tiny_set_is_learnt_and_the_target_stays_as_it_was(target):
    before = np.asarray(target.embed_tokens.weight[...]).copy()
    config = dataclasses.replace(FULL, output_multiplier=1.0, final_logit_softcapping=0.0, input_embedding_scale=1.0)
    trainer = Trainer(target, config, OptimiserConfig(120, learning_rate=1e-2), anchors=10, seed=0)
    state, batch = trainer.initial_state(), random_batch()
    first = trainer.evaluate(state.parameters, batch).summary()
    for _ in range(120):
        state, _ = trainer.step(state, batch)
    last = trainer.evaluate(state.parameters, batch).summary()
    assert int(state.step) == 120
    assert first["accuracy"][0] < 0.3
    assert min(last["accuracy"]) > 0.9
    assert last["tau"] > first["tau"] + 1
    np.testing.assert_array_equal(before, target.embed_tokens.weight[...])
