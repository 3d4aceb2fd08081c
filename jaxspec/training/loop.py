"""The training run: steps dispatched ahead, held-out measurements, checkpoints."""

import json
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxspec.model.families.config import DFlashConfig
from jaxspec.model.families.llama import LlamaForCausalLM
from jaxspec.training.answers import Examples
from jaxspec.training.batches import batch_order, by_length, padded_batch
from jaxspec.training.checkpoint import CHECKPOINT, check_checkpoint, fingerprint, load_checkpoint, save_checkpoint
from jaxspec.training.loss import Tally
from jaxspec.training.meter import Meter
from jaxspec.training.run_config import RunConfig
from jaxspec.training.trainer import OptimiserConfig, Parameters, Trainer

# Steps dispatched before the oldest one's figures are read: the device never waits for the host.
STEPS_AHEAD = 4


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
    purpose = fingerprint(drafter, run, examples)
    if resume and (folder / CHECKPOINT).is_file():
        check_checkpoint(folder, drafter, run, examples)
        state = load_checkpoint(folder / CHECKPOINT, state)
        lines = (folder / "history.jsonl").read_text().splitlines()
        history = [record for record in map(json.loads, lines) if record["step"] <= int(state.step)]
    (folder / "figures.json").unlink(missing_ok=True)
    (folder / "history.jsonl").write_text("".join(json.dumps(record) + "\n" for record in history))

    start = int(state.step)
    ahead: deque[tuple[int, int, Tally]] = deque()
    meter = Meter(target.config, drafter, run)

    def record(step: int, tally: Tally) -> None:
        entry = {"step": step, **tally.summary(), **meter.read()}
        if step % run.evaluate_every == 0 or step == run.steps:
            entry["held_out"] = evaluate(trainer, state.parameters, held_out, run)
            meter.restart()
        history.append(entry)
        with (folder / "history.jsonl").open("a") as file:
            file.write(json.dumps(entry) + "\n")
        report(entry)

    def read_figures(keep: int) -> None:
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
        read_figures(0 if looked_at else STEPS_AHEAD)
        if step % run.save_every == 0 or step == run.steps:
            save_checkpoint(folder / CHECKPOINT, state, purpose)
    figures = _figures(trainer, state.parameters, held_out, run)
    (folder / "figures.json").write_text(json.dumps(figures, indent=1))
    return state.parameters, history


def evaluate(trainer: Trainer, parameters: Parameters, examples: Examples, run: RunConfig) -> dict[str, Any]:
    """Loss, accuracy at each depth and τ over all of `examples`, anchors drawn once and for all."""
    total = None
    for length, members in by_length(examples, run.lengths):
        for chosen in np.split(members, range(run.batch, len(members), run.batch)):
            # The last batch is filled with empty sequences, which have no anchor.
            filled = np.concatenate([chosen, np.full(run.batch - len(chosen), -1)])
            tally = trainer.evaluate(parameters, padded_batch(examples, filled, length))
            total = tally if total is None else total + tally
    assert total is not None
    return total.summary()


def _figures(trainer: Trainer, parameters: Parameters, held_out: Examples, run: RunConfig) -> dict[str, Any]:
    """The figures of all held-out examples, and of those of each temperature and each source."""
    figures = {"all": evaluate(trainer, parameters, held_out, run)}
    for name, labels in (("temperature", held_out.temperatures), ("source", held_out.sources)):
        for label in np.unique(labels):
            part = held_out.select(np.flatnonzero(labels == label))
            figures[f"{name} {label:g}" if name == "temperature" else f"{name} {label}"] = {
                "examples": len(part),
                **evaluate(trainer, parameters, part, run),
            }
    return figures
