"""Bytes: what weights and a cache need, what is there, and the cache that fits."""

import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxspec.config import EngineConfig
from jaxspec.model.families.dflash import DFlashDrafter
from jaxspec.model.families.protocols import Drafter, Target
from jaxspec.sharding.arithmetic import cdiv


def cache_bytes_per_token(target: Target, drafter: Drafter | None) -> int:
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


def wanted_context(config: EngineConfig, limit: int) -> int:
    """Tokens that a request may reach, of models that know `limit`; raises ValueError where more are wanted."""
    wanted = config.max_context or limit
    if wanted > limit:
        raise ValueError(f"EngineConfig.max_context: found {wanted}, expected at most the models' {limit}")
    return wanted


def max_context(config: EngineConfig, target: Target, drafter: Drafter | None) -> int:
    """Tokens that a request may reach; raises ValueError where more are wanted than the models know."""
    limit = target.config.max_position_embeddings
    if isinstance(drafter, DFlashDrafter):
        limit = min(limit, drafter.config.max_position_embeddings)
    return wanted_context(config, limit)


def page_count(
    config: EngineConfig, context: int, target: Target, drafter: Drafter | None, mesh: jax.sharding.Mesh
) -> int:
    """Pages of the cache: as many as wanted, or, where the caller did not say how many, as many as fit.

    Args:
      context: tokens that a request may reach.

    Raises:
      ValueError: with the numbers, where they do not fit, or not one request of `context` does.
    """
    tokens = config.cache_tokens or config.slots * context
    pages = cdiv(tokens, config.page_size)
    page_bytes = config.page_size * cache_bytes_per_token(target, drafter)
    free = available_bytes(mesh)
    if free is None:
        return pages
    weights = sum(weight_bytes(target).values()) + (0 if drafter is None else sum(weight_bytes(drafter).values()))
    room = int(config.memory_fraction * (free + weights))
    fitting = pages_beside(room, weights, page_bytes)
    if config.cache_tokens is None and fitting >= cdiv(context, config.page_size):
        return min(pages, fitting)
    if pages > fitting:
        raise ValueError(
            f"cache_tokens: {tokens} tokens need {pages * page_bytes / 1e9:.2f} GB a device, found "
            f"{max(0, room - weights) / 1e9:.2f} GB "
            f"free within memory_fraction {config.memory_fraction:g}; lower slots, max_context or cache_tokens"
        )
    return pages


def pages_beside(room: int, weights: int, page_bytes: int) -> int:
    """Whole cache pages that fit beside `weights` bytes into the `room` bytes of a device that both may take."""
    return max(0, room - weights) // page_bytes


def weight_bytes(module: Any) -> dict[str, int]:
    """Bytes that each weight of a module, filled with arrays, takes on one device, by name."""
    paths, _ = jax.tree_util.tree_flatten_with_path(nnx.state(module, nnx.Param))
    sizes = {}
    for path, leaf in paths:
        name = ".".join(str(part.key) for part in path if hasattr(part, "key"))
        sizes[name] = math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    return sizes


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
