"""The target's log-probabilities of the tokens that were committed, and of the most probable ones beside them.

They are the model's own: before biases, penalties and temperature.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.config import MAX_TOP_LOG_PROBS
from jaxspec.sharding import collectives


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


@dataclass(frozen=True)
class TokenLogProb:
    """One token's log-probability.

    Attributes:
      top: (token id, log-probability) of the most probable tokens, best first, as many as were asked for.
    """

    token: int
    log_prob: float
    top: tuple[tuple[int, float], ...]


def no_log_probs(batch: int) -> LogProbRows:
    """What a program returns that was not asked for any."""
    return LogProbRows(
        chosen=jnp.zeros((batch, 0), jnp.float32),
        top=jnp.zeros((batch, 0, 0), jnp.float32),
        top_ids=jnp.zeros((batch, 0, 0), jnp.int32),
    )


def log_prob_rows(logits: jax.Array, tokens: jax.Array, split: bool) -> LogProbRows:
    """Log-probabilities of `tokens`, int32 [batch, tokens], under logits float32 [batch, tokens, vocab / devices]."""
    local = logits.shape[-1]
    total = collectives.log_sum_exp(logits, split)
    places = tokens - collectives.device_index(split) * local
    own = (places >= 0) & (places < local)
    chosen = jnp.take_along_axis(logits, jnp.clip(places, 0, local - 1)[..., None], axis=-1)[..., 0]
    chosen = collectives.sum_over_devices(jnp.where(own, chosen, 0.0), split)
    vocab = local * (jax.lax.axis_size("tensor") if split else 1)
    top, top_ids = collectives.top_k(logits, min(MAX_TOP_LOG_PROBS, vocab), split)
    return LogProbRows(chosen=chosen - total, top=top - total[..., None], top_ids=top_ids)


def host_log_probs(rows: LogProbRows, row: int, tokens: Sequence[int], top: int) -> list[TokenLogProb]:
    """The first `len(tokens)` entries of one row, which lies on the host, with `top` alternatives each."""
    chosen, values, ids = (np.asarray(array[row]) for array in (rows.chosen, rows.top, rows.top_ids))
    return [
        TokenLogProb(
            token,
            float(chosen[i]),
            tuple(zip(ids[i, :top].tolist(), values[i, :top].tolist(), strict=True)),
        )
        for i, token in enumerate(tokens)
    ]
