"""From a drafter to the candidates that a tree is grown from."""

from collections.abc import Callable
from dataclasses import dataclass

import jax

from jaxspec.model.families.dflash import DFlashDrafter
from jaxspec.model.families.protocols import Target
from jaxspec.model.layers.batch import LayerRows
from jaxspec.model.layers.cache import PagedCache
from jaxspec.speculation.slot_table import SlotTable
from jaxspec.speculation.tree import Candidates


@dataclass(frozen=True)
class Drafting:
    """What a round needs of a drafter.

    Attributes:
      depth: L, tokens drafted in one pass.
      taps: target layers whose outputs the drafter reads.
      propose: (the batch's part of the slot table, the drafter's cache, page table) → candidates.
      context_rows: (tapped features [batch, rows, taps * hidden], positions [batch, rows]) → the drafter's cache rows.
    """

    depth: int
    taps: tuple[int, ...]
    propose: Callable[[SlotTable, PagedCache, jax.Array], Candidates]
    context_rows: Callable[[jax.Array, jax.Array], tuple[LayerRows, ...]]


# Builds the drafting functions inside a compiled program, from modules that hold one device's weights:
# (drafter, target, tokens to draft, top-k cap) → Drafting.
MakeDrafting = Callable[..., Drafting]


def dflash_drafting(drafter: DFlashDrafter, target: Target, length: int, top_k_cap: int) -> Drafting:
    """DFlash: one pass over [anchor, mask × length], with the target's embedding and head (arXiv 2602.06036)."""

    def propose(slots: SlotTable, cache: PagedCache, page_table: jax.Array) -> Candidates:
        block = target.embed(drafter.block_tokens(slots.anchor, length))
        hidden = drafter.hidden(block, slots.length, cache, page_table)  # [batch, length, hidden]
        logits = drafter.scaled(target.logits(hidden.astype(block.dtype)))
        values, tokens = target.vocab.top_k(logits, top_k_cap)
        log_probs = values - target.vocab.log_sum_exp(logits)[..., None]
        return Candidates(tokens=tokens, log_probs=log_probs)

    return Drafting(length, drafter.config.target_layer_ids, propose, drafter.context_keys_values)


def no_drafting() -> Drafting:
    """A target on its own: nothing is drafted, tapped or cached for a drafter."""

    def propose(slots: SlotTable, cache: PagedCache, page_table: jax.Array) -> Candidates:
        raise ValueError("budget: found a positive one, expected 0 without a drafter")

    return Drafting(0, (), propose, lambda tapped, positions: ())
