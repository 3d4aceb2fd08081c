"""The tree that the device grows against a heap in plain Python, node for node and bit for bit."""

import dataclasses
import heapq
import itertools
import re
from collections.abc import Callable
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.speculation.tree import (
    MAX_BUDGET,
    Beam,
    Candidates,
    DraftTree,
    grow_tree,
    grow_tree_conditional,
    root_only,
    visibility,
)

# A path's candidates, best first: (log-probs, tokens).
Children = Callable[[tuple[int, ...]], tuple[np.ndarray, np.ndarray]]


def heap_tree(anchor: int, children: Children, depth: int, budget: int) -> dict[str, np.ndarray]:
    """Best-first search with a heap: one request, ranks and scores as the canonical order has them.

    `children(ranks)` are the candidates under the node that the ranks along its path name.
    """
    tokens, parents, depths, ranks = [anchor], [0], [0], [0]
    scores = [np.float32(0)]
    paths: list[tuple[int, ...]] = [()]
    heap: list[tuple[np.float32, int, int, int]] = []

    def push(parent: int, rank: int) -> None:
        if depths[parent] == depth:
            return
        log_probs, _ = children(paths[parent])
        if rank < len(log_probs):
            score = np.float32(scores[parent] + min(log_probs[rank], np.float32(0)))
            if score > -np.inf:
                heapq.heappush(heap, (-score, depths[parent] + 1, parent, rank))

    push(0, 0)
    while heap and len(tokens) <= budget:
        cost, level, parent, rank = heapq.heappop(heap)
        tokens.append(children(paths[parent])[1][rank])
        parents.append(parent)
        depths.append(level)
        ranks.append(rank)
        scores.append(-cost)
        paths.append((*paths[parent], rank))
        push(parent, rank + 1)
        push(len(tokens) - 1, 0)

    visible = np.eye(budget + 1, dtype=bool)
    for node in range(len(tokens)):
        ancestor = node
        while ancestor:
            ancestor = parents[ancestor]
            visible[node, ancestor] = True

    def padded(values: list, dtype: type, fill: float = 0) -> np.ndarray:
        return np.array(values + [fill] * (budget + 1 - len(values)), dtype)

    return {
        "tokens": padded(tokens, np.int32),
        "parents": padded(parents, np.int32),
        "depths": padded(depths, np.int32),
        "ranks": padded(ranks, np.int32),
        "scores": padded(scores, np.float32, -np.inf),
        "valid": padded([True] * len(tokens), np.bool_, False),
        "visibility": visible,
    }


def assert_same(tree: DraftTree, references: list[dict[str, np.ndarray]]) -> None:
    for field in dataclasses.fields(DraftTree):
        got = np.asarray(getattr(tree, field.name))
        want = np.stack([reference[field.name] for reference in references])
        np.testing.assert_array_equal(got, want, err_msg=field.name, strict=True)
        assert got.tobytes() == want.tobytes(), field.name  # -0.0 isn't 0.0 here


def random_log_probs(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Descending log-probs [batch, ..., top_k]; each batch row has one of the hard distributions."""
    batch = shape[0]
    logits = rng.normal(size=shape) * rng.choice([0.3, 1, 3, 10], size=(batch, *[1] * len(shape[1:])))
    kinds = [
        logits - 8,  # no ties
        -np.abs(np.round(logits * 2) / 2),  # ties within and across depths, probability 1 as well
        np.where(rng.random(shape) < 0.5, rng.choice([0.0, -0.0, 1e-7], size=shape), -np.abs(logits)),
        np.full(shape, -np.log(np.float32(50_000))),  # flat
        np.full(shape, rng.choice([0.0, -0.0], size=shape)),  # saturated
        np.where(rng.random(shape) < 0.4, -np.inf, -np.abs(np.round(logits))),  # absent candidates
        np.round(logits * 8) / 8 - 12,  # ties across depths by sums of different terms
    ]
    kind = rng.integers(len(kinds), size=batch)
    log_probs = np.choose(kind.reshape(batch, *[1] * len(shape[1:])), kinds).astype(np.float32)
    # A stable descending sort: -0.0 and 0.0 keep their order, being equal.
    order = np.argsort(-log_probs, axis=-1, kind="stable")
    return np.take_along_axis(log_probs, order, axis=-1)


def random_tokens(rng: np.random.Generator, shape: tuple[int, ...], vocab: int) -> np.ndarray:
    return np.argsort(rng.random((*shape[:-1], vocab)), axis=-1)[..., : shape[-1]].astype(np.int32)


def random_candidates(rng: np.random.Generator, shape: tuple[int, int, int]) -> Candidates:
    return Candidates(
        tokens=jnp.asarray(random_tokens(rng, shape, vocab=shape[-1] + 3)),
        log_probs=jnp.asarray(random_log_probs(rng, shape)),
    )


def heap_trees(anchor: np.ndarray, candidates: Candidates, budget: int) -> list[dict]:
    log_probs, tokens = np.asarray(candidates.log_probs), np.asarray(candidates.tokens)

    def children(i: int, path: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        return log_probs[i, len(path)], tokens[i, len(path)]

    depth = tokens.shape[1]
    return [heap_tree(root, partial(children, i), depth, budget) for i, root in enumerate(anchor)]


grow = jax.jit(grow_tree, static_argnums=2)
seeds = st.integers(0, 2**32 - 1)


@pytest.mark.parametrize(
    ("batch", "depth", "top_k", "budget"),
    [
        (64, 3, 4, 1),
        (64, 1, 3, 2),
        (64, 3, 8, 7),
        (64, 7, 3, 8),
        (64, 15, 16, 16),  # the paper's cap, top_k = budget
        (64, 7, 1, 16),  # one chain: padding
        (64, 1, 4, 16),
        (64, 3, 32, 32),
        (64, 2, 40, 8),  # more candidates than could enter
        (64, 7, 4, 33),
        (64, 15, 8, 64),
        (64, 3, 3, 64),  # 39 nodes exist
    ],
)
@settings(max_examples=6, deadline=None)
@given(seed=seeds)
def test_equals_heap(batch: int, depth: int, top_k: int, budget: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    candidates = random_candidates(rng, (batch, depth, top_k))
    anchor = rng.integers(0, 100, batch, dtype=np.int32)
    tree = grow(jnp.asarray(anchor), candidates, budget)
    assert_same(tree, heap_trees(anchor, candidates, budget))


@pytest.mark.parametrize(("depth", "top_k", "budget"), [(7, 16, 256), (3, 256, 256), (15, 16, MAX_BUDGET)])
def test_equals_heap_at_large_budgets(depth: int, top_k: int, budget: int) -> None:
    rng = np.random.default_rng(budget + top_k)
    candidates = random_candidates(rng, (14, depth, top_k))
    anchor = np.arange(14, dtype=np.int32)
    tree = grow(jnp.asarray(anchor), candidates, budget)
    assert_same(tree, heap_trees(anchor, candidates, budget))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from([0.0, -0.5, -1.0, -1.5, -np.inf]), min_size=9, max_size=9))
def test_equals_heap_on_drawn_log_probs(drawn: list[float]) -> None:
    """Cases that shrink to a readable failure."""
    log_probs = -np.sort(-np.array(drawn, np.float32).reshape(1, 3, 3), axis=-1)
    tokens = np.arange(9, dtype=np.int32).reshape(1, 3, 3)
    candidates = Candidates(jnp.asarray(tokens), jnp.asarray(log_probs))
    tree = grow(jnp.zeros(1, jnp.int32), candidates, 7)
    assert_same(tree, heap_trees(np.zeros(1, np.int32), candidates, 7))


@pytest.mark.parametrize(("depth", "top_k", "budget"), [(3, 4, 7), (7, 3, 33), (5, 8, 64)])
@settings(max_examples=5, deadline=None)
@given(seed=seeds)
def test_path_dependent_scores_equal_heap(depth: int, top_k: int, budget: int, seed: int) -> None:
    batch, states = 32, 29
    rng = np.random.default_rng(seed)
    tables = random_candidates(rng, (batch, states, top_k))
    anchor = np.arange(batch, dtype=np.int32)
    tree = grow_from_tables(jnp.asarray(anchor), tables, depth, budget)
    log_probs, tokens = np.asarray(tables.log_probs), np.asarray(tables.tokens)

    @cache
    def state_of(i: int, path: tuple[int, ...]) -> int:
        if not path:
            return 0
        state, rank = state_of(i, path[:-1]), path[-1]
        return next_state(state, int(tokens[i, state, rank]), rank, states)

    def children(i: int, path: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        state = state_of(i, path)
        return log_probs[i, state], tokens[i, state]

    references = [heap_tree(i, partial(children, i), depth, budget) for i in range(batch)]
    assert_same(tree, references)


def next_state(state, token, rank, states):  # type: ignore[no-untyped-def]
    return (5 * state + 3 * token + rank + 1) % states


@partial(jax.jit, static_argnums=(2, 3))
def grow_from_tables(anchor: jax.Array, tables: Candidates, depth: int, budget: int) -> DraftTree:
    """Candidates chosen by a state that mixes the whole path: all that a beam tells is needed."""
    state = jnp.zeros((anchor.shape[0], 1), jnp.int32)

    def expand(level: int, beam: Beam) -> tuple[jax.Array, jax.Array]:
        nonlocal state
        if level > 1:
            parent = jnp.take_along_axis(state, beam.parents, axis=1)
            state = next_state(parent, beam.tokens, beam.ranks, tables.tokens.shape[1])
        rows = jnp.arange(anchor.shape[0])[:, None]
        return tables.tokens[rows, state], tables.log_probs[rows, state]

    return grow_tree_conditional(anchor, expand, depth, budget)


@pytest.mark.parametrize(("depth", "top_k", "budget"), [(2, 3, 5), (3, 2, 6), (4, 1, 3)])
@settings(max_examples=10, deadline=None)
@given(seed=seeds)
def test_no_prefix_closed_set_has_more_mass(depth: int, top_k: int, budget: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    logits = jnp.asarray(rng.normal(size=(1, depth, top_k + 2)), jnp.float32)
    log_probs, tokens = jax.lax.top_k(jax.nn.log_softmax(logits), top_k)
    tree = grow(jnp.zeros(1, jnp.int32), Candidates(tokens, log_probs), budget)

    probabilities = np.exp(np.asarray(log_probs, np.float64))[0]
    mass = {
        path: np.prod([probabilities[d, rank] for d, rank in enumerate(path)])
        for length in range(1, depth + 1)
        for path in itertools.product(range(top_k), repeat=length)
    }
    best = max(
        sum(mass[path] for path in paths)
        for paths in itertools.combinations(mass, budget)
        if all(len(path) == 1 or path[:-1] in paths for path in paths)
    )
    drafted = np.exp(np.asarray(tree.scores, np.float64)[0, 1:])
    np.testing.assert_allclose(drafted.sum(), best, rtol=1e-6)


def test_each_row_may_have_a_lower_budget() -> None:
    """Its tree is the heap's of that budget, and padding behind it."""
    rng, budget = np.random.default_rng(0), 16
    candidates = random_candidates(rng, (budget + 2, 3, 8))
    anchor = rng.integers(0, 100, budget + 2, dtype=np.int32)
    limits = np.arange(budget + 2, dtype=np.int32)  # the last one is above the budget
    references = heap_trees(anchor, candidates, budget)
    for row, limit in enumerate(limits[:budget]):
        one = jax.tree.map(lambda array, row=row: array[row : row + 1], candidates)
        (lower,) = heap_trees(anchor[row : row + 1], one, int(limit))
        count = limit + 1
        for name, array in references[row].items():
            padding = np.full_like(array[count:], -np.inf if name == "scores" else 0)
            references[row][name] = (
                np.concatenate([lower[name], padding]) if array.ndim == 1 else np.eye(len(array)) > 0
            )
        references[row]["visibility"][:count, :count] = lower["visibility"]
    assert_same(grow_tree(jnp.asarray(anchor), candidates, budget, jnp.asarray(limits)), references)


def test_nan_drafts_nothing_and_stays_in_its_request() -> None:
    rng = np.random.default_rng(0)
    candidates = random_candidates(rng, (3, 3, 4))
    broken = Candidates(candidates.tokens, candidates.log_probs.at[1].set(jnp.nan))
    anchor = jnp.array([5, 6, 7], jnp.int32)
    tree, whole = grow(anchor, broken, 7), grow(anchor, candidates, 7)
    np.testing.assert_array_equal(tree.valid[1], np.arange(8) == 0)
    np.testing.assert_array_equal(tree.tokens[1], [6] + [0] * 7)
    np.testing.assert_array_equal(tree.scores[1], [0] + [-np.inf] * 7)
    np.testing.assert_array_equal(tree.visibility[1], np.eye(8, dtype=bool))
    for leaf, other in zip(jax.tree.leaves(tree), jax.tree.leaves(whole), strict=True):
        np.testing.assert_array_equal(leaf[::2], other[::2])


def test_chain_with_padding_is_causal() -> None:
    candidates = Candidates(jnp.array([[[3], [4]]], jnp.int32), jnp.full((1, 2, 1), -0.5))
    tree = grow(jnp.array([9], jnp.int32), candidates, 4)
    np.testing.assert_array_equal(tree.tokens, [[9, 3, 4, 0, 0]])
    np.testing.assert_array_equal(tree.depths, [[0, 1, 2, 0, 0]])
    np.testing.assert_array_equal(tree.valid, [[True, True, True, False, False]])
    causal = np.tril(np.ones((3, 3), bool))
    np.testing.assert_array_equal(tree.visibility[0, :3, :3], causal)
    np.testing.assert_array_equal(tree.visibility[0, 3:], np.eye(5, dtype=bool)[3:])
    deeper = visibility(tree.parents, tree.valid, depth=9)
    np.testing.assert_array_equal(deeper, tree.visibility)


def test_root_only_is_the_heap_of_budget_zero() -> None:
    anchor = np.array([4, 8], np.int32)
    candidates = random_candidates(np.random.default_rng(0), (2, 0, 1))
    assert_same(jax.jit(root_only)(jnp.asarray(anchor)), heap_trees(anchor, candidates, budget=0))


@pytest.mark.parametrize(
    ("tokens", "log_probs", "anchor", "budget", "message"),
    [
        ((2, 3, 4), (2, 3, 4), (2,), 0, "budget must be 1 to 1024, got 0"),
        ((2, 3, 4), (2, 3, 4), (2,), 1025, "budget must be 1 to 1024, got 1025"),
        ((2, 3, 0), (2, 3, 0), (2,), 7, "top_k must be at least 1, got 0"),
        ((2, 0, 4), (2, 0, 4), (2,), 7, "depth must be at least 1, got 0"),
        ((2, 12), (2, 12), (2,), 7, "candidates.tokens must be int32 [any, any, any], got int32 [2, 12]"),
        ((2, 3, 4), (2, 3, 5), (2,), 7, "candidates.log_probs must be float32 [2, 3, 4], got float32 [2, 3, 5]"),
        ((2, 3, 4), (2, 3, 4), (3,), 7, "anchor must be int32 [2], got int32 [3]"),
    ],
)
def test_errors_name_the_field_and_its_limit(
    tokens: tuple[int, ...], log_probs: tuple[int, ...], anchor: tuple[int, ...], budget: int, message: str
) -> None:
    candidates = Candidates(jnp.zeros(tokens, jnp.int32), jnp.zeros(log_probs, jnp.float32))
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        grow_tree(jnp.zeros(anchor, jnp.int32), candidates, budget)


def test_wrong_dtype_is_named() -> None:
    candidates = Candidates(jnp.zeros((2, 3, 4), jnp.int32), jnp.zeros((2, 3, 4), jnp.bfloat16))
    message = r"log_probs must be float32 \[2, 3, 4\], got bfloat16 \[2, 3, 4\]"
    with pytest.raises(ValueError, match=message):
        grow_tree(jnp.zeros(2, jnp.int32), candidates, budget=7)


def test_errors_of_expand_name_what_came() -> None:
    def expand(level: int, beam: Beam) -> tuple[jax.Array, jax.Array]:
        return jnp.zeros((2, 1, 4), jnp.int32), jnp.zeros((2, 1, 4), jnp.float32)

    # Right for the root, which is one entry wide, and wrong for the four nodes under it.
    message = r"tokens of expand must be int32 \[2, 4, any\], got int32 \[2, 1, 4\]"
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda anchor: grow_tree_conditional(anchor, expand, 2, 7), jnp.zeros(2, jnp.int32))
