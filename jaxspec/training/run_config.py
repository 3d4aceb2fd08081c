"""The settings of a training run."""

from dataclasses import dataclass


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
