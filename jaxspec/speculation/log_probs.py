"""The target's log-probabilities of the tokens that were committed, and of the most probable ones beside them.

They are the model's own: before biases, penalties and temperature.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxspec.config import MAX_TOP_LOG_PROBS
from jaxspec.sharding.vocab_shard import VocabShard


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LogProbRows:
    """What a program returns for each token; arrays of no columns where nobody asked.

    Attributes:
      chosen: float32 [batch, tokens], of the token itself.
      top: float32 [batch, tokens, MAX_TOP_LOG_PROBS], descending.
      top_ids: int32 [batch, tokens, MAX_TOP_LOG_PROBS].
    """

    chosen: jax.Array
    top: jax.Array
    top_ids: jax.Array


def no_log_probs(batch: int) -> LogProbRows:
    """What a program returns that was not asked for any."""
    return LogProbRows(
        chosen=jnp.zeros((batch, 0), jnp.float32),
        top=jnp.zeros((batch, 0, 0), jnp.float32),
        top_ids=jnp.zeros((batch, 0, 0), jnp.int32),
    )


def log_prob_rows(logits: jax.Array, tokens: jax.Array, vocab: VocabShard) -> LogProbRows:
    """Log-probabilities of `tokens`, int32 [batch, tokens], under logits float32 [batch, tokens, vocab / devices]."""
    total = vocab.log_sum_exp(logits)
    chosen = vocab.at(logits, tokens)
    top, top_ids = vocab.top_k(logits, min(MAX_TOP_LOG_PROBS, vocab.size))
    return LogProbRows(chosen=chosen - total, top=top - total[..., None], top_ids=top_ids)
