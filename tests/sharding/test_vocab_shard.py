"""Vocabulary-parallel reductions give what one device would, ties included."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxspec.sharding import collectives
from jaxspec.sharding.compilation import REPLICATED, jit_on_mesh
from jaxspec.sharding.mesh import TENSOR_AXIS, make_mesh
from jaxspec.sharding.vocab_shard import VocabShard

VOCAB = 48


def run(devices: int, function: Callable[..., Any], array: np.ndarray) -> Any:
    """`function(vocabulary, part)` on every device; asserts that all devices return the same."""
    spec = PartitionSpec(None, TENSOR_AXIS) if devices > 1 else REPLICATED

    def body(part: jax.Array) -> Any:
        return jax.tree.map(lambda x: x[None], function(VocabShard(array.shape[-1], devices > 1), part))

    program = jit_on_mesh(body, make_mesh(devices), spec, PartitionSpec(TENSOR_AXIS))
    copies = jax.tree.map(np.asarray, program(array))
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
        np.testing.assert_array_equal(run(devices, VocabShard.argmax, logits), logits.argmax(-1))

    @pytest.mark.parametrize("k", [1, 5, 9, VOCAB])
    def test_top_k(self, devices: int, k: int, logits: np.ndarray) -> None:
        values, ids = run(devices, lambda vocab, part: vocab.top_k(part, k), logits)
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
            found, ids = run(devices, lambda vocab, part, k=k: vocab.top_k(part, k), values)
            expected = np.argsort(-values, axis=-1, kind="stable")[:, :k]
            np.testing.assert_array_equal(ids, expected)
            np.testing.assert_array_equal(found, np.take_along_axis(values, expected, -1))

    def test_log_sum_exp(self, devices: int, logits: np.ndarray) -> None:
        exact = np.log(np.exp(logits.astype(np.float64)).sum(-1))
        np.testing.assert_allclose(run(devices, VocabShard.log_sum_exp, logits), exact, rtol=1e-6, atol=1e-6)

    def test_maximum_and_sum(self, devices: int, logits: np.ndarray) -> None:
        best = run(devices, lambda vocab, part: vocab.max(part.max(-1)), logits)
        np.testing.assert_array_equal(best, logits.max(-1))
        finite = np.where(np.isfinite(logits), logits, 0)
        total = run(devices, lambda vocab, part: vocab.sum(part.sum(-1)), finite)
        np.testing.assert_allclose(total, finite.sum(-1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("devices", [1, 2, 8])
def test_ids_have_one_place_on_one_device(devices: int) -> None:
    ids = np.array([[0, 5, 6, VOCAB - 1, -1, VOCAB]])
    values = np.random.default_rng(0).normal(size=(1, VOCAB)).astype(np.float32)

    def places(vocab: VocabShard, part: jax.Array) -> jax.Array:
        found = vocab.places(jnp.asarray(ids))
        return collectives.gather_over_devices(jnp.where(found < vocab.local, found + vocab.first, -1), 0, vocab.split)

    found = run(devices, places, values)
    np.testing.assert_array_equal(found.max(0), [0, 5, 6, VOCAB - 1, -1, -1])
    assert ((found >= 0).sum(0) == [1, 1, 1, 1, 0, 0]).all()
    picked = run(devices, lambda vocab, part: vocab.at(part.repeat(4, 0)[None], jnp.asarray(ids[:, :4])), values)
    np.testing.assert_array_equal(picked[0], values[0, ids[0, :4]])


def test_where_nothing_is_split_nothing_travels() -> None:
    whole = jnp.arange(6.0)
    assert collectives.sum_over_devices(whole, False) is whole
    assert collectives.max_over_devices(whole, False) is whole
    assert int(collectives.device_index(False)) == 0
