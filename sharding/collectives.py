"""The collectives of a forward pass, for code that runs inside `jax.shard_map` over the mesh axis `tensor`.

Each takes `split`: whether the operand really differs between devices. Where the mesh does not divide an axis every
device already holds the whole result, and nothing travels.
"""

import jax
import jax.numpy as jnp

from jaxspec.sharding.mesh import TENSOR_AXIS


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
