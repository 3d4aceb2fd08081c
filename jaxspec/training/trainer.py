"""One step of training: a drafter's weights, the optimiser that moves them, and both compiled for one device."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxspec.engine.modules import FlatModule
from jaxspec.model.families.config import DFlashConfig
from jaxspec.model.families.dflash import DFlashDrafter, layout_of
from jaxspec.model.families.llama import LlamaForCausalLM
from jaxspec.model.layers.parameters import fill, weight_specs
from jaxspec.sharding.compilation import REPLICATED, jit_on_mesh
from jaxspec.sharding.mesh import make_mesh
from jaxspec.training.loss import Tally, TrainingBatch, drafter_loss, sample_anchors, tapped_features

# A drafter's weights by name, float32 while it trains.
Parameters = dict[str, jax.Array]


@dataclass(frozen=True)
class OptimiserConfig:
    """How the weights move.

    Attributes:
      steps: length of the schedule: a linear warm-up, then a cosine down to 0.
      warm_up: share of the steps.
      clip: largest norm of a step's gradient.
      weight_decay: of matrices; norms are left alone.
    """

    steps: int
    learning_rate: float = 6e-4
    warm_up: float = 0.04
    clip: float = 1.0
    weight_decay: float = 0.01


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainingState:
    """All that a step changes: float32 weights, the optimiser's moments, and the number of steps done (int32 [])."""

    parameters: Parameters
    moments: optax.OptState
    step: jax.Array


def initial_parameters(config: DFlashConfig, seed: int) -> Parameters:
    """Draws the weights to start from, float32: matrices normal with deviation 0.02, norms 1."""
    specs = weight_specs(lambda: DFlashDrafter(config, layout_of(config, 1), jnp.float32))
    key = jax.random.key(seed)
    return {
        spec.name: 0.02 * jax.random.normal(jax.random.fold_in(key, i), spec.shape)
        if len(spec.shape) > 1
        else jnp.ones(spec.shape)
        for i, spec in enumerate(specs)
    }


def build_drafter(config: DFlashConfig, parameters: Parameters, dtype: Any) -> DFlashDrafter:
    """Builds the drafter with these weights, rounded to `dtype`."""
    build = lambda: DFlashDrafter(config, layout_of(config, 1), dtype)  # noqa: E731
    return fill(build, lambda spec: parameters[spec.name].astype(dtype))


def make_optimiser(config: OptimiserConfig) -> optax.GradientTransformation:
    """Makes AdamW behind a clip of the gradient's norm."""
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, config.learning_rate, max(1, round(config.warm_up * config.steps)), max(2, config.steps)
    )
    matrices = lambda parameters: jax.tree.map(lambda x: x.ndim > 1, parameters)  # noqa: E731
    return optax.chain(
        optax.clip_by_global_norm(config.clip),
        optax.adamw(schedule, b1=0.9, b2=0.95, weight_decay=config.weight_decay, mask=matrices),
    )


class Trainer:
    """The compiled step and evaluation of one drafter beside one frozen target, on one device.

    Args:
      target: the frozen target; its dtype is also that of the drafter's arithmetic. The weights stay float32.
      config: of the drafter.
      optimiser: how the weights move.
      anchors: blocks drawn from each sequence.
      seed: of the initial weights and of the anchors.
    """

    def __init__(
        self, target: LlamaForCausalLM, config: DFlashConfig, optimiser: OptimiserConfig, anchors: int, seed: int
    ):
        self._seed = seed
        self._config = config
        self._anchors = anchors
        self._optimiser = make_optimiser(optimiser)
        self._target = FlatModule(target)
        self._dtype = target.embed_tokens.weight.dtype
        mesh = make_mesh(1)
        # Compiled for each padded length when the first batch of it comes.
        self._step = jit_on_mesh(self._update, mesh, REPLICATED, REPLICATED, donate=(0,))
        self._evaluate = jit_on_mesh(self._measure, mesh, REPLICATED, REPLICATED)

    def initial_state(self) -> TrainingState:
        """The state before the first step."""
        parameters = initial_parameters(self._config, self._seed)
        return TrainingState(parameters, self._optimiser.init(parameters), jnp.int32(0))

    def step(self, state: TrainingState, batch: TrainingBatch) -> tuple[TrainingState, Tally]:
        """Takes one optimiser step; `state` is donated. Returns at once, before the device has run it."""
        return self._step(state, self._target.leaves, batch)

    def evaluate(self, parameters: Parameters, batch: TrainingBatch) -> Tally:
        """The sums over a held-out batch; the anchors depend on the batch's shape alone, so figures compare."""
        return self._evaluate(parameters, self._target.leaves, batch)

    def _update(
        self, state: TrainingState, leaves: tuple[jax.Array, ...], batch: TrainingBatch
    ) -> tuple[TrainingState, Tally]:
        # Anchors are keyed by the step: every epoch draws new ones, and a resumed run draws the same.
        key = jax.random.fold_in(jax.random.key(self._seed), state.step)
        gradients, tally = jax.grad(self._loss, has_aux=True)(state.parameters, leaves, batch, key)
        updates, moments = self._optimiser.update(gradients, state.moments, state.parameters)
        return TrainingState(optax.apply_updates(state.parameters, updates), moments, state.step + 1), tally

    def _measure(self, parameters: Parameters, leaves: tuple[jax.Array, ...], batch: TrainingBatch) -> Tally:
        return self._loss(parameters, leaves, batch, jax.random.key(0))[1]

    def _loss(
        self, parameters: Parameters, leaves: tuple[jax.Array, ...], batch: TrainingBatch, key: jax.Array
    ) -> tuple[jax.Array, Tally]:
        target = self._target.holding(leaves)
        drafter = build_drafter(self._config, parameters, self._dtype)
        anchors, chosen = sample_anchors(key, batch.answer, self._anchors)
        tapped = tapped_features(target, batch.tokens, self._config.target_layer_ids)
        return drafter_loss(drafter, target, batch, tapped, anchors, chosen)
