"""One round of speculative decoding: draft, verify, accept, commit.

Plain decoding is the same round with a budget of 0.
"""

import dataclasses
import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxspec.model.families.protocols import Target
from jaxspec.model.layers.batch import ForwardBatch, ForwardOutput
from jaxspec.model.layers.cache import PagedCache, write_rows
from jaxspec.speculation.acceptance import ConfirmedPath, confirm, emitted_tokens
from jaxspec.speculation.drafting import Drafting
from jaxspec.speculation.log_probs import LogProbRows, log_prob_rows, no_log_probs
from jaxspec.speculation.logits_processors import count_tokens, forbid, process_logits
from jaxspec.speculation.sampling import SamplingMode, sample
from jaxspec.speculation.slot_table import SlotTable
from jaxspec.speculation.tree import DraftTree, grow_tree, root_only


@dataclass(frozen=True)
class Models:
    """What one device runs: its share of the target, and how its drafter drafts."""

    target: Target
    drafting: Drafting


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Caches:
    """The target's and the drafter's pools; one page table addresses both."""

    target: PagedCache
    drafter: PagedCache


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Carry:
    """What a call takes over from the one before: the one argument that is donated.

    Attributes:
      slots: of all slots; while a call runs, of its batch.
    """

    caches: Caches
    slots: SlotTable


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Batch:
    """The requests of one call.

    Attributes:
      slots: int32 [batch]; one past the last slot is nobody's.
      page_table: int32 [batch, pages].
      capacity: int32 [batch], tokens that a slot's pages hold; a slot whose round might not fit does not run.
      allowed: uint32 [batch, nodes + 1, words], bit t % 32 of word t // 32 says whether a grammar lets token t follow a
        row of the tree; of no words where everything may.
    """

    slots: jax.Array
    page_table: jax.Array
    capacity: jax.Array
    allowed: jax.Array


@dataclass(frozen=True)
class RoundOptions:
    """What a round is compiled for.

    Attributes:
      budget: N, tree nodes beside the root.
      sampling: what the batch needs to choose tokens.
    """

    budget: int
    sampling: SamplingMode


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Verified:
    """A tree, and what the target's pass over it brought."""

    tree: DraftTree
    output: ForwardOutput


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Accepted:
    """The path that the target confirmed, and the log-probabilities of its tokens where asked for."""

    path: ConfirmedPath
    log_probs: LogProbRows


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


def decode_round(models: Models, carry: Carry, batch: Batch, options: RoundOptions) -> tuple[Carry, RoundResult]:
    """Runs one round for every request of `batch`, whose part of the slot table `carry` holds."""
    tree = draft(models, carry, batch, options)
    verified = verify(models, carry, batch, tree)
    accepted = accept(models, carry, batch, verified, options)
    return commit(models, carry, batch, verified, accepted, options)


def draft(models: Models, carry: Carry, batch: Batch, options: RoundOptions) -> DraftTree:
    """Drafts candidates in one pass of the drafter and grows the tree of `budget` nodes."""
    slots = carry.slots
    if options.budget == 0:
        return root_only(slots.anchor)
    candidates = models.drafting.propose(slots, carry.caches.drafter, batch.page_table)
    return grow_tree(slots.anchor, candidates, options.budget, slots.budget)


def verify(models: Models, carry: Carry, batch: Batch, tree: DraftTree) -> Verified:
    """One target pass over the anchor and all nodes; a row sees the context, its ancestors and itself."""
    length = carry.slots.length
    forward = ForwardBatch(
        tokens=tree.tokens,
        positions=length[:, None] + tree.depths,
        page_table=batch.page_table,
        context_length=length,
        visibility=tree.visibility,
    )
    return Verified(tree, models.target(forward, carry.caches.target, models.drafting.taps))


def accept(models: Models, carry: Carry, batch: Batch, verified: Verified, options: RoundOptions) -> Accepted:
    """The target chooses a token at every row; the path that agrees with it is accepted."""
    tree, slots, vocab = verified.tree, carry.slots, models.target.vocab
    logits = models.target.logits(verified.output.hidden)
    mode, depth = options.sampling, max_depth(models, options)
    scores = process_logits(logits, tree, slots, vocab) if mode.processed else logits
    scores = forbid(scores, batch.allowed, vocab)
    path = confirm(tree, sample(scores, tree.depths, slots, vocab, mode.level, depth), depth)
    if not mode.log_probs:
        return Accepted(path, no_log_probs(logits.shape[0]))
    return Accepted(path, log_prob_rows(along(path, logits), path.tokens, vocab))


def commit(
    models: Models, carry: Carry, batch: Batch, verified: Verified, accepted: Accepted, options: RoundOptions
) -> tuple[Carry, RoundResult]:
    """Writes the accepted rows, and only those, into both caches, emits their tokens and moves the anchor."""
    slots, path = carry.slots, accepted.path
    width = path.nodes.shape[1]
    live = ~slots.finished & (slots.length + jnp.minimum(width, slots.remaining) <= batch.capacity)
    count, finished = emitted_tokens(slots, path, live)
    places = jnp.arange(width)
    positions = slots.length[:, None] + places
    keep = places < count[:, None]
    output = dataclasses.replace(
        verified.output,
        rows=jax.tree.map(functools.partial(along, path), verified.output.rows),
        tapped=along(path, verified.output.tapped),
    )
    caches = write_caches(models, carry.caches, output, batch.page_table, positions, keep)
    newest = jnp.take_along_axis(path.tokens, jnp.maximum(count - 1, 0)[:, None], axis=1)[:, 0]
    if options.sampling.processed:
        slots = count_tokens(slots, path.tokens, count, models.target.vocab)
    slots = dataclasses.replace(
        slots,
        anchor=jnp.where(count > 0, newest, slots.anchor),
        length=slots.length + count,
        remaining=slots.remaining - count,
        finished=finished,
    )
    result = RoundResult(
        tokens=path.tokens,
        count=count,
        accepted=jnp.minimum(path.length, count),
        drafted=jnp.where(live, verified.tree.valid.sum(-1) - 1, 0).astype(jnp.int32),
        finished=finished,
        log_probs=accepted.log_probs,
    )
    return Carry(caches, slots), result


def max_depth(models: Models, options: RoundOptions) -> int:
    """L, the deepest that a node of the round's tree can be; 0 in plain decoding."""
    return models.drafting.depth if options.budget else 0


def along(path: ConfirmedPath, array: jax.Array) -> jax.Array:
    """The entries of a path's nodes, [batch, depth + 1, ...], of an array [batch, nodes + 1, ...]."""
    index = path.nodes.reshape(*path.nodes.shape, *(1,) * (array.ndim - 2))
    return jnp.take_along_axis(array, index, axis=1)


def write_caches(
    models: Models,
    caches: Caches,
    output: ForwardOutput,
    page_table: jax.Array,
    positions: jax.Array,
    keep: jax.Array,
) -> Caches:
    """Writes the kept rows of a target pass into its cache, and what the drafter makes of their features into its own.

    Args:
      output: of the rows to be written, [batch, rows, ...]; only its cache rows and tapped features are read.
      page_table: int32 [batch, pages].
      positions: int32 [batch, rows].
      keep: bool [batch, rows].
    """
    shares = models.target.layout.shares("page_rows")
    drafted = models.drafting.context_rows(output.tapped, positions)
    return Caches(
        target=write_rows(caches.target, output.rows, page_table, positions, keep, shares),
        drafter=write_rows(caches.drafter, drafted, page_table, positions, keep),
    )
