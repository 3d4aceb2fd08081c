"""The training run: batches in a fixed order, steps dispatched ahead, held-out measurements, checkpoints."""

import json
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save_file

from jaxspec.model.families.config import DFlashConfig, ModelConfig
from jaxspec.model.families.llama import LlamaForCausalLM
from jaxspec.training.answers import Examples
from jaxspec.training.step import OptimiserConfig, Parameters, Tally, Trainer, TrainingBatch, TrainingState

CHECKPOINT = "checkpoint.safetensors"
# Steps dispatched before the oldest one's figures are read: the device never waits for the host.
STEPS_AHEAD = 4
# Dense bf16 rates in FLOP/s, for the share of the peak that a run reaches.
PEAK_RATES = {"NVIDIA H200": 989e12, "NVIDIA H100 80GB HBM3": 989e12, "NVIDIA A100-SXM4-80GB": 312e12}


@dataclass(frozen=True)
class RunConfig:
    """One training run.

    Attributes:
      steps: optimiser steps in all.
      batch: sequences a step.
      anchors: blocks drawn from each sequence.
      lengths: sequences are padded to the smallest of these that holds them, and cut at the largest; ascending.
      log_every, evaluate_every, save_every: in steps.
      seed: of the initial weights, the order of the batches and the anchors.
    """

    steps: int
    batch: int = 64
    anchors: int = 64
    lengths: tuple[int, ...] = (256, 512)
    learning_rate: float = 6e-4
    log_every: int = 20
    evaluate_every: int = 200
    save_every: int = 1000
    seed: int = 0


def train(
    target: LlamaForCausalLM,
    drafter: DFlashConfig,
    examples: Examples,
    held_out: Examples,
    run: RunConfig,
    folder: Path,
    resume: bool,
    report: Callable[[dict[str, Any]], None],
) -> tuple[Parameters, list[dict[str, Any]]]:
    """Trains a drafter; interrupted and resumed, it ends with the same weights.

    Args:
      target: in the dtype of the arithmetic.
      examples, held_out: of `split_examples`.
      folder: for `checkpoint.safetensors`, `history.jsonl`, and at the end `figures.json` (held-out figures by
        temperature and by source).
      resume: go on from the checkpoint in `folder`, if there is one.
      report: called with every record of the history as it is made.
    Returns:
      the float32 weights by name, and the history: a record every `log_every` steps (and the last), with "held_out"
      figures every `evaluate_every`.
    Raises:
      ValueError: there are no examples, or `check_checkpoint` refuses the checkpoint.
    """
    for name, part in (("training", examples), ("held-out", held_out)):
        if not len(part):
            raise ValueError(f"{name} examples: found 0, expected at least 1; write more answers")
    trainer = Trainer(target, drafter, OptimiserConfig(run.steps, run.learning_rate), run.anchors, run.seed)
    folder.mkdir(parents=True, exist_ok=True)
    state = trainer.initial_state()
    history: list[dict[str, Any]] = []
    purpose = _fingerprint(drafter, run, examples)
    if resume and (folder / CHECKPOINT).is_file():
        check_checkpoint(folder, drafter, run, examples)
        state = _load(folder / CHECKPOINT, state)
        lines = (folder / "history.jsonl").read_text().splitlines()
        history = [record for record in map(json.loads, lines) if record["step"] <= int(state.step)]
    (folder / "figures.json").unlink(missing_ok=True)
    (folder / "history.jsonl").write_text("".join(json.dumps(record) + "\n" for record in history))

    start = int(state.step)
    ahead: deque[tuple[int, int, Tally]] = deque()
    meter = _Meter(target.config, drafter, run)

    def record(step: int, tally: Tally) -> None:
        entry = {"step": step, **tally.summary(), **meter.read()}
        if step % run.evaluate_every == 0 or step == run.steps:
            entry["held_out"] = evaluate(trainer, state.parameters, held_out, run)
            meter.restart()
        history.append(entry)
        with (folder / "history.jsonl").open("a") as file:
            file.write(json.dumps(entry) + "\n")
        report(entry)

    def settle(keep: int) -> None:
        while len(ahead) > keep:
            step, length, tally = ahead.popleft()
            jax.block_until_ready(tally)
            meter.add(length, tally)
            if step % run.log_every == 0 or step == run.steps or step % run.evaluate_every == 0:
                record(step, meter.take())

    batches = batch_order(examples, run, start)
    for step in range(start + 1, run.steps + 1):
        length, chosen = next(batches)
        state, tally = trainer.step(state, padded_batch(examples, chosen, length))
        ahead.append((step, length, tally))
        # Measurements and checkpoints look at the weights of this very step.
        looked_at = step % run.evaluate_every == 0 or step % run.save_every == 0 or step == run.steps
        settle(0 if looked_at else STEPS_AHEAD)
        if step % run.save_every == 0 or step == run.steps:
            _save(folder / CHECKPOINT, state, purpose)
    figures = {"all": evaluate(trainer, state.parameters, held_out, run)}
    for name, labels in (("temperature", held_out.temperatures), ("source", held_out.sources)):
        for label in np.unique(labels):
            part = held_out.select(np.flatnonzero(labels == label))
            figures[f"{name} {label:g}" if name == "temperature" else f"{name} {label}"] = {
                "examples": len(part),
                **evaluate(trainer, state.parameters, part, run),
            }
    (folder / "figures.json").write_text(json.dumps(figures, indent=1))
    return state.parameters, history


def check_checkpoint(folder: Path, drafter: DFlashConfig, run: RunConfig, examples: Examples) -> None:
    """Raises ValueError unless the checkpoint in `folder` can be read and is of this very run."""
    path = folder / CHECKPOINT
    if not path.is_file():
        raise ValueError(f"{path}: not there; run the stage 'train' first")
    try:
        with safe_open(path, framework="numpy") as file:
            found = (file.metadata() or {}).get("run")
    except SafetensorError as error:
        raise ValueError(f"{path}: not a readable checkpoint ({error}); remove it and train again") from None
    expected = _fingerprint(drafter, run, examples)
    if found != expected:
        raise ValueError(
            f"{path}: belongs to another run ({found}), expected {expected}; remove it or keep the settings"
        )


def read_checkpoint(path: Path) -> tuple[Parameters, int]:
    """The drafter's float32 weights in a checkpoint of `train`, and the steps that they have taken."""
    with safe_open(path, framework="numpy") as file:
        prefix, suffix = ".parameters['", "']"
        names = [key for key in file.keys() if key.startswith(prefix)]  # noqa: SIM118
        parameters = {key[len(prefix) : -len(suffix)]: jnp.asarray(file.get_tensor(key)) for key in names}
        return parameters, int(file.get_tensor(".step"))


def evaluate(trainer: Trainer, parameters: Parameters, examples: Examples, run: RunConfig) -> dict[str, Any]:
    """Loss, accuracy at each depth and τ over all of `examples`, anchors drawn once and for all."""
    total = None
    for length, members in _by_length(examples, run.lengths):
        for chosen in np.split(members, range(run.batch, len(members), run.batch)):
            # The last batch is filled with nothing: an empty row has no anchor.
            rows = np.concatenate([chosen, np.full(run.batch - len(chosen), -1)])
            tally = trainer.evaluate(parameters, padded_batch(examples, rows, length))
            total = tally if total is None else total + tally
    assert total is not None
    return total.summary()


def batch_order(examples: Examples, run: RunConfig, start: int) -> Iterator[tuple[int, np.ndarray]]:
    """The padded length and the examples of every step from `start` on, epoch after epoch, the same in every run.

    Each batch holds examples of one length; an epoch's last batch of a length is filled with some of its first.
    """
    groups = _by_length(examples, run.lengths)
    epoch, skip = divmod(start, steps_per_epoch(examples, run.batch, run.lengths))
    while True:
        random = np.random.default_rng((run.seed, epoch))
        batches = []
        for length, members in groups:
            shuffled = random.permutation(members)
            filled = np.resize(shuffled, math.ceil(len(members) / run.batch) * run.batch)
            batches += [(length, chosen) for chosen in filled.reshape(-1, run.batch)]
        for place in random.permutation(len(batches))[skip:]:
            yield batches[place]
        epoch, skip = epoch + 1, 0


def steps_per_epoch(examples: Examples, batch: int, lengths: tuple[int, ...]) -> int:
    """Steps in which every example is seen once."""
    return sum(math.ceil(len(members) / batch) for _, members in _by_length(examples, lengths))


def padded_batch(examples: Examples, chosen: np.ndarray, length: int) -> TrainingBatch:
    """The chosen examples, cut or padded to `length`; -1 chooses an empty row."""
    tokens = np.zeros((len(chosen), length), np.int32)
    answer = np.zeros((len(chosen), length), bool)
    for row, index in enumerate(chosen):
        if index >= 0:
            content = examples[index][:length]
            tokens[row, : len(content)] = content
            answer[row, examples.prompt_lengths[index] : len(content)] = True
    return TrainingBatch(jnp.asarray(tokens), jnp.asarray(answer))


def step_flops(target: ModelConfig, drafter: DFlashConfig, run: RunConfig, length: int) -> float:
    """Floating-point operations of one step as the algorithm needs them: recomputed logits do not count.

    The target goes forward through the layers up to the last tap; the drafter forward and backward; the frozen head
    forward and backward to its input.
    """

    def layer(config: ModelConfig | DFlashConfig) -> int:
        heads = 2 * config.num_attention_heads + 2 * config.num_key_value_heads
        return config.hidden_size * (heads * config.head_dim + 3 * config.intermediate_size)

    sequence, rows = run.batch * length, run.batch * run.anchors * drafter.block_size
    tapped = max(drafter.target_layer_ids) + 1
    width = target.num_attention_heads * target.head_dim
    forward = 2 * sequence * tapped * (layer(target) + 2 * length * width)
    context = len(drafter.target_layer_ids) * drafter.hidden_size**2
    context += drafter.num_hidden_layers * drafter.hidden_size * 2 * drafter.num_key_value_heads * drafter.head_dim
    scores = 2 * (length + drafter.block_size) * drafter.num_attention_heads * drafter.head_dim
    drafting = 6 * (sequence * context + rows * drafter.num_hidden_layers * (layer(drafter) + scores))
    head = 4 * rows * drafter.depth / drafter.block_size * target.hidden_size * target.vocab_size
    return forward + drafting + head


class _Meter:
    """Adds up steps between two records, with the time they took."""

    def __init__(self, target: ModelConfig, drafter: DFlashConfig, run: RunConfig):
        self._target, self._drafter, self._run = target, drafter, run
        self._peak = PEAK_RATES.get(jax.devices()[0].device_kind)
        self._total: Tally | None = None
        self.restart()

    def restart(self) -> None:
        self._since, self._tokens, self._flops = time.perf_counter(), 0, 0.0

    def add(self, length: int, tally: Tally) -> None:
        self._total = tally if self._total is None else self._total + tally
        self._tokens += self._run.batch * length
        self._flops += step_flops(self._target, self._drafter, self._run, length)

    def take(self) -> Tally:
        assert self._total is not None
        total, self._total = self._total, None
        return total

    def read(self) -> dict[str, float]:
        seconds = time.perf_counter() - self._since
        figures = {"tokens_per_second": round(self._tokens / seconds), "tflops": round(self._flops / seconds / 1e12, 2)}
        if self._peak:
            figures["mfu"] = round(self._flops / seconds / self._peak, 4)
        return figures


def _by_length(examples: Examples, lengths: tuple[int, ...]) -> list[tuple[int, np.ndarray]]:
    """For each padded length that occurs, the examples that go there."""
    place = np.minimum(np.searchsorted(lengths, examples.lengths), len(lengths) - 1)
    groups = ((length, np.flatnonzero(place == i)) for i, length in enumerate(lengths))
    return [(length, members) for length, members in groups if len(members)]


def _fingerprint(drafter: DFlashConfig, run: RunConfig, examples: Examples) -> str:
    return f"{drafter} {run} {len(examples)} examples of {len(examples.tokens)} tokens"


def _save(path: Path, state: TrainingState, purpose: str) -> None:
    leaves = {jax.tree_util.keystr(key): np.asarray(leaf) for key, leaf in jax.tree_util.tree_leaves_with_path(state)}
    save_file(leaves, path.with_suffix(".partial"), metadata={"run": purpose})
    os.replace(path.with_suffix(".partial"), path)


def _load(path: Path, like: TrainingState) -> TrainingState:
    leaves = load_file(path)
    return jax.tree_util.tree_map_with_path(lambda key, _: jnp.asarray(leaves[jax.tree_util.keystr(key)]), like)
