"""The draft tree: the most probable continuations of the anchor, built on the device.

DDTree, arXiv 2604.12989. A node is a sequence of drafted tokens; its score is the sum of their
log-probs. The `budget` nodes of highest score maximise the accepted length that the drafter itself
expects (Prop. 1-3). The paper pops them off a heap; here they are found level by level, in fixed
shapes, and come out the same.

Same, because nodes have one canonical order: ascending by (-score, depth, place of the parent in
this order, rank among siblings), scores being one float32 addition a level. Rounding is monotone,
so parents and better siblings come first even where scores tie: the first `budget` nodes are always
a tree, and a heap with this key pops exactly them.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxspec.config import MAX_BUDGET


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Candidates:
    """The drafter's guesses for each depth, best first.

    tokens: int32 [batch, depth, top_k], distinct at each depth.
    log_probs: float32 [batch, depth, top_k], descending; -inf marks a candidate that isn't there.
    """

    tokens: jax.Array
    log_probs: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DraftTree:
    """Row 0 is the root (the anchor); the drafted nodes follow in canonical order.

    Where fewer than `budget` nodes exist the last rows are padding: token, parent, depth and rank
    0, score -inf.

    tokens: int32 [batch, budget + 1]; siblings differ.
    parents: int32 [batch, budget + 1], row of the parent, always an earlier row; the root's is 0.
    depths: int32 [batch, budget + 1]; the root's is 0.
    ranks: int32 [batch, budget + 1], place among the parent's candidates; the root's is 0.
    scores: float32 [batch, budget + 1], log-prob of the path from the root; the root's is 0.
    valid: bool [batch, budget + 1], False for padding.
    visibility: bool [batch, budget + 1, budget + 1], row i sees its ancestors and itself; padding
        sees only itself.
    """

    tokens: jax.Array
    parents: jax.Array
    depths: jax.Array
    ranks: jax.Array
    scores: jax.Array
    valid: jax.Array
    visibility: jax.Array


@dataclass(frozen=True)
class Beam:
    """The nodes of one depth that may still enter the tree, in canonical order.

    tokens: int32 [batch, width].
    parents: int32 [batch, width], slot of the parent in the beam one depth up.
    ranks: int32 [batch, width], place among the parent's candidates.
    scores: float32 [batch, width], log-prob of the path from the root.
    """

    tokens: jax.Array
    parents: jax.Array
    ranks: jax.Array
    scores: jax.Array


Expand = Callable[[int, Beam], tuple[jax.Array, jax.Array]]


def grow_tree(anchor: jax.Array, candidates: Candidates, budget: int, limits: jax.Array | None = None) -> DraftTree:
    """The best tree over candidates that depend on the depth alone (arXiv 2604.12989, Prop. 1-3).

    Log-probs above 0 (the rounding of a log-softmax) count as 0. Paths of log-prob -inf are left
    out, and NaN counts as -inf: a drafter that fails drafts nothing, and the round decodes plainly.

    Args:
        anchor: int32 [batch].
        candidates: tokens and log-probs [batch, depth, top_k].
        budget: number of drafted nodes, 1 to MAX_BUDGET.
        limits: int32 [batch], a lower budget for each row of the batch; None has none. Trees of lower budgets are the
            first nodes of larger ones.

    Raises:
        ValueError: the budget, a shape or a dtype is out of range; names it and its limit.
    """
    _require("candidates.tokens", candidates.tokens, (None, None, None), jnp.int32)
    _require("candidates.log_probs", candidates.log_probs, candidates.tokens.shape, jnp.float32)
    _require("anchor", anchor, candidates.tokens.shape[:1], jnp.int32)
    depth, top_k = candidates.tokens.shape[1:]

    def expand(level: int, beam: Beam) -> tuple[jax.Array, jax.Array]:
        shape = (*beam.tokens.shape, top_k)
        tokens = candidates.tokens[:, None, level - 1]
        log_probs = candidates.log_probs[:, None, level - 1]
        return jnp.broadcast_to(tokens, shape), jnp.broadcast_to(log_probs, shape)

    # With the same candidates under every parent, (slot, rank) comes after every (slot', rank')
    # with slot' <= slot and rank' <= rank, and after the parents in the slots before its own.
    return _grow(anchor, expand, depth, budget, lambda slot, rank: slot + (slot + 1) * (rank + 1), limits)


def grow_tree_conditional(anchor: jax.Array, expand: Expand, depth: int, budget: int) -> DraftTree:
    """The best tree over candidates that depend on the path (Markov and selector heads).

    The same order, and the same treatment of log-probs, as `grow_tree`, which explores fewer
    nodes: what one parent's children score says nothing here about another's.

    Args:
        anchor: int32 [batch].
        expand: `expand(level, beam)` returns the candidates at depth `level` (from 1) under each
            node of the beam one depth up: distinct tokens int32 and descending log-probs float32,
            both [batch, width, top_k].
        depth: levels of the tree, at least 1; `expand` isn't called for levels beyond the budget.
        budget: number of drafted nodes, 1 to MAX_BUDGET.

    Raises:
        ValueError: the budget, depth, a shape or a dtype is out of range; names it and its limit.
    """
    _require("anchor", anchor, (None,), jnp.int32)
    return _grow(anchor, expand, depth, budget, lambda slot, rank: slot + rank + 1)


def root_only(anchor: jax.Array) -> DraftTree:
    """The tree of budget 0: a round with it is plain decoding.

    Args:
        anchor: int32 [batch].
    """
    _require("anchor", anchor, (None,), jnp.int32)
    return _merge([_root(anchor)], budget=0)


def visibility(parents: jax.Array, valid: jax.Array, depth: int) -> jax.Array:
    """Which rows each row attends to: its ancestors and itself, or itself alone if not valid.

    Args:
        parents: int32 [batch, rows].
        valid: bool [batch, rows].
        depth: at least the depth of the deepest row.

    Returns:
        bool [batch, rows, rows].
    """
    rows = jnp.arange(parents.shape[1], dtype=jnp.int32)
    ancestors = jnp.broadcast_to(rows, parents.shape)
    visible = ancestors[..., None] == rows
    # One generation at a time: a table of all ancestors compared at once is `depth` times larger.
    for _ in range(depth):
        ancestors = _take(parents, ancestors)
        visible |= valid[..., None] & (ancestors[..., None] == rows)
    return visible


def _grow(
    anchor: jax.Array,
    expand: Expand,
    depth: int,
    budget: int,
    earliest: Callable[[np.ndarray, np.ndarray], np.ndarray],
    limits: jax.Array | None = None,
) -> DraftTree:
    """Keep at each level what may still be among the first `budget` nodes, then merge the levels.

    `earliest(slots, ranks)` is the first place, counted from 1, that the canonical order can give
    to those children of a beam, their ancestors not counted.
    """
    _require_range("budget", budget, 1, MAX_BUDGET)
    _require_range("depth", depth, 1)
    levels = [_root(anchor)]
    for level in range(1, min(depth, budget) + 1):
        beam = levels[-1]
        batch, width = beam.tokens.shape
        tokens, log_probs = expand(level, beam)
        _require("tokens of expand", tokens, (batch, width, None), jnp.int32)
        _require("log_probs of expand", log_probs, tokens.shape, jnp.float32)
        top_k = tokens.shape[2]
        _require_range("top_k", top_k, 1)

        # The level - 1 drafted ancestors come first too. A rank beyond the budget can never enter;
        # skipping it before the comparison matters where top_k is a whole vocabulary.
        slots, ranks = np.indices((width, min(top_k, budget)), dtype=np.int32)
        kept = earliest(slots, ranks) + level - 1 <= budget
        children = jnp.asarray((slots * top_k + ranks)[kept])

        # NaN fails both comparisons. -0.0 becomes 0.0, as a stable top_k holds 0.0 to be greater.
        log_probs = jnp.where(log_probs < 0, log_probs, jnp.where(log_probs >= 0, 0.0, -jnp.inf))
        scores = (beam.scores[..., None] + log_probs).reshape(batch, -1)[:, children]
        # Of equal scores the lower index wins, and it stands for (place of the parent, rank).
        scores, chosen = jax.lax.top_k(scores, min(children.size, budget - level + 1))
        chosen = children[chosen]
        levels.append(
            Beam(
                tokens=_take(tokens.reshape(batch, -1), chosen),
                parents=chosen // top_k,
                ranks=chosen % top_k,
                scores=scores,
            )
        )
    return _merge(levels, budget, limits)


def _merge(levels: list[Beam], budget: int, limits: jax.Array | None = None) -> DraftTree:
    """The first `budget` nodes of all levels, after the root, which no node outscores."""
    batch = levels[0].tokens.shape[0]
    starts = list(accumulate((beam.tokens.shape[1] for beam in levels), initial=0))
    rows = np.arange(budget + 1, dtype=np.int32)
    total = max(starts[-1], rows.size)

    def join(parts: Iterable[jax.Array], fill: float = 0) -> jax.Array:
        joined = jnp.concatenate(list(parts), axis=1)
        return jnp.pad(joined, ((0, 0), (0, total - starts[-1])), constant_values=fill)

    # Of equal scores the lower index wins, and it stands for (depth, place in the level).
    scores, chosen = jax.lax.top_k(join((beam.scores for beam in levels), -jnp.inf), rows.size)
    if limits is not None:
        scores = jnp.where(rows <= limits[:, None], scores, -jnp.inf)
    valid = scores > -jnp.inf

    def pick(joined: jax.Array) -> jax.Array:
        return jnp.where(valid, _take(joined, chosen), 0)

    row_of = jnp.zeros((batch, total), jnp.int32)
    row_of = row_of.at[np.arange(batch)[:, None], chosen].set(rows, unique_indices=True)
    above = join(beam.parents + start for beam, start in zip(levels, [0, *starts], strict=False))
    parents = _take(row_of, pick(above))
    return DraftTree(
        tokens=pick(join(beam.tokens for beam in levels)),
        parents=parents,
        depths=pick(join(jnp.full_like(beam.ranks, d) for d, beam in enumerate(levels))),
        ranks=pick(join(beam.ranks for beam in levels)),
        scores=scores,
        valid=valid,
        visibility=visibility(parents, valid, len(levels) - 1),
    )


def _root(anchor: jax.Array) -> Beam:
    tokens = anchor[:, None]
    zeros = jnp.zeros(tokens.shape, jnp.int32)
    return Beam(tokens, zeros, zeros, jnp.zeros(tokens.shape, jnp.float32))


def _take(values: jax.Array, indices: jax.Array) -> jax.Array:
    """`values[b, indices[b, i]]` for indices in bounds.

    Negative ones aren't wrapped: a wrap reads its index more than once, and where XLA fuses a chain
    of gathers (`visibility`, on a GPU) the code would grow exponentially with the chain.
    """
    batch = np.arange(values.shape[0])[:, None]
    return values.at[batch, indices].get(mode="promise_in_bounds", wrap_negative_indices=False)


def _require_range(name: str, value: int, least: int, most: int | None = None) -> None:
    if value < least or (most is not None and value > most):
        limit = f"at least {least}" if most is None else f"{least} to {most}"
        raise ValueError(f"{name} must be {limit}, got {value}")


def _require(name: str, array: jax.Array, shape: tuple[int | None, ...], dtype: DTypeLike) -> None:
    fits = len(array.shape) == len(shape) and all(
        want in (None, got) for want, got in zip(shape, array.shape, strict=True)
    )
    if not fits or array.dtype != dtype:
        want = f"{jnp.dtype(dtype)} {list(shape)}".replace("None", "any")
        raise ValueError(f"{name} must be {want}, got {array.dtype} {list(array.shape)}")
