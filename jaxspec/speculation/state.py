"""What the device knows of every slot between calls."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.config import MAX_BUDGET


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeState:
    """One row a slot.

    Attributes:
      anchor: int32 [slots], the newest committed token; the target has not processed it yet.
      length: int32 [slots], context tokens whose rows are cached; also the anchor's position.
      remaining: int32 [slots], tokens the request may still produce.
      finished: bool [slots], stopped or at its limit.
      stop_ids: int32 [slots, MAX_STOP_IDS], padded with -1.
      temperature, top_p, min_p: float32 [slots].
      top_k: int32 [slots], 0 for all.
      budget: int32 [slots], tree nodes that count, at most.
      seed: uint32 [slots]; with `choice` and the token's position it keys the noise.
      choice: int32 [slots].
    """

    anchor: jax.Array
    length: jax.Array
    remaining: jax.Array
    finished: jax.Array
    stop_ids: jax.Array
    temperature: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    top_k: jax.Array
    budget: jax.Array
    seed: jax.Array
    choice: jax.Array


def empty_rows(slots: int, max_stop_ids: int) -> DecodeState:
    """Finished rows as NumPy arrays, for the host to fill in."""
    rows: dict[str, Any] = {
        "anchor": np.zeros(slots, np.int32),
        "length": np.zeros(slots, np.int32),
        "remaining": np.zeros(slots, np.int32),
        "finished": np.ones(slots, bool),
        "stop_ids": np.full((slots, max_stop_ids), -1, np.int32),
        "temperature": np.zeros(slots, np.float32),
        "top_p": np.ones(slots, np.float32),
        "min_p": np.zeros(slots, np.float32),
        "top_k": np.zeros(slots, np.int32),
        "budget": np.full(slots, MAX_BUDGET, np.int32),
        "seed": np.zeros(slots, np.uint32),
        "choice": np.zeros(slots, np.int32),
    }
    return DecodeState(**rows)


def take_slots(state: DecodeState, slots: jax.Array) -> DecodeState:
    """The rows of `slots`, int32 [batch]; a slot past the last gives a finished row."""
    rows = jax.tree.map(lambda column: column.at[slots].get(mode="clip"), state)
    return dataclasses.replace(rows, finished=rows.finished | (slots >= state.finished.shape[0]))


def put_slots(state: DecodeState, slots: jax.Array, rows: DecodeState) -> DecodeState:
    """Writes rows back; those of a slot past the last are dropped."""
    return jax.tree.map(lambda column, row: column.at[slots].set(row, mode="drop"), state, rows)


def emitted_tokens(
    state: DecodeState, tokens: jax.Array, accepted: jax.Array, live: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """How many of a round's tokens count, and whether the request ends with them.

    Args:
      tokens: int32 [batch, depth + 1], the accepted path and the bonus token after it.
      accepted: int32 [batch], accepted drafts; the bonus is at this index.
      live: bool [batch], slots that ran.
    Returns:
      count int32 [batch], 0 where not live; finished bool [batch].
    """
    places = jnp.arange(tokens.shape[1])
    offered = jnp.minimum(accepted + 1, state.remaining)
    stops = (tokens[..., None] == state.stop_ids[:, None, :]).any(-1) & (places < offered[:, None])
    stopped = stops.any(-1)
    count = jnp.where(stopped, jnp.argmax(stops, axis=-1).astype(jnp.int32) + 1, offered)
    finished = stopped | (count >= state.remaining)
    return jnp.where(live, count, 0), jnp.where(live, finished, state.finished)
