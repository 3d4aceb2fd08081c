"""Acceptance against a walk down the tree in plain Python."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.speculation.acceptance import ConfirmedPath, confirm, emitted_tokens
from jaxspec.speculation.slot_table import empty_slots
from jaxspec.speculation.tree import Candidates, grow_tree, root_only

DEPTH, VOCAB = 4, 6


def walk(tokens: list[int], parents: list[int], valid: list[bool], predicted: list[int]) -> tuple[list[int], list[int]]:
    """(rows of the confirmed path, its tokens and the bonus)."""
    row, path, chosen = 0, [0], []
    while True:
        chosen.append(predicted[row])
        below = [i for i in range(1, len(tokens)) if valid[i] and parents[i] == row and tokens[i] == chosen[-1]]
        if not below:
            return path, chosen
        (row,) = below
        path.append(row)


@pytest.mark.parametrize(("budget", "top_k"), [(1, 1), (6, 1), (7, 3), (20, 4), (64, 2)])
def test_the_walk(budget: int, top_k: int) -> None:
    """Small vocabularies make long agreements common; budgets beyond the tree leave padding rows."""
    rng = np.random.default_rng(budget)
    batch = 400
    tokens = rng.permuted(np.tile(np.arange(VOCAB, dtype=np.int32), (batch, DEPTH, 1)), axis=-1)[..., :top_k]
    scores = -np.sort(rng.exponential(size=tokens.shape).astype(np.float32), axis=-1)
    anchor = rng.integers(0, VOCAB, batch).astype(np.int32)
    tree = jax.jit(grow_tree, static_argnums=2)(anchor, Candidates(jnp.asarray(tokens), jnp.asarray(scores)), budget)
    # The target leans to the drafter's first or second guess, so that every length occurs.
    depths = np.minimum(np.asarray(tree.depths), DEPTH - 1)
    rank = rng.integers(0, min(2, top_k), depths.shape)
    predicted = tokens[np.arange(batch)[:, None], depths, rank]
    predicted = np.where(rng.random(predicted.shape) < 0.2, rng.integers(0, VOCAB, predicted.shape), predicted)
    accepted = jax.jit(confirm, static_argnums=2)(tree, predicted.astype(np.int32), DEPTH)

    lengths = set()
    for row in range(batch):
        path, chosen = walk(
            tree.tokens[row].tolist(), tree.parents[row].tolist(), tree.valid[row].tolist(), predicted[row].tolist()
        )
        length = len(path) - 1
        lengths.add(length)
        assert int(accepted.length[row]) == length
        assert accepted.nodes[row].tolist() == path + [0] * (DEPTH - length)
        assert accepted.tokens[row, : length + 1].tolist() == chosen
    assert lengths == set(range(min(budget, DEPTH) + 1))


def test_a_root_alone_accepts_nothing() -> None:
    accepted = confirm(root_only(jnp.array([3, 4], jnp.int32)), jnp.array([[3], [9]], jnp.int32), 0)
    assert accepted.length.tolist() == [0, 0]
    assert accepted.tokens.tolist() == [[3], [9]]
    assert accepted.nodes.tolist() == [[0], [0]]


@given(st.integers(0, 2**31))
@settings(max_examples=100, deadline=None)
def test_tokens_count_up_to_the_first_stop_or_the_limit(seed: int) -> None:
    rng = np.random.default_rng(seed)
    batch, width = 6, 5
    tokens = rng.integers(0, 8, (batch, width)).astype(np.int32)
    accepted = rng.integers(0, width, batch).astype(np.int32)
    live = rng.random(batch) < 0.8
    path = ConfirmedPath(nodes=jnp.zeros_like(tokens), length=jnp.asarray(accepted), tokens=jnp.asarray(tokens))
    state = empty_slots(batch, 8)
    state.remaining[:] = rng.integers(1, 8, batch)
    state.finished[:] = rng.random(batch) < 0.3
    state.stop_ids[:, :2] = rng.integers(-1, 8, (batch, 2))
    count, finished = emitted_tokens(jax.tree.map(jnp.asarray, state), path, jnp.asarray(live))
    for row in range(batch):
        if not live[row]:
            assert (int(count[row]), bool(finished[row])) == (0, bool(state.finished[row]))
            continue
        offered = tokens[row, : min(accepted[row] + 1, state.remaining[row])].tolist()
        stops = [place for place, token in enumerate(offered) if token in state.stop_ids[row]]
        expected = stops[0] + 1 if stops else len(offered)
        assert int(count[row]) == expected
        assert bool(finished[row]) == (bool(stops) or expected == state.remaining[row])
