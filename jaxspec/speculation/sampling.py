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
from jaxspec.sharding import collectives
from jaxspec.speculation.state import DecodeState


class SamplingLevel(enum.IntEnum):
    """How much of the sampling work a program does; a batch runs at the highest level among its requests."""

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
class SamplingWork:
    """What a program does to choose tokens.

    Attributes:
      adjusted: whether logits change first (`jaxspec.speculation.logits_processors`).
      log_probs: whether the target's log-probabilities are returned.
    """

    level: SamplingLevel
    adjusted: bool = False
    log_probs: bool = False

    def __str__(self) -> str:
        extras = [", adjusted"] * self.adjusted + [", log-probs"] * self.log_probs
        return self.level.name.lower() + "".join(extras)


def work_of(batch: Iterable[SamplingParams]) -> SamplingWork:
    """The least work that serves every request of a batch."""
    batch = list(batch)
    return SamplingWork(
        level=max(level_of(params) for params in batch),
        adjusted=any(params.adjusted for params in batch),
        log_probs=any(params.log_probs is not None for params in batch),
    )


def sample(
    logits: jax.Array, depths: jax.Array, state: DecodeState, max_depth: int, level: SamplingLevel, split: bool
) -> jax.Array:
    """The target's own next token at every row of a tree.

    Args:
      logits: float32 [batch, rows, vocab / devices]; row i stands at depth `depths[i]` after the anchor.
      depths: int32 [batch, rows], 0 to `max_depth`.
      split: whether each device holds a part of the vocabulary.
    Returns:
      int32 [batch, rows].
    """
    if level == SamplingLevel.GREEDY:
        return collectives.argmax(logits, split)
    hot = (state.temperature > 0)[:, None, None]
    scores = logits / jnp.where(hot, state.temperature[:, None, None], 1.0)
    if level == SamplingLevel.FILTERED:
        scores = jnp.where(hot & ~kept(scores, state, split), -jnp.inf, scores)
    # The token after a row at depth d has position length + d + 1. Rows of equal depth share their noise: at most one
    # of them is on the accepted path.
    positions = state.length[:, None] + 1 + jnp.arange(max_depth + 1)
    noise = gumbel_noise(state.seed, state.choice, positions, scores.shape[-1], split)
    noise = jnp.take_along_axis(noise, depths[..., None], axis=1)  # [batch, rows, vocab / devices]
    return collectives.argmax(scores + jnp.where(hot, noise, 0.0), split)


def gumbel_noise(seed: jax.Array, choice: jax.Array, positions: jax.Array, local_vocab: int, split: bool) -> jax.Array:
    """Standard Gumbel noise of every token at every position.

    Args:
      seed: uint32 [batch].
      choice: int32 [batch].
      positions: int32 [batch, positions].
      local_vocab: vocabulary rows of one device.
    Returns:
      float32 [batch, positions, local_vocab], this device's part of one mesh-independent table.
    """

    def one(seed: jax.Array, choice: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), choice), position)
        if not split:
            return jax.random.gumbel(key, (local_vocab,), jnp.float32)
        table = jax.random.gumbel(key, (local_vocab * jax.lax.axis_size("tensor"),), jnp.float32)
        return jax.lax.dynamic_slice_in_dim(table, collectives.device_index(True) * local_vocab, local_vocab)

    return jax.vmap(jax.vmap(one, (None, None, 0)))(seed, choice, positions)


def kept(scores: jax.Array, state: DecodeState, split: bool) -> jax.Array:
    """Which tokens survive top-k, then top-p, then min-p; equal scores are kept or dropped together.

    Args:
      scores: float32 [batch, rows, vocab / devices], logits over temperature.
    Returns:
      bool of the same shape.
    """
    order = _ordered_bits(scores)
    top_k = state.top_k[:, None]
    kth = _largest_threshold(order, jnp.ones_like(scores), top_k.astype(jnp.float32), split)
    keep = (top_k == 0)[..., None] | (order >= kth[..., None])

    peak = collectives.max_over_devices(scores.max(-1), split)[..., None]
    mass = jnp.where(keep, jnp.exp(scores - peak), 0.0)
    top_p = state.top_p[:, None]
    wanted = top_p * collectives.sum_over_devices(mass.sum(-1), split)
    nucleus = _largest_threshold(order, mass, wanted, split)
    keep &= (top_p >= 1)[..., None] | (order >= nucleus[..., None])
    return keep & (jnp.exp(scores - peak) >= state.min_p[:, None, None])


def _ordered_bits(x: jax.Array) -> jax.Array:
    """float32 → uint32 in the same order."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _largest_threshold(order: jax.Array, weights: jax.Array, wanted: jax.Array, split: bool) -> jax.Array:
    """The largest t for which the tokens with order >= t weigh at least `wanted`, uint32 [batch, rows].

    A search over the 32 bits of t: exact, no sort, and over a split vocabulary only sums travel.
    """

    def refine(step: jax.Array, threshold: jax.Array) -> jax.Array:
        trial = threshold | (jnp.uint32(1 << 31) >> step.astype(jnp.uint32))
        above = jnp.where(order >= trial[..., None], weights, 0.0).sum(-1)
        return jnp.where(collectives.sum_over_devices(above, split) >= wanted, trial, threshold)

    return jax.lax.fori_loop(0, 32, refine, jnp.zeros(order.shape[:-1], jnp.uint32))
