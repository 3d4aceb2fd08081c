"""Prompts into the caches, a chunk at a time; no token is chosen here."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxspec.model.layers.batch import ForwardBatch
from jaxspec.speculation.log_probs import LogProbRows, log_prob_rows, no_log_probs
from jaxspec.speculation.round import Caches, Models, write_caches


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PromptChunk:
    """The next tokens of several prompts.

    Attributes:
      tokens: int32 [batch, chunk].
      following: int32 [batch, chunk], the prompt's token after each one.
      start: int32 [batch], position of each chunk's first token; all before it is already cached.
      count: int32 [batch], tokens of the chunk that are real.
      page_table: int32 [batch, pages].
    """

    tokens: jax.Array
    following: jax.Array
    start: jax.Array
    count: jax.Array
    page_table: jax.Array


def prefill(models: Models, caches: Caches, chunk: PromptChunk, log_probs: bool) -> tuple[Caches, LogProbRows]:
    """Processes a chunk of prompt tokens and commits their rows to both caches.

    Args:
      log_probs: whether to return the log-probabilities of the following tokens.
    """
    batch, length = chunk.tokens.shape
    positions = chunk.start[:, None] + jnp.arange(length)
    causal = jnp.broadcast_to(jnp.tril(jnp.ones((length, length), bool)), (batch, length, length))
    forward = ForwardBatch(chunk.tokens, positions, chunk.page_table, chunk.start, causal)
    output = models.target(forward, caches.target, models.drafting.taps)
    keep = jnp.arange(length) < chunk.count[:, None]
    for late in (*jax.tree.leaves(output.rows)[-1:], output.tapped, *([output.hidden] if log_probs else [])):
        # Always true, which the compiler cannot know: no row is written before all contexts have been read. Where a
        # layer's rows may be written before its context is read, the compiler copies the pool first.
        keep &= ~(late.reshape(-1)[:1] > jnp.inf).any()
    caches = write_caches(models, caches, output, chunk.page_table, positions, keep)
    if not log_probs:
        return caches, no_log_probs(batch)
    return caches, log_prob_rows(models.target.logits(output.hidden), chunk.following, models.target.vocab)
