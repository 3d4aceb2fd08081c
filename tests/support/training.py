"""A tiny target, drafters of every kind, examples and an engine that echoes, for the tests of training."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.model.families.config import DFlashConfig, ModelConfig, RopeConfig
from jaxspec.training.answers import Examples
from jaxspec.training.loss import TrainingBatch
from jaxspec.training.run_config import RunConfig
from jaxspec.training.trainer import initial_parameters

TARGET = ModelConfig("llama", 61, 24, 32, 5, 3, 1, 8, 1e-5, RopeConfig(1e4), 256, False, False, (2,))
FULL = DFlashConfig(
    61, 24, 40, 2, 3, 1, 8, 1e-6, RopeConfig(1e4), 256, 5, 60, 5, (0, 2, 3), (0, 0), (False, False),
    output_multiplier=0.7, final_logit_softcapping=4.0, input_embedding_scale=1.5,
)  # fmt: skip
MIXED = dataclasses.replace(FULL, windows=(9, 0), causal=(True, False))
SLIDING = dataclasses.replace(FULL, windows=(9, 9), causal=(False, False))
ONE_LAYER = dataclasses.replace(FULL, num_hidden_layers=1, windows=(9,), causal=(True,))
CAUSAL = dataclasses.replace(FULL, causal=(True, True))
RUN = RunConfig(steps=12, batch=4, anchors=6, lengths=(16, 24), log_every=2, evaluate_every=6, save_every=5, seed=7)


def random_parameters(config: DFlashConfig) -> dict[str, jax.Array]:
    """Weights far enough from their start for every part of the model to matter."""
    random = np.random.default_rng(4)
    return {k: v + jnp.asarray(random.normal(0, 0.25, v.shape), jnp.float32) for k, v in
            initial_parameters(config, 0).items()}  # fmt: skip


def random_batch(rows: int = 2, length: int = 24) -> TrainingBatch:
    random = np.random.default_rng(5)
    tokens = random.integers(3, 60, (rows, length))
    answer = np.zeros((rows, length), bool)
    for row in range(rows):
        answer[row, 6 + row : length - 1 - 3 * row] = True
    return TrainingBatch(jnp.asarray(tokens, jnp.int32), jnp.asarray(answer))


def examples_of(count: int = 24, seed: int = 0) -> Examples:
    """Sequences of two lengths that count upwards, so that there is something to learn."""
    random = np.random.default_rng(seed)
    lengths = random.choice([14, 22], count)
    parts = [(3 + random.integers(0, 50) + np.arange(n)) % 50 + 3 for n in lengths]
    return Examples(
        np.concatenate(parts).astype(np.int32),
        np.cumsum([0, *lengths]),
        np.full(count, 4, np.int32),
        np.array([0.0, 1.0] * (count // 2), np.float32),
        np.array(["counting"] * count),
    )


class EchoEngine:
    """Answers with the prompt's last token, one a step, as many as its first token says."""

    def __init__(self, fail_at: int | None = None):
        self.config = SimpleNamespace(slots=2)
        self.fail_at = fail_at
        self.requests: dict[int, list[int]] = {}
        self.sampling: list = []
        self.peak = 0

    def add(self, prompt, sampling) -> int:
        self.requests[len(self.sampling)] = [*prompt[-1:], *([prompt[-1]] * (prompt[0] % 5))]
        self.sampling.append(sampling)
        self.peak = max(self.peak, len(self.requests))
        return len(self.sampling) - 1

    def step(self) -> list:
        outputs = []
        for request, left in list(self.requests.items())[: self.config.slots]:
            if request == self.fail_at:
                raise KeyboardInterrupt
            outputs.append(SimpleNamespace(request_id=request, tokens=[left.pop()], finish_reason=None))
            if not left:
                outputs[-1].finish_reason = "stop"
                del self.requests[request]
        return outputs

    def generate(self, prompts, sampling) -> list:
        texts = (
            "What is the capital of Peru?",
            "Tell me a long story about bees.",
            "cut off",
            "no",
            "the the the the the.",
        )
        reasons = "stop", "stop", "length", "stop", "stop"
        place = [params.seed % 5 for params in sampling]
        return [SimpleNamespace(tokens=list(texts[i].encode()), finish_reason=reasons[i]) for i in place]


def echo_engine(fail_at: int | None = None) -> Any:
    return EchoEngine(fail_at)
