"""The order in which a run sees its examples."""

import numpy as np

from jaxspec.training.batches import batch_order, steps_per_epoch
from tests.support.training import RUN, examples_of


def test_every_epoch_sees_every_example_and_order_does_not_depend_on_the_start():
    examples = examples_of()
    per_epoch = steps_per_epoch(examples, RUN.batch, RUN.lengths)
    stream = batch_order(examples, RUN, 0)
    batches = [next(stream) for _ in range(2 * per_epoch)]
    for epoch in (batches[:per_epoch], batches[per_epoch:]):
        assert {int(i) for _, chosen in epoch for i in chosen} == set(range(len(examples)))
        assert all((examples.lengths[chosen] <= length).all() for length, chosen in epoch)
    later = batch_order(examples, RUN, 5)
    for length, chosen in batches[5:]:
        other = next(later)
        assert other[0] == length
        np.testing.assert_array_equal(other[1], chosen)
