"""One device's part of the vocabulary, and what is asked of logits that are spread over the devices.

For code that runs inside `jax.shard_map` over the mesh axis `tensor`. Logits never travel: each device sends a few
values and ids.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxspec.sharding.collectives import device_index, max_over_devices, sum_over_devices
from jaxspec.sharding.mesh import TENSOR_AXIS

TOP_K_CHUNK = 1024


@dataclass(frozen=True)
class VocabShard:
    """The tokens that a device holds logits of.

    Attributes:
      size: tokens of the whole vocabulary.
      split: whether each device holds an equal part of them, in the order of their ids; otherwise each holds all.
    """

    size: int
    split: bool

    @property
    def local(self) -> int:
        """Tokens of one device."""
        return self.size // jax.lax.axis_size(TENSOR_AXIS) if self.split else self.size

    @property
    def first(self) -> jax.Array:
        """The id of this device's first token, int32 []."""
        return device_index(self.split) * self.local

    def places(self, ids: jax.Array) -> jax.Array:
        """Places of token ids among this device's logits; `local`, past the last, for those elsewhere."""
        places = ids - self.first
        return jnp.where((ids >= 0) & (places >= 0) & (places < self.local), places, self.local)

    def sum(self, x: jax.Array) -> jax.Array:
        """Adds what each device found for its own tokens."""
        return sum_over_devices(x, self.split)

    def max(self, x: jax.Array) -> jax.Array:
        """The largest of what each device found for its own tokens."""
        return max_over_devices(x, self.split)

    def log_sum_exp(self, logits: jax.Array) -> jax.Array:
        """log Σ exp over the whole vocabulary; `logits` float32 [..., vocab / devices] → float32 [...]."""
        peak = self.max(jax.lax.stop_gradient(logits.max(-1)))
        return peak + jnp.log(self.sum(jnp.exp(logits - peak[..., None]).sum(-1)))

    def argmax(self, scores: jax.Array) -> jax.Array:
        """The id of the largest score, ties to the lower id; [..., vocab / devices] → int32 [...]."""
        local = jnp.argmax(scores, axis=-1).astype(jnp.int32)
        if not self.split:
            return local
        best = jnp.take_along_axis(scores, local[..., None], axis=-1)[..., 0]
        ids = local + device_index(True) * scores.shape[-1]
        best = jax.lax.all_gather(best, TENSOR_AXIS)  # [devices, ...]
        ids = jax.lax.all_gather(ids, TENSOR_AXIS)
        winner = jnp.argmax(best, axis=0)
        return jnp.take_along_axis(ids, winner[None], axis=0)[0]

    def top_k(self, logits: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
        """The k largest logits of the whole vocabulary and their ids, ties to the lower id.

        Args:
          logits: float32 [..., vocab / devices].
        Returns:
          values float32 [..., k] descending, ids int32 [..., k].
        """
        local = logits.shape[-1]
        values, ids = _local_top_k(logits, min(k, local))
        ids = ids.astype(jnp.int32) + device_index(self.split) * local
        if not self.split:
            return values, ids
        # Device-major order is id order among equals, so a stable top-k keeps the lower id first.
        values = jax.lax.all_gather(values, TENSOR_AXIS, axis=values.ndim - 1, tiled=True)
        ids = jax.lax.all_gather(ids, TENSOR_AXIS, axis=ids.ndim - 1, tiled=True)
        values, places = jax.lax.top_k(values, k)
        return values, jnp.take_along_axis(ids, places, axis=-1)

    def at(self, logits: jax.Array, ids: jax.Array) -> jax.Array:
        """The logits of `ids`, int32 [...], the same on every device; `logits` [..., vocab / devices] → [...]."""
        places = ids - self.first
        own = (places >= 0) & (places < self.local)
        found = jnp.take_along_axis(logits, jnp.clip(places, 0, self.local - 1)[..., None], axis=-1)[..., 0]
        return self.sum(jnp.where(own, found, 0.0))

    def gumbel_noise(self, key: jax.Array) -> jax.Array:
        """Standard Gumbel noise of this device's tokens, a part of one table that does not depend on the mesh.

        Args:
          key: of `jax.random`.
        Returns:
          float32 [vocab / devices].
        """
        table = jax.random.gumbel(key, (self.size,), jnp.float32)
        return jax.lax.dynamic_slice_in_dim(table, self.first, self.local) if self.split else table


def _local_top_k(logits: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """`lax.top_k`, in two stages where a row is long: a GPU gives each row to one block of threads."""
    vocab = logits.shape[-1]
    if k > TOP_K_CHUNK // 16 or vocab <= 4 * TOP_K_CHUNK:
        return jax.lax.top_k(logits, k)
    padded = jnp.pad(logits, [(0, 0)] * (logits.ndim - 1) + [(0, -vocab % TOP_K_CHUNK)], constant_values=-jnp.inf)
    chunks = padded.reshape(*logits.shape[:-1], -1, TOP_K_CHUNK)
    values, ids = jax.lax.top_k(chunks, k)  # [..., chunks, k]
    ids += TOP_K_CHUNK * jnp.arange(chunks.shape[-2])[:, None]
    # Chunks stand in the order of their ids, so among equals the lower id still comes first.
    values, places = jax.lax.top_k(values.reshape(*logits.shape[:-1], -1), k)
    return values, jnp.take_along_axis(ids.reshape(*logits.shape[:-1], -1), places, axis=-1)
