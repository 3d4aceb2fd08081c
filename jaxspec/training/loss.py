"""The loss that trains a DFlash drafter (arXiv 2602.06036, section 4).

From every sequence random *anchors* are drawn. Each makes a block [anchor, mask, mask, …] that sees the target's
features of the tokens before the anchor, and its own rows: what the drafter will see when it serves, so the blocks run
through the very pass that serves. The target is frozen; its tapped features are computed on the way.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.model.families.dflash import DFlashDrafter
from jaxspec.model.families.llama import LlamaForCausalLM
from jaxspec.model.layers.batch import ForwardBatch

# Anchors whose logits exist at one time: 512 blocks of 7 tokens over 49,152 ids take 0.7 GB.
HEAD_CHUNK = 512


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainingBatch:
    """Sequences, padded at the end.

    Attributes:
      tokens: int32 [batch, length].
      answer: bool [batch, length], the tokens that the target wrote; only these are labels.
    """

    tokens: jax.Array
    answer: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tally:
    """Sums over blocks, so that batches add up; float32.

    Attributes:
      loss, weight: Σ w·CE and Σ w, [].
      correct, labels: [depth], tokens guessed right by the greedy drafter, and all tokens.
      prefix, blocks: [], lengths of the all-correct beginnings of the blocks, and blocks.
    """

    loss: jax.Array
    weight: jax.Array
    correct: jax.Array
    labels: jax.Array
    prefix: jax.Array
    blocks: jax.Array

    def __add__(self, other: "Tally") -> "Tally":
        return jax.tree.map(jnp.add, self, other)

    def summary(self) -> dict[str, Any]:
        """Loss, accuracy at each depth, and τ = 1 + mean all-correct beginning: what a greedy chain would commit."""
        host = jax.tree.map(np.asarray, jax.device_get(self))
        return {
            "loss": float(host.loss / max(host.weight, 1e-9)),
            "accuracy": [round(float(x), 5) for x in host.correct / np.maximum(host.labels, 1)],
            "tau": float(1 + host.prefix / max(host.blocks, 1)),
        }


def decay_weights(block_size: int) -> np.ndarray:
    """float32 [block_size - 1]: exp(-(k - 1) / γ) for slots k = 1, 2, …

    γ is published for three sizes, 4 for 8, 5 for 10 and 7 for 16: half the block up to 10, then on a line to 7, and 7
    beyond.
    """
    gamma = np.interp(block_size, (0, 10, 16), (0, 5, 7))
    return np.exp(-np.arange(block_size - 1) / gamma).astype(np.float32)


def sample_anchors(key: jax.Array, answer: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Draws anchors without replacement from the positions p where p and p + 1 both belong to the answer.

    Args:
      answer: bool [batch, length].
      count: anchors a sequence.
    Returns:
      positions int32 [batch, min(count, length)], ascending, and bool of the same shape: False where a sequence has
      fewer valid positions.
    """
    valid = answer & jnp.pad(answer[:, 1:], ((0, 0), (0, 1)))
    order = jnp.where(valid, jax.random.uniform(key, answer.shape), -1.0)
    drawn, anchors = jax.lax.top_k(order, min(count, answer.shape[1]))
    ascending = jnp.argsort(anchors, axis=1)
    anchors, chosen = (jnp.take_along_axis(x, ascending, axis=1) for x in (anchors, drawn >= 0))
    return anchors.astype(jnp.int32), chosen


def tapped_features(target: LlamaForCausalLM, tokens: jax.Array, taps: tuple[int, ...]) -> jax.Array:
    """The frozen target's features of whole sequences; int32 [batch, length] → [batch, length, taps * hidden]."""
    batch, length = tokens.shape
    config = target.config
    dtype = target.embed_tokens.weight.dtype
    pool = jnp.zeros((1, 1, config.num_key_value_heads, config.head_dim), dtype)  # one page, of no sequence
    causal = jnp.tril(jnp.ones((length, length), bool))
    output = target(
        ForwardBatch(
            tokens=tokens,
            positions=_positions(tokens),
            page_table=jnp.zeros((batch, 1), jnp.int32),
            context_length=jnp.zeros(batch, jnp.int32),
            visibility=jnp.broadcast_to(causal, (batch, length, length)),
        ),
        ((pool, pool),) * config.num_hidden_layers,
        taps,
    )
    return jax.lax.stop_gradient(output.tapped)


def block_hidden(
    drafter: DFlashDrafter, target: LlamaForCausalLM, tokens: jax.Array, tapped: jax.Array, anchors: jax.Array
) -> jax.Array:
    """The serving pass over every anchor's block.

    Args:
      tokens: int32 [batch, length].
      tapped: [batch, length, taps * hidden].
      anchors: int32 [batch, anchors].
    Returns:
      [batch, anchors, depth, hidden] after the final norm.
    """
    depth = drafter.config.depth
    context = drafter.context_keys_values(tapped, _positions(tokens))
    first = jnp.take_along_axis(tokens, anchors, axis=1)
    blocks = drafter.block_tokens(first.reshape(-1), depth).reshape(*anchors.shape, depth + 1)
    # Mapped over the anchors with the context held fixed: one product with the keys, of anchors * block rows.
    over_anchors = jax.vmap(drafter.hidden_after, in_axes=(1, 1, None), out_axes=1)
    return over_anchors(target.embed(blocks), anchors, context)


def drafter_loss(
    drafter: DFlashDrafter,
    target: LlamaForCausalLM,
    batch: TrainingBatch,
    tapped: jax.Array,
    anchors: jax.Array,
    chosen: jax.Array,
) -> tuple[jax.Array, Tally]:
    """Σ w·CE / Σ w over the blocks' slots 1, 2, …; slot k is to give the token k places after its anchor.

    Args:
      tapped: [batch, length, taps * hidden].
      anchors, chosen: of `sample_anchors`.
    Returns:
      the loss, float32 [], and the sums behind it.
    """
    depth = drafter.config.depth
    hidden = block_hidden(drafter, target, batch.tokens, tapped, anchors)
    places = anchors[..., None] + 1 + jnp.arange(depth)  # [batch, anchors, depth]

    def at_places(array: jax.Array, fill_value: Any) -> jax.Array:
        sequences = jnp.arange(array.shape[0])[:, None, None]
        return array.at[sequences, places].get(mode="fill", fill_value=fill_value)

    labels = at_places(batch.tokens, 0)
    counted = at_places(batch.answer, False) & chosen[..., None]
    tally = _head_tally(drafter, target, hidden, labels, counted)
    return tally.loss / jnp.maximum(tally.weight, 1e-6), tally


def _head_tally(
    drafter: DFlashDrafter, target: LlamaForCausalLM, hidden: jax.Array, labels: jax.Array, counted: jax.Array
) -> Tally:
    """The output head over a chunk of blocks at a time; the gradient computes its logits again."""
    decay = jnp.asarray(decay_weights(drafter.config.block_size))
    depth = labels.shape[-1]
    blocks = labels.size // depth
    chunk = min(HEAD_CHUNK, blocks)

    def in_chunks(array: jax.Array) -> jax.Array:  # [batch, anchors, depth, ...] → [chunks, chunk, depth, ...]
        flat = array.reshape(blocks, *array.shape[2:])
        flat = jnp.pad(flat, ((0, -blocks % chunk), *((0, 0),) * (flat.ndim - 1)))
        return flat.reshape(-1, chunk, *flat.shape[1:])

    @jax.checkpoint
    def add_chunk(total: Tally, inputs: tuple[jax.Array, ...]) -> tuple[Tally, None]:
        hidden, label, known = inputs
        logits = drafter.scaled(target.logits(hidden))  # float32 [chunk, depth, vocab]
        entropy = jax.nn.logsumexp(logits, axis=-1) - jnp.take_along_axis(logits, label[..., None], axis=-1)[..., 0]
        weights = known * decay
        right = (jnp.argmax(logits, axis=-1) == label) & known
        return total + Tally(
            loss=jnp.sum(weights * entropy),
            weight=jnp.sum(weights),
            correct=right.sum(0, dtype=jnp.float32),
            labels=known.sum(0, dtype=jnp.float32),
            prefix=jnp.cumprod(right, axis=-1).sum(dtype=jnp.float32),
            blocks=known.any(-1).sum(dtype=jnp.float32),
        ), None

    zero, each = jnp.float32(0), jnp.zeros(depth, jnp.float32)
    total, _ = jax.lax.scan(
        add_chunk, Tally(zero, zero, each, each, zero, zero), (in_chunks(hidden), in_chunks(labels), in_chunks(counted))
    )
    return total


def _positions(tokens: jax.Array) -> jax.Array:
    return jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
