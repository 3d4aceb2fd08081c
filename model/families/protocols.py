"""What a round asks of a target and of a drafter, whatever their families."""

from typing import Protocol

import jax

from jaxspec.model.families.config import DFlashConfig, TargetConfig
from jaxspec.model.layers.basic import Embedding
from jaxspec.model.layers.batch import ForwardBatch, ForwardOutput, LayerRows
from jaxspec.model.layers.cache import PagedCache, RowSpec
from jaxspec.sharding.layout import Layout
from jaxspec.sharding.vocab_shard import VocabShard


class CachedModule(Protocol):
    """A module whose rows are kept in a paged cache. Inside a program it holds one device's share of the weights."""

    layout: Layout

    @property
    def cache_rows(self) -> tuple[tuple[RowSpec, ...], ...]:
        """What the cache holds for one token, layer by layer."""


class Target(CachedModule, Protocol):
    """A causal language model over a paged cache."""

    embed_tokens: Embedding

    @property
    def config(self) -> TargetConfig:
        """The checkpoint's own numbers."""

    @property
    def vocab(self) -> VocabShard:
        """The part of the vocabulary whose logits a device holds."""

    def __call__(self, batch: ForwardBatch, cache: PagedCache, taps: tuple[int, ...]) -> ForwardOutput:
        """Runs every row of `batch`; `taps` are the 0-based layers whose outputs are returned."""

    def embed(self, tokens: jax.Array) -> jax.Array:
        """int32 [...] → [..., hidden]; the drafter's input rows come from here too."""

    def logits(self, hidden: jax.Array) -> jax.Array:
        """[..., hidden] after a final norm → float32 logits [..., vocab / devices] of this device's vocabulary rows."""


class Drafter(CachedModule, Protocol):
    """A block drafter over a paged cache of its own, which shares the target's page table, embedding and head."""

    @property
    def config(self) -> DFlashConfig:
        """The checkpoint's own numbers."""

    def context_keys_values(self, tapped: jax.Array, positions: jax.Array) -> tuple[LayerRows, ...]:
        """The cache rows of processed tokens: features [batch, rows, taps * hidden] at int32 [batch, rows]."""

    def block_tokens(self, anchor: jax.Array, length: int) -> jax.Array:
        """int32 [batch] → the drafter's input [batch, 1 + length]: the anchor, then mask tokens."""

    def hidden(self, embedded: jax.Array, start: jax.Array, cache: PagedCache, page_table: jax.Array) -> jax.Array:
        """One pass over embedded rows [batch, block, hidden] from position `start` on → [batch, block - 1, hidden]."""

    def scaled(self, logits: jax.Array) -> jax.Array:
        """What the drafter does to the float32 logits of its rows, [..., vocab / devices]."""
