"""Vocabulary-parallel reductions give what one device would, ties included."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxspec.sharding import collectives
from jaxspec.sharding.mesh import TENSOR_AXIS, make_mesh

VOCAB = 48


def run(devices: int, function: Callable[..., Any], array: np.ndarray) -> Any:
    """`function(part, split)` on every device; asserts that all devices return the same."""
    spec = PartitionSpec(None, TENSOR_AXIS) if devices > 1 else PartitionSpec()
    body = jax.shard_map(
        lambda part: jax.tree.map(lambda x: x[None], function(part, devices > 1)),
        mesh=make_mesh(devices),
        in_specs=spec,
        out_specs=PartitionSpec(TENSOR_AXIS),
        check_vma=False,
    )
    copies = jax.tree.map(np.asarray, jax.jit(body)(array))
    for copy in jax.tree.leaves(copies):
        assert len(copy) == devices
        np.testing.assert_array_equal(copy, np.broadcast_to(copy[:1], copy.shape))
    return jax.tree.map(lambda copy: copy[0], copies)


@pytest.fixture(params=["normal", "ties", "infinite"])
def logits(request: pytest.FixtureRequest) -> np.ndarray:
    rng = np.random.default_rng(0)
    values = rng.normal(size=(20, VOCAB)).astype(np.float32)
    if request.param == "ties":
        values = rng.integers(0, 3, (20, VOCAB)).astype(np.float32)
    if request.param == "infinite":
        values[rng.random(values.shape) < 0.9] = -np.inf
        values[:, 7] = 1.0
    return values


@pytest.mark.parametrize("devices", [1, 2, 8])
class TestOnAMesh:
    def test_argmax_takes_the_lowest_of_equal_ids(self, devices: int, logits: np.ndarray) -> None:
        np.testing.assert_array_equal(run(devices, collectives.argmax, logits), logits.argmax(-1))

    @pytest.mark.parametrize("k", [1, 5, 9, VOCAB])
    def test_top_k(self, devices: int, k: int, logits: np.ndarray) -> None:
        values, ids = run(devices, lambda part, split: collectives.top_k(part, k, split), logits)
        expected = np.argsort(-logits, axis=-1, kind="stable")[:, :k]
        np.testing.assert_array_equal(ids, expected)
        np.testing.assert_array_equal(values, np.take_along_axis(logits, expected, -1))

    @pytest.mark.parametrize("vocab", [5000 * 8, 4100 * 8])
    @pytest.mark.parametrize("levels", [3, 10**6])
    def test_top_k_of_a_long_row_in_two_stages(self, devices: int, vocab: int, levels: int) -> None:
        values = np.random.default_rng(vocab).integers(0, levels, (3, vocab)).astype(np.float32)
        values[1] = -np.inf
        values[2, 7:] = -np.inf
        for k in (1, 16, 200):
            found, ids = run(devices, lambda part, split, k=k: collectives.top_k(part, k, split), values)
            expected = np.argsort(-values, axis=-1, kind="stable")[:, :k]
            np.testing.assert_array_equal(ids, expected)
            np.testing.assert_array_equal(found, np.take_along_axis(values, expected, -1))

    def test_log_sum_exp(self, devices: int, logits: np.ndarray) -> None:
        exact = np.log(np.exp(logits.astype(np.float64)).sum(-1))
        np.testing.assert_allclose(run(devices, collectives.log_sum_exp, logits), exact, rtol=1e-6, atol=1e-6)

    def test_maximum_and_sum(self, devices: int, logits: np.ndarray) -> None:
        best = run(devices, lambda part, split: collectives.max_over_devices(part.max(-1), split), logits)
        np.testing.assert_array_equal(best, logits.max(-1))
        finite = np.where(np.isfinite(logits), logits, 0)
        total = run(devices, lambda part, split: collectives.sum_over_devices(part.sum(-1), split), finite)
        np.testing.assert_allclose(total, finite.sum(-1), rtol=1e-5, atol=1e-5)


def test_where_nothing_is_split_nothing_travels() -> None:
    whole = jnp.arange(6.0)
    assert collectives.sum_over_devices(whole, False) is whole
    assert collectives.max_over_devices(whole, False) is whole
    assert int(collectives.device_index(False)) == 0
