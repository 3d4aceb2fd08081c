"""Examples as batches: in which order a run sees them, and padded to which lengths."""

from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np

from jaxspec.sharding.arithmetic import cdiv
from jaxspec.training.answers import Examples
from jaxspec.training.loss import TrainingBatch
from jaxspec.training.run_config import RunConfig


def batch_order(examples: Examples, run: RunConfig, start: int) -> Iterator[tuple[int, np.ndarray]]:
    """The padded length and the examples of every step from `start` on, epoch after epoch, the same in every run.

    Each batch holds examples of one length; an epoch's last batch of a length is filled with some of its first.
    """
    groups = by_length(examples, run.lengths)
    epoch, skip = divmod(start, steps_per_epoch(examples, run.batch, run.lengths))
    while True:
        random = np.random.default_rng((run.seed, epoch))
        batches = []
        for length, members in groups:
            shuffled = random.permutation(members)
            filled = np.resize(shuffled, cdiv(len(members), run.batch) * run.batch)
            batches += [(length, chosen) for chosen in filled.reshape(-1, run.batch)]
        for place in random.permutation(len(batches))[skip:]:
            yield batches[place]
        epoch, skip = epoch + 1, 0


def steps_per_epoch(examples: Examples, batch: int, lengths: tuple[int, ...]) -> int:
    """Steps in which every example is seen once."""
    return sum(cdiv(len(members), batch) for _, members in by_length(examples, lengths))


def padded_batch(examples: Examples, chosen: np.ndarray, length: int) -> TrainingBatch:
    """The chosen examples, cut or padded to `length`; -1 chooses an empty sequence."""
    tokens = np.zeros((len(chosen), length), np.int32)
    answer = np.zeros((len(chosen), length), bool)
    for place, index in enumerate(chosen):
        if index >= 0:
            content = examples[index][:length]
            tokens[place, : len(content)] = content
            answer[place, examples.prompt_lengths[index] : len(content)] = True
    return TrainingBatch(jnp.asarray(tokens), jnp.asarray(answer))


def by_length(examples: Examples, lengths: tuple[int, ...]) -> list[tuple[int, np.ndarray]]:
    """For each padded length that occurs, the examples that go there."""
    place = np.minimum(np.searchsorted(lengths, examples.lengths), len(lengths) - 1)
    groups = ((length, np.flatnonzero(place == i)) for i, length in enumerate(lengths))
    return [(length, members) for length, members in groups if len(members)]
