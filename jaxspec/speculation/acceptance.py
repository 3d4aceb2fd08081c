"""Following the target's own tokens down the tree."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxspec.speculation.slot_table import SlotTable
from jaxspec.speculation.tree import DraftTree


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ConfirmedPath:
    """The nodes of a tree that the target confirms.

    Attributes:
      nodes: int32 [batch, depth + 1], rows of the tree from the root down; past `length` it repeats the root.
      length: int32 [batch], drafted tokens confirmed.
      tokens: int32 [batch, depth + 1], the confirmed tokens, then the bonus token at index `length`.
    """

    nodes: jax.Array
    length: jax.Array
    tokens: jax.Array


def confirm(tree: DraftTree, predicted: jax.Array, max_depth: int) -> ConfirmedPath:
    """Takes the longest path on which every node is the token that the target chose at its parent.

    Sampling at a node and following the child that matches is lossless for any law of the target, and no verifier of
    deterministic candidates accepts more; the token that matches no child is the bonus (arXiv 2604.12989, section 4).

    Args:
      predicted: int32 [batch, nodes + 1], the target's token after each row, greedy or sampled.
      max_depth: L, the deepest a node can be.
    """
    expected = jnp.take_along_axis(predicted, tree.parents, axis=1)
    matches = tree.valid & ((tree.tokens == expected) | (tree.depths == 0))
    # Siblings hold distinct tokens, so the nodes whose whole ancestry matches form one path.
    confirmed = (matches[:, None, :] | ~tree.visibility).all(-1)  # [batch, nodes + 1]
    at_depth = confirmed[:, None, :] & (tree.depths[:, None, :] == jnp.arange(max_depth + 1)[:, None])
    path = jnp.argmax(at_depth, axis=-1).astype(jnp.int32)  # [batch, depth + 1]
    length = at_depth.any(-1).sum(-1).astype(jnp.int32) - 1
    # Row i + 1 of the path holds the token that the target chose at row i; after the last one comes the bonus.
    return ConfirmedPath(nodes=path, length=length, tokens=jnp.take_along_axis(predicted, path, axis=1))


def emitted_tokens(slots: SlotTable, path: ConfirmedPath, live: jax.Array) -> tuple[jax.Array, jax.Array]:
    """How many of a path's tokens count, and whether the request ends with them.

    Args:
      slots: of the requests of the batch.
      live: bool [batch], slots that ran.
    Returns:
      count int32 [batch], 0 where not live; finished bool [batch].
    """
    places = jnp.arange(path.tokens.shape[1])
    offered = jnp.minimum(path.length + 1, slots.remaining)
    stops = (path.tokens[..., None] == slots.stop_ids[:, None, :]).any(-1) & (places < offered[:, None])
    stopped = stops.any(-1)
    count = jnp.where(stopped, jnp.argmax(stops, axis=-1).astype(jnp.int32) + 1, offered)
    finished = stopped | (count >= slots.remaining)
    return jnp.where(live, count, 0), jnp.where(live, finished, slots.finished)
