"""The collectives of a forward pass, for code that runs inside `jax.shard_map` over the mesh axis `tensor`.

Each takes `split`: whether the operand really differs between devices. Where the mesh does not divide an axis every
device already holds the whole result, and nothing travels.
"""

import jax
import jax.numpy as jnp

from jaxspec.sharding.mesh import TENSOR_AXIS

TOP_K_CHUNK = 1024


def device_index(split: bool) -> jax.Array:
    """This device's place along the mesh axis, int32 []; 0 where nothing is split."""
    return jax.lax.axis_index(TENSOR_AXIS) if split else jnp.int32(0)


def sum_over_devices(x: jax.Array, split: bool) -> jax.Array:
    """Adds the devices' partial results of a row-parallel product."""
    return jax.lax.psum(x, TENSOR_AXIS) if split else x


def gather_over_devices(x: jax.Array, axis: int, split: bool) -> jax.Array:
    """Joins the devices' parts of `x` along `axis`."""
    return jax.lax.all_gather(x, TENSOR_AXIS, axis=axis, tiled=True) if split else x


def sum_to_owners(x: jax.Array, axis: int, split: bool) -> jax.Array:
    """Adds the devices' partial results, each device keeping its own part along `axis` (all of it, if not `split`)."""
    if not split:
        return jax.lax.psum(x, TENSOR_AXIS)
    return jax.lax.psum_scatter(x, TENSOR_AXIS, scatter_dimension=axis, tiled=True)


def max_over_devices(x: jax.Array, split: bool) -> jax.Array:
    """The element-wise maximum over the devices."""
    return jax.lax.pmax(x, TENSOR_AXIS) if split else x


def log_sum_exp(logits: jax.Array, split: bool) -> jax.Array:
    """log Σ exp over the whole vocabulary; `logits` float32 [..., vocab / devices] → float32 [...]."""
    peak = max_over_devices(jax.lax.stop_gradient(logits.max(-1)), split)
    return peak + jnp.log(sum_over_devices(jnp.exp(logits - peak[..., None]).sum(-1), split))


def top_k(logits: jax.Array, k: int, split: bool) -> tuple[jax.Array, jax.Array]:
    """The k largest logits of the whole vocabulary and their global ids, ties to the lower id.

    Each device sends k values and ids, never its logits.

    Args:
      logits: float32 [..., vocab / devices].
    Returns:
      values float32 [..., k] descending, ids int32 [..., k].
    """
    local = logits.shape[-1]
    values, ids = _local_top_k(logits, min(k, local))
    ids = ids.astype(jnp.int32) + device_index(split) * local
    if not split:
        return values, ids
    # Device-major order is id order among equals, so a stable top-k keeps the lower id first.
    values = jax.lax.all_gather(values, TENSOR_AXIS, axis=values.ndim - 1, tiled=True)
    ids = jax.lax.all_gather(ids, TENSOR_AXIS, axis=ids.ndim - 1, tiled=True)
    values, places = jax.lax.top_k(values, k)
    return values, jnp.take_along_axis(ids, places, axis=-1)


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


def argmax(scores: jax.Array, split: bool) -> jax.Array:
    """The global id of the largest score, ties to the lower id; [..., vocab / devices] → int32 [...]."""
    local = jnp.argmax(scores, axis=-1).astype(jnp.int32)
    if not split:
        return local
    best = jnp.take_along_axis(scores, local[..., None], axis=-1)[..., 0]
    ids = local + device_index(split) * scores.shape[-1]
    best = jax.lax.all_gather(best, TENSOR_AXIS)  # [devices, ...]
    ids = jax.lax.all_gather(ids, TENSOR_AXIS)
    winner = jnp.argmax(best, axis=0)
    return jnp.take_along_axis(ids, winner[None], axis=0)[0]
