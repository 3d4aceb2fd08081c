"""What changes the target's logits before a token is chosen: biases, penalties, a least length, and grammars.

Each row of a tree stands after its own ancestors, so penalties count those drafted tokens as well as the
committed ones: a row's logits are what plain decoding would have had at that place.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.sharding.vocab_shard import VocabShard
from jaxspec.speculation.slot_table import SlotTable
from jaxspec.speculation.tree import DraftTree


def process_logits(logits: jax.Array, tree: DraftTree, slots: SlotTable, vocab: VocabShard) -> jax.Array:
    """Logits with biases, then a least length, then penalties, in the order that vLLM has them.

    Args:
      logits: float32 [batch, nodes + 1, vocab / devices], of the rows of `tree`.
      slots: of the requests of the batch.
      vocab: the tokens that this device holds logits of.
    """
    batch, nodes = np.ogrid[: logits.shape[0], : logits.shape[1]]
    batch, nodes = batch[..., None], nodes[..., None]
    bias_ids = vocab.places(slots.bias_ids)[:, None]
    logits = logits.at[batch, nodes, bias_ids].add(slots.bias[:, None], mode="drop")

    # The token after a row at depth d has position length + d + 1.
    early = slots.length[:, None] + tree.depths + 1 < slots.min_length[:, None]
    ceiling = jnp.where(early, -jnp.inf, jnp.inf)[..., None]
    logits = logits.at[batch, nodes, vocab.places(slots.stop_ids)[:, None]].min(ceiling, mode="drop")

    # Ancestors and the row itself; the anchor is committed and counted already.
    drafted = tree.visibility & (tree.valid & (tree.depths > 0))[:, None, :]  # [batch, nodes + 1, nodes + 1]
    counts = jnp.broadcast_to(slots.generated.astype(jnp.int32)[:, None], logits.shape)
    counts = counts.at[batch, nodes, vocab.places(tree.tokens)[:, None]].add(drafted.astype(jnp.int32), mode="drop")
    repetition = slots.repetition[:, None, None]
    seen = slots.in_prompt[:, None] | (counts > 0)
    logits = jnp.where(seen, jnp.where(logits > 0, logits / repetition, logits * repetition), logits)
    frequency, presence = slots.frequency[:, None, None], slots.presence[:, None, None]
    return logits - frequency * counts - presence * (counts > 0)


def count_tokens(slots: SlotTable, tokens: jax.Array, count: jax.Array, vocab: VocabShard) -> SlotTable:
    """Adds the first `count` [batch] of a round's tokens, int32 [batch, depth + 1], to the requests' answers."""
    batch = jnp.arange(tokens.shape[0])[:, None]
    kept = (jnp.arange(tokens.shape[1]) < count[:, None]).astype(slots.generated.dtype)
    generated = slots.generated.at[batch, vocab.places(tokens)].add(kept, mode="drop")
    return dataclasses.replace(slots, generated=generated)


def everything_allowed(batch: int) -> np.ndarray:
    """The masks of a batch without grammars: uint32 [batch, 0, 0], no words."""
    return np.zeros((batch, 0, 0), np.uint32)


def forbid(scores: jax.Array, allowed: jax.Array, vocab: VocabShard) -> jax.Array:
    """Leaves out the tokens that a grammar forbids.

    Args:
      scores: float32 [batch, nodes + 1, vocab / devices].
      allowed: uint32 [batch, nodes + 1, words], a bit for each token of the whole vocabulary, or no words.
    """
    if not allowed.shape[-1]:
        return scores
    tokens = vocab.first + jnp.arange(vocab.local)
    bits = jnp.take(allowed, tokens // 32, axis=-1) >> (tokens % 32).astype(jnp.uint32)
    return jnp.where(bits & 1, scores, -jnp.inf)
