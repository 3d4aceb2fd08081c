"""One round of speculative decoding: draft, grow, verify, accept, commit.

Plain decoding is the same round with a budget of 0.
"""

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxspec.model.families.protocols import Target
from jaxspec.model.layers.batch import ForwardBatch, ForwardOutput
from jaxspec.model.layers.cache import PagedCache, write_rows
from jaxspec.speculation.acceptance import Accepted, accept
from jaxspec.speculation.drafting import Drafting
from jaxspec.speculation.log_probs import LogProbRows, log_prob_rows, no_log_probs
from jaxspec.speculation.logits_processors import (
    Adjustments,
    adjust,
    count_tokens,
    everything_allowed,
    forbid,
    take_rows,
)
from jaxspec.speculation.sampling import SamplingWork, sample
from jaxspec.speculation.state import DecodeState, emitted_tokens
from jaxspec.speculation.tree import DraftTree, grow_tree, root_only


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
      log_probs: of `tokens`, where asked for.
    """

    tokens: jax.Array
    count: jax.Array
    accepted: jax.Array
    drafted: jax.Array
    finished: jax.Array
    log_probs: LogProbRows


def decode_round(
    target: Target,
    drafting: Drafting,
    caches: Caches,
    state: DecodeState,
    adjustments: Adjustments,
    slots: jax.Array,
    page_table: jax.Array,
    capacity: jax.Array,
    budget: int,
    work: SamplingWork,
) -> tuple[Caches, DecodeState, Adjustments, RoundResult]:
    """Runs one round for every row of `state`.

    Args:
      adjustments: of all slots.
      slots: int32 [batch], the slot of each row.
      page_table: int32 [batch, pages].
      capacity: int32 [batch], tokens that a slot's pages hold; a slot whose round might not fit does not run.
      budget: N, tree nodes beside the root.
      work: what sampling the batch needs.
    """
    depth = drafting.depth if budget else 0
    tree = draft_tree(drafting, caches, state, page_table, budget)
    output = verify(target, drafting, caches, state, page_table, tree)
    allowed = everything_allowed(*tree.tokens.shape)
    return settle(
        target, drafting, caches, state, adjustments, slots, page_table, capacity, tree, output, allowed, depth, work
    )


def settle(
    target: Target,
    drafting: Drafting,
    caches: Caches,
    state: DecodeState,
    adjustments: Adjustments,
    slots: jax.Array,
    page_table: jax.Array,
    capacity: jax.Array,
    tree: DraftTree,
    output: ForwardOutput,
    allowed: jax.Array,
    depth: int,
    work: SamplingWork,
) -> tuple[Caches, DecodeState, Adjustments, RoundResult]:
    """The second half of a round: accept and commit what the target's pass over the tree brought.

    Args:
      allowed: uint32 [batch, rows, words], bit t % 32 of word t // 32 says whether token t may follow a row; of no
        words where everything may.
    """
    accepted, log_probs = judge(target, output, tree, state, adjustments, slots, allowed, depth, work)
    caches, state, result = commit(
        target, drafting, caches, state, page_table, capacity, tree, output, accepted, log_probs
    )
    if work.adjusted:
        adjustments = count_tokens(adjustments, slots, result.tokens, result.count, target.vocab_split)
    return caches, state, adjustments, result


def draft_tree(drafting: Drafting, caches: Caches, state: DecodeState, page_table: jax.Array, budget: int) -> DraftTree:
    """Drafts candidates and grows the tree of `budget` nodes."""
    if budget == 0:
        return root_only(state.anchor)
    return grow_tree(state.anchor, drafting.propose(state, caches.drafter, page_table), budget, state.budget)


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
    adjustments: Adjustments,
    slots: jax.Array,
    allowed: jax.Array,
    depth: int,
    work: SamplingWork,
) -> tuple[Accepted, LogProbRows]:
    """The target chooses a token at every row; the path that agrees with it is accepted."""
    logits, split = target.logits(output.hidden), target.vocab_split
    scores = adjust(logits, tree, state, take_rows(adjustments, slots), split) if work.adjusted else logits
    scores = forbid(scores, allowed, split)
    accepted = accept(tree, sample(scores, tree.depths, state, depth, work.level, split), depth)
    if not work.log_probs:
        return accepted, no_log_probs(logits.shape[0])
    return accepted, log_prob_rows(rows_on_path(logits, accepted), accepted.tokens, split)


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
    log_probs: LogProbRows,
) -> tuple[Caches, DecodeState, RoundResult]:
    """Writes the accepted rows, and only those, into both caches, and moves the anchor."""
    width = accepted.path.shape[1]
    live = ~state.finished & (state.length + jnp.minimum(width, state.remaining) <= capacity)
    count, finished = emitted_tokens(state, accepted.tokens, accepted.length, live)
    places = jnp.arange(width)
    positions = state.length[:, None] + places
    keep = places < count[:, None]
    rows = jax.tree.map(lambda array: rows_on_path(array, accepted), output.rows)
    caches = Caches(
        target=write_rows(caches.target, rows, page_table, positions, keep, target.layout.shares("page_rows")),
        drafter=write_rows(
            caches.drafter,
            drafting.context_rows(rows_on_path(output.tapped, accepted), positions),
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
        log_probs=log_probs,
    )
    return caches, state, result


def rows_on_path(array: jax.Array, accepted: Accepted) -> jax.Array:
    """The accepted rows, [batch, depth + 1, ...], of an array [batch, nodes + 1, ...]."""
    index = accepted.path.reshape(*accepted.path.shape, *(1,) * (array.ndim - 2))
    return jnp.take_along_axis(array, index, axis=1)


def prefill(
    target: Target,
    drafting: Drafting,
    caches: Caches,
    tokens: jax.Array,
    start: jax.Array,
    count: jax.Array,
    page_table: jax.Array,
    following: jax.Array,
    log_probs: bool,
) -> tuple[Caches, LogProbRows]:
    """Processes a chunk of prompt tokens and commits their rows to both caches; chooses no token.

    Args:
      tokens: int32 [batch, chunk].
      start: int32 [batch], position of each chunk's first token; all before it is already cached.
      count: int32 [batch], tokens of the chunk that are real.
      following: int32 [batch, chunk], the prompt's token after each one.
      log_probs: whether to return the log-probabilities of `following`.
    """
    chunk = tokens.shape[1]
    positions = start[:, None] + jnp.arange(chunk)
    causal = jnp.broadcast_to(jnp.tril(jnp.ones((chunk, chunk), bool)), (tokens.shape[0], chunk, chunk))
    output = target(ForwardBatch(tokens, positions, page_table, start, causal), caches.target, drafting.taps)
    keep = jnp.arange(chunk) < count[:, None]
    for late in (*jax.tree.leaves(output.rows)[-1:], output.tapped, *([output.hidden] if log_probs else [])):
        # Always true, which the compiler cannot know: no row is written before all contexts have been read. Where a
        # layer's rows may be written before its context is read, the compiler copies the pool first.
        keep &= ~(late.reshape(-1)[:1] > jnp.inf).any()
    caches = Caches(
        target=write_rows(caches.target, output.rows, page_table, positions, keep, target.layout.shares("page_rows")),
        drafter=write_rows(
            caches.drafter, drafting.context_rows(output.tapped, positions), page_table, positions, keep
        ),
    )
    if not log_probs:
        return caches, no_log_probs(tokens.shape[0])
    return caches, log_prob_rows(target.logits(output.hidden), following, target.vocab_split)
