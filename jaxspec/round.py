"""One round of speculative decoding: draft, grow, verify, accept, commit.

Plain decoding is the same round with a budget of 0.
"""

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxspec.acceptance import Accepted, accept
from jaxspec.drafting import Drafting
from jaxspec.sampling import SamplingLevel, sample
from jaxspec.state import DecodeState, emitted_tokens
from jaxspec.tree import DraftTree, grow_tree, root_only
from model.batch import ForwardBatch, ForwardOutput
from model.cache import PagedCache, write_rows
from model.target import Target


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Caches:
    """The target's and the drafter's pools; one page table addresses both."""

    target: PagedCache
    drafter: PagedCache


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RoundResult:
    """What the host reads back of a round.

    Attributes:
      tokens: int32 [batch, depth + 1]; the first `count` are new.
      count: int32 [batch], 0 for a slot that did not run.
      accepted: int32 [batch], drafted tokens among the new ones.
      drafted: int32 [batch], tree nodes verified.
      finished: bool [batch].
    """

    tokens: jax.Array
    count: jax.Array
    accepted: jax.Array
    drafted: jax.Array
    finished: jax.Array


def decode_round(
    target: Target,
    drafting: Drafting,
    caches: Caches,
    state: DecodeState,
    page_table: jax.Array,
    capacity: jax.Array,
    budget: int,
    level: SamplingLevel,
) -> tuple[Caches, DecodeState, RoundResult]:
    """Runs one round for every row of `state`.

    Args:
      page_table: int32 [batch, pages].
      capacity: int32 [batch], tokens that a slot's pages hold; a slot whose round might not fit does not run.
      budget: N, tree nodes beside the root.
      level: how much sampling work the batch needs.
    """
    depth = drafting.depth if budget else 0
    tree = draft_tree(drafting, caches, state, page_table, budget)
    output = verify(target, drafting, caches, state, page_table, tree)
    accepted = judge(target, output, tree, state, depth, level)
    return commit(target, drafting, caches, state, page_table, capacity, tree, output, accepted)


def draft_tree(drafting: Drafting, caches: Caches, state: DecodeState, page_table: jax.Array, budget: int) -> DraftTree:
    """Drafts candidates and grows the tree of `budget` nodes."""
    if budget == 0:
        return root_only(state.anchor)
    return grow_tree(state.anchor, drafting.propose(state, caches.drafter, page_table), budget)


def verify(
    target: Target,
    drafting: Drafting,
    caches: Caches,
    state: DecodeState,
    page_table: jax.Array,
    tree: DraftTree,
) -> ForwardOutput:
    """One target pass over the anchor and all nodes; a row sees the context, its ancestors and itself."""
    batch = ForwardBatch(
        tokens=tree.tokens,
        positions=state.length[:, None] + tree.depths,
        page_table=page_table,
        context_length=state.length,
        visibility=tree.visibility,
    )
    return target(batch, caches.target, drafting.taps)


def judge(
    target: Target,
    output: ForwardOutput,
    tree: DraftTree,
    state: DecodeState,
    depth: int,
    level: SamplingLevel,
) -> Accepted:
    """The target chooses a token at every row; the path that agrees with it is accepted."""
    predicted = sample(target.logits(output.hidden), tree.depths, state, depth, level, target.vocab_split)
    return accept(tree, predicted, depth)


def commit(
    target: Target,
    drafting: Drafting,
    caches: Caches,
    state: DecodeState,
    page_table: jax.Array,
    capacity: jax.Array,
    tree: DraftTree,
    output: ForwardOutput,
    accepted: Accepted,
) -> tuple[Caches, DecodeState, RoundResult]:
    """Writes the accepted rows, and only those, into both caches, and moves the anchor."""
    width = accepted.path.shape[1]
    live = ~state.finished & (state.length + jnp.minimum(width, state.remaining) <= capacity)
    count, finished = emitted_tokens(state, accepted.tokens, accepted.length, live)
    places = jnp.arange(width)
    positions = state.length[:, None] + places
    keep = places < count[:, None]

    def on_path(array: jax.Array) -> jax.Array:
        index = accepted.path.reshape(*accepted.path.shape, *(1,) * (array.ndim - 2))
        return jnp.take_along_axis(array, index, axis=1)

    rows = jax.tree.map(on_path, output.rows)
    caches = Caches(
        target=write_rows(caches.target, rows, page_table, positions, keep, target.layout.shares("page_rows")),
        drafter=write_rows(
            caches.drafter,
            drafting.context_rows(on_path(output.tapped), positions),
            page_table,
            positions,
            keep,
        ),
    )
    newest = jnp.take_along_axis(accepted.tokens, jnp.maximum(count - 1, 0)[:, None], axis=1)[:, 0]
    state = dataclasses.replace(
        state,
        anchor=jnp.where(count > 0, newest, state.anchor),
        length=state.length + count,
        remaining=state.remaining - count,
        finished=finished,
    )
    result = RoundResult(
        tokens=accepted.tokens,
        count=count,
        accepted=jnp.minimum(accepted.length, count),
        drafted=jnp.where(live, tree.valid.sum(-1) - 1, 0).astype(jnp.int32),
        finished=finished,
    )
    return caches, state, result


def prefill(
    target: Target,
    drafting: Drafting,
    caches: Caches,
    tokens: jax.Array,
    start: jax.Array,
    count: jax.Array,
    page_table: jax.Array,
) -> Caches:
    """Processes a chunk of prompt tokens and commits their rows to both caches; chooses no token.

    Args:
      tokens: int32 [batch, chunk].
      start: int32 [batch], position of each chunk's first token; all before it is already cached.
      count: int32 [batch], tokens of the chunk that are real.
    """
    chunk = tokens.shape[1]
    positions = start[:, None] + jnp.arange(chunk)
    causal = jnp.broadcast_to(jnp.tril(jnp.ones((chunk, chunk), bool)), (tokens.shape[0], chunk, chunk))
    output = target(ForwardBatch(tokens, positions, page_table, start, causal), caches.target, drafting.taps)
    keep = jnp.arange(chunk) < count[:, None]
    return Caches(
        target=write_rows(caches.target, output.rows, page_table, positions, keep, target.layout.shares("page_rows")),
        drafter=write_rows(
            caches.drafter, drafting.context_rows(output.tapped, positions), page_table, positions, keep
        ),
    )
