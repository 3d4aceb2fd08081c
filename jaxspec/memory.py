"""Bytes: what a cache needs and what is there."""

import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx


def cache_bytes_per_token(target: Any, drafter: Any) -> int:
    """Bytes that one token of context takes on one device, in the target's cache and the drafter's."""
    total = 0
    for module in (target, drafter):
        if module is None:
            continue
        for layer in module.cache_rows:
            for row in layer:
                shares = [module.layout.shares(axis) for axis in ("page_rows", *row.axes) if axis]
                itemsize = jnp.dtype(target.embed_tokens.weight.dtype).itemsize
                total += int(np.prod(row.shape)) * itemsize // max(shares)
    return total


def weight_bytes(*modules: Any) -> int:
    """Bytes of weights that the modules, filled with arrays, hold on each device."""
    leaves = [leaf for module in modules for leaf in jax.tree.leaves(nnx.state(module, nnx.Param))]
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)


def available_bytes(mesh: jax.sharding.Mesh) -> int | None:
    """Free memory of the fullest device; each device's share of the host's where they are CPUs; None if unknown."""
    if mesh.devices.flat[0].platform != "cpu":
        statistics = [device.memory_stats() for device in mesh.devices.flat]
        if not all(statistics):
            return None
        return min(s["bytes_limit"] - s["bytes_in_use"] for s in statistics)
    information = Path("/proc/meminfo")
    if not information.exists():
        return None
    for line in information.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024 // mesh.size
    return None
