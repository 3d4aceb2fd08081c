"""Models of published shapes with random weights, for timing: the cost of a round does not depend on their values."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from jaxspec.benchmark.shapes import ModelPair
from jaxspec.model.families.registry import FAMILIES
from jaxspec.model.layers.cache import BITS, PagedCache, RowSpec, pool_dtype, pool_spec
from jaxspec.model.layers.parameters import WeightSpec, fill


def random_models(pair: ModelPair, mesh: Mesh, dtype: Any, seed: int = 0) -> tuple[Any, Any]:
    """Target and drafter filled with random weights on the devices of `mesh`, each made where it lies."""
    drafter = _random_module("dflash", pair.drafter, mesh, dtype, jax.random.key(seed + 1))
    return random_target(pair, mesh, dtype, seed), drafter


def random_target(pair: ModelPair, mesh: Mesh, dtype: Any, seed: int = 0) -> Any:
    """The target alone."""
    return _random_module(pair.target.family, pair.target, mesh, dtype, jax.random.key(seed))


def random_cache(module: Any, pages: int, page_size: int, mesh: Mesh, dtype: Any, seed: int = 0) -> PagedCache:
    """Pools shaped as `jaxspec.model.layers.cache.empty_cache` makes them, full of standard normal values."""
    key, made = jax.random.key(seed), itertools.count()

    def pool(spec: RowSpec) -> jax.Array:
        sharding = NamedSharding(mesh, pool_spec(spec, module.layout))
        pool_key = jax.random.fold_in(key, next(made))
        values = _normal(pool_key, (pages, page_size, *spec.shape), dtype, sharding, 0.0, 1.0)
        return jax.lax.bitcast_convert_type(values, BITS) if pool_dtype(dtype, mesh) == BITS else values

    return jax.tree.map(pool, module.cache_rows, is_leaf=lambda node: isinstance(node, RowSpec))


def _random_module(family_name: str, config: Any, mesh: Mesh, dtype: Any, key: jax.Array) -> Any:
    family = FAMILIES[family_name]
    layout, scheme = family.layout_of(config, mesh.size), family.scheme(config)
    made = itertools.count()

    def leaf(spec: WeightSpec) -> jax.Array:
        # Matrices keep the scale of what they multiply; norms stay near one, a router's biases near zero, so that its
        # choices spread over all experts.
        mean, scale = (1.0, 0.1) if len(spec.shape) == 1 else (0.0, spec.shape[-1] ** -0.5)
        if spec.name.endswith("e_score_correction_bias"):
            mean, scale = 0.0, 0.01
        elif scheme.scales and spec.name.endswith(f".{scheme.scales}"):
            mean = scheme.random_scale(config.hidden_size**-0.5)
            scale = 0.2 * mean
        elif spec.dtype.itemsize == 1:  # A scheme's small floats, whose scales follow.
            scale = 1.0
        sharding = NamedSharding(mesh, layout.spec(spec.axes))
        leaf_key = jax.random.fold_in(key, next(made))
        if spec.dtype == jnp.int32:
            return _bits_program(spec.shape, sharding)(leaf_key)
        return _normal(leaf_key, spec.shape, spec.dtype, sharding, mean, scale)

    return fill(family.build(config, mesh.size, jnp.dtype(dtype)), leaf)


def _normal(key: jax.Array, shape: tuple[int, ...], dtype: Any, sharding: Any, mean: float, scale: float) -> jax.Array:
    return _normal_program(shape, jnp.dtype(dtype), sharding)(key, mean, scale)


@functools.cache
def _normal_program(shape: tuple[int, ...], dtype: Any, sharding: Any) -> Any:
    def make(key: jax.Array, mean: jax.Array, scale: jax.Array) -> jax.Array:
        drawn = jax.random.normal(key, shape, dtype if dtype.itemsize > 1 else jnp.bfloat16)
        return (drawn * scale + mean).astype(dtype)

    return jax.jit(make, out_shardings=sharding)


@functools.cache
def _bits_program(shape: tuple[int, ...], sharding: Any) -> Any:
    def make(key: jax.Array) -> jax.Array:
        return jax.lax.bitcast_convert_type(jax.random.bits(key, shape, jnp.uint32), jnp.int32)

    return jax.jit(make, out_shardings=sharding)
