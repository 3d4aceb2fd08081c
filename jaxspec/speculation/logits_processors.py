"""What changes the target's logits before a token is chosen: biases, penalties, and a least length.

Each row of a tree stands after its own ancestors, so penalties count those drafted tokens as well as the
committed ones: a row's logits are what plain decoding would have had at that place.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.config import MAX_BIASES, SamplingParams
from jaxspec.sharding.collectives import device_index
from jaxspec.speculation.state import DecodeState
from jaxspec.speculation.tree import DraftTree


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Adjustments:
    """One row a slot; only programs of adjusted batches read it.

    Attributes:
      repetition: float32 [slots], divides (or multiplies, below 0) the logits of tokens in prompt or answer; 1 is none.
      presence: float32 [slots], subtracted once from tokens in the answer.
      frequency: float32 [slots], subtracted from tokens once for each time they are in the answer.
      min_length: int32 [slots], the first position that a stop token may have.
      bias_ids: int32 [slots, MAX_BIASES], padded with -1.
      bias: float32 [slots, MAX_BIASES], added to the logits of `bias_ids`.
      in_prompt: bool [slots, vocab / devices].
      generated: uint16 [slots, vocab / devices], how often each token is in the answer.
    """

    repetition: jax.Array
    presence: jax.Array
    frequency: jax.Array
    min_length: jax.Array
    bias_ids: jax.Array
    bias: jax.Array
    in_prompt: jax.Array
    generated: jax.Array


# The logical name of each dimension: the tables over the vocabulary are split as the logits are.
AXES = {
    name: (None, "vocab") if name in ("in_prompt", "generated") else (None,) * (2 if name.startswith("bias") else 1)
    for name in (field.name for field in dataclasses.fields(Adjustments))
}


def no_adjustments(slots: int, vocab: int) -> Adjustments:
    """Rows that change nothing, as NumPy arrays, for the host to fill in."""
    rows: dict[str, Any] = {
        "repetition": np.ones(slots, np.float32),
        "presence": np.zeros(slots, np.float32),
        "frequency": np.zeros(slots, np.float32),
        "min_length": np.zeros(slots, np.int32),
        "bias_ids": np.full((slots, MAX_BIASES), -1, np.int32),
        "bias": np.zeros((slots, MAX_BIASES), np.float32),
        "in_prompt": np.zeros((slots, vocab), bool),
        "generated": np.zeros((slots, vocab), np.uint16),
    }
    return Adjustments(**rows)


def adjustments_of(
    sampling: SamplingParams, prompt: Sequence[int], generated: Sequence[int], vocab: int
) -> Adjustments:
    """The row of one request whose answer begins with `generated`, as NumPy arrays [1, …]."""
    row = no_adjustments(1, vocab)
    row.repetition[0] = sampling.repetition_penalty
    row.presence[0] = sampling.presence_penalty
    row.frequency[0] = sampling.frequency_penalty
    row.min_length[0] = len(prompt) + sampling.min_tokens
    for place, (token, bias) in enumerate(sampling.logit_bias):
        row.bias_ids[0, place], row.bias[0, place] = token, bias
    row.in_prompt[0, prompt] = True
    np.add.at(np.asarray(row.generated[0]), generated, 1)
    return row


def adjust(logits: jax.Array, tree: DraftTree, state: DecodeState, adjustments: Adjustments, split: bool) -> jax.Array:
    """Logits with biases, then a least length, then penalties, in the order that vLLM has them.

    Args:
      logits: float32 [batch, rows, vocab / devices], of the rows of `tree`.
      adjustments: the rows of the same batch.
      split: whether each device holds a part of the vocabulary.
    """
    local = logits.shape[-1]
    batch, rows = np.ogrid[: logits.shape[0], : logits.shape[1]]
    batch, rows = batch[..., None], rows[..., None]
    bias_ids = _local_ids(adjustments.bias_ids, local, split)[:, None]
    logits = logits.at[batch, rows, bias_ids].add(adjustments.bias[:, None], mode="drop")

    # The token after a row at depth d has position length + d + 1.
    early = state.length[:, None] + tree.depths + 1 < adjustments.min_length[:, None]
    ceiling = jnp.where(early, -jnp.inf, jnp.inf)[..., None]
    logits = logits.at[batch, rows, _local_ids(state.stop_ids, local, split)[:, None]].min(ceiling, mode="drop")

    # Ancestors and the row itself; the anchor is committed and counted already.
    drafted = tree.visibility & (tree.valid & (tree.depths > 0))[:, None, :]  # [batch, rows, rows]
    counts = jnp.broadcast_to(adjustments.generated.astype(jnp.int32)[:, None], logits.shape)
    counts = counts.at[batch, rows, _local_ids(tree.tokens, local, split)[:, None]].add(
        drafted.astype(jnp.int32), mode="drop"
    )
    repetition = adjustments.repetition[:, None, None]
    seen = adjustments.in_prompt[:, None] | (counts > 0)
    logits = jnp.where(seen, jnp.where(logits > 0, logits / repetition, logits * repetition), logits)
    frequency, presence = adjustments.frequency[:, None, None], adjustments.presence[:, None, None]
    return logits - frequency * counts - presence * (counts > 0)


def everything_allowed(batch: int, rows: int) -> jax.Array:
    """The masks of a batch without grammars: no words."""
    return jnp.zeros((batch, rows, 0), jnp.uint32)


def forbid(scores: jax.Array, allowed: jax.Array, split: bool) -> jax.Array:
    """Leaves out the tokens that a grammar forbids.

    Args:
      scores: float32 [batch, rows, vocab / devices].
      allowed: uint32 [batch, rows, words], a bit for each token of the whole vocabulary, or no words.
    """
    if not allowed.shape[-1]:
        return scores
    local = scores.shape[-1]
    tokens = device_index(split) * local + jnp.arange(local)
    bits = jnp.take(allowed, tokens // 32, axis=-1) >> (tokens % 32).astype(jnp.uint32)
    return jnp.where(bits & 1, scores, -jnp.inf)


def take_rows(adjustments: Adjustments, slots: jax.Array) -> Adjustments:
    """The rows of `slots`, int32 [batch]; what a slot past the last gives is not used."""
    return jax.tree.map(lambda column: column.at[slots].get(mode="clip"), adjustments)


def put_row(adjustments: Adjustments, slot: jax.Array, row: Adjustments) -> Adjustments:
    """Replaces the row of `slot`, int32 [1], by that of `row`."""
    return jax.tree.map(lambda column, new: column.at[slot].set(new), adjustments, row)


def count_tokens(
    adjustments: Adjustments, slots: jax.Array, tokens: jax.Array, count: jax.Array, split: bool
) -> Adjustments:
    """Adds the first `count` of a round's tokens, int32 [batch, depth + 1], to the answers of `slots`."""
    generated = adjustments.generated
    ids = _local_ids(tokens, generated.shape[-1], split)
    kept = (jnp.arange(tokens.shape[1]) < count[:, None]).astype(generated.dtype)
    return dataclasses.replace(adjustments, generated=generated.at[slots[:, None], ids].add(kept, mode="drop"))


def _local_ids(ids: jax.Array, local: int, split: bool) -> jax.Array:
    """Places of global ids in this device's part of the vocabulary; `local`, which is dropped, for those elsewhere."""
    places = ids - device_index(split) * local
    return jnp.where((ids >= 0) & (places >= 0) & (places < local), places, local)
