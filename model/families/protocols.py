"""What a round asks of a target, whatever its family."""

from typing import Any, Protocol

import jax

from jaxspec.model.layers.basic import Embedding
from jaxspec.model.layers.batch import ForwardBatch, ForwardOutput
from jaxspec.model.layers.cache import PagedCache, RowSpec
from jaxspec.sharding.layout import Layout
from jaxspec.sharding.vocab_shard import VocabShard


class Target(Protocol):
    """A causal language model over a paged cache. Inside a program it holds one device's share of the weights."""

    config: Any
    layout: Layout
    embed_tokens: Embedding

    @property
    def vocab(self) -> VocabShard:
        """The part of the vocabulary whose logits a device holds."""

    @property
    def cache_rows(self) -> tuple[tuple[RowSpec, ...], ...]:
        """What the cache holds for one token, layer by layer."""

    def __call__(self, batch: ForwardBatch, cache: PagedCache, taps: tuple[int, ...]) -> ForwardOutput:
        """Runs every row of `batch`; `taps` are the 0-based layers whose outputs are returned."""

    def embed(self, tokens: jax.Array) -> jax.Array:
        """int32 [...] → [..., hidden]; the drafter's input rows come from here too."""

    def logits(self, hidden: jax.Array) -> jax.Array:
        """[..., hidden] after a final norm → float32 logits [..., vocab / devices] of this device's vocabulary rows."""
