"""Choosing tokens: temperature, top-k, top-p, min-p, and noise that depends only on what is sampled.

A token is argmax(log p + Gumbel noise), the noise keyed by (seed, choice, absolute position) and indexed by token id.
So a position draws the same token however the passes before it were arranged: speculative and plain decoding agree
token for token, on any mesh.
"""

import enum
from collections.abc import Iterable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxspec.config import SamplingParams
from jaxspec.sharding.vocab_shard import VocabShard
from jaxspec.speculation.slot_table import SlotTable


class SamplingLevel(enum.IntEnum):
    """How a program samples; a batch runs at the highest level among its requests."""

    GREEDY = 0
    TEMPERATURE = 1
    FILTERED = 2


def level_of(params: SamplingParams) -> SamplingLevel:
    """The least level that serves one request."""
    if params.greedy:
        return SamplingLevel.GREEDY
    if params.top_k or params.top_p < 1 or params.min_p:
        return SamplingLevel.FILTERED
    return SamplingLevel.TEMPERATURE


@dataclass(frozen=True)
class SamplingMode:
    """What a program does to choose tokens.

    Attributes:
      level: how it samples.
      processed: whether logits change first (`jaxspec.speculation.logits_processors`).
      log_probs: whether the target's log-probabilities are returned.
    """

    level: SamplingLevel
    processed: bool = False
    log_probs: bool = False

    def __str__(self) -> str:
        extras = [", adjusted"] * self.processed + [", log-probs"] * self.log_probs
        return self.level.name.lower() + "".join(extras)


def mode_of(batch: Iterable[SamplingParams]) -> SamplingMode:
    """The least that serves every request of a batch."""
    batch = list(batch)
    return SamplingMode(
        level=max(level_of(params) for params in batch),
        processed=any(params.processes_logits for params in batch),
        log_probs=any(params.log_probs is not None for params in batch),
    )


def sample(
    logits: jax.Array, depths: jax.Array, slots: SlotTable, vocab: VocabShard, level: SamplingLevel, max_depth: int
) -> jax.Array:
    """The target's own next token at every row of a tree.

    Args:
      logits: float32 [batch, rows, vocab / devices]; row i stands at depth `depths[i]` after the anchor.
      depths: int32 [batch, rows], 0 to `max_depth`.
      slots: of the requests of the batch.
      vocab: the tokens that this device holds logits of.
    Returns:
      int32 [batch, rows].
    """
    if level == SamplingLevel.GREEDY:
        return vocab.argmax(logits)
    hot = (slots.temperature > 0)[:, None, None]
    scores = logits / jnp.where(hot, slots.temperature[:, None, None], 1.0)
    if level == SamplingLevel.FILTERED:
        scores = jnp.where(hot & ~kept(scores, slots, vocab), -jnp.inf, scores)
    # The token after a row at depth d has position length + d + 1. Rows of equal depth share their noise: at most one
    # of them is on the accepted path.
    positions = slots.length[:, None] + 1 + jnp.arange(max_depth + 1)
    noise = gumbel_noise(slots.seed, slots.choice, positions, vocab)
    noise = jnp.take_along_axis(noise, depths[..., None], axis=1)  # [batch, rows, vocab / devices]
    return vocab.argmax(scores + jnp.where(hot, noise, 0.0))


def gumbel_noise(seed: jax.Array, choice: jax.Array, positions: jax.Array, vocab: VocabShard) -> jax.Array:
    """Standard Gumbel noise of every token at every position.

    Args:
      seed: uint32 [batch].
      choice: int32 [batch].
      positions: int32 [batch, positions].
      vocab: the tokens of this device.
    Returns:
      float32 [batch, positions, vocab / devices], this device's part of one mesh-independent table.
    """

    def one(seed: jax.Array, choice: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), choice), position)
        return vocab.gumbel_noise(key)

    return jax.vmap(jax.vmap(one, (None, None, 0)))(seed, choice, positions)


def kept(scores: jax.Array, slots: SlotTable, vocab: VocabShard) -> jax.Array:
    """Which tokens survive top-k, then top-p, then min-p; equal scores are kept or dropped together.

    Args:
      scores: float32 [batch, rows, vocab / devices], logits over temperature.
    Returns:
      bool of the same shape.
    """
    order = _ordered_bits(scores)
    top_k = slots.top_k[:, None]
    kth = _largest_threshold(order, jnp.ones_like(scores), top_k.astype(jnp.float32), vocab)
    keep = (top_k == 0)[..., None] | (order >= kth[..., None])

    peak = vocab.max(scores.max(-1))[..., None]
    mass = jnp.where(keep, jnp.exp(scores - peak), 0.0)
    top_p = slots.top_p[:, None]
    wanted = top_p * vocab.sum(mass.sum(-1))
    nucleus = _largest_threshold(order, mass, wanted, vocab)
    keep &= (top_p >= 1)[..., None] | (order >= nucleus[..., None])
    return keep & (jnp.exp(scores - peak) >= slots.min_p[:, None, None])


def _ordered_bits(x: jax.Array) -> jax.Array:
    """float32 → uint32 in the same order."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _largest_threshold(order: jax.Array, weights: jax.Array, wanted: jax.Array, vocab: VocabShard) -> jax.Array:
    """The largest t for which the tokens with order >= t weigh at least `wanted`, uint32 [batch, rows].

    A search over the 32 bits of t: exact, no sort, and over a split vocabulary only sums travel.
    """

    def refine(step: jax.Array, threshold: jax.Array) -> jax.Array:
        trial = threshold | (jnp.uint32(1 << 31) >> step.astype(jnp.uint32))
        above = jnp.where(order >= trial[..., None], weights, 0.0).sum(-1)
        return jnp.where(vocab.sum(above) >= wanted, trial, threshold)

    return jax.lax.fori_loop(0, 32, refine, jnp.zeros(order.shape[:-1], jnp.uint32))
