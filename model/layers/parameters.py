"""Weights of a module: how they are declared, and how a module is filled with arrays.

Modules are built abstractly (shapes only) and filled leaf by leaf, so a model is never held twice. A weight's name is
its path in the module, which is the checkpoint's tensor name: `layers.0.self_attn.q_proj.weight`.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

Module = TypeVar("Module", bound=nnx.Module)


@dataclass(frozen=True)
class WeightSpec:
    """One weight: global shape, dtype and the logical name of each dimension (None where it is never split)."""

    name: str
    shape: tuple[int, ...]
    dtype: jnp.dtype
    axes: tuple[str | None, ...]


def weight(shape: tuple[int, ...], dtype: Any, axes: tuple[str | None, ...]) -> nnx.Param:
    """Declares a weight of global `shape`; only ever run abstractly, so no memory is taken."""
    return nnx.Param(jnp.zeros(shape, dtype), logical_axes=axes)


def weight_specs(build: Callable[[], nnx.Module]) -> tuple[WeightSpec, ...]:
    """The weights of the module that `build` makes, in a fixed order."""
    return declared(build)[1]


def declared(build: Callable[[], Module]) -> tuple[Module, tuple[WeightSpec, ...]]:
    """The module that `build` makes, with shapes in the place of arrays, and its weights."""
    module, leaves = _abstract_leaves(build)
    return module, tuple(spec for _, spec in leaves)


def fill(build: Callable[[], Module], leaf: Callable[[WeightSpec], jax.Array]) -> Module:
    """Builds a module and asks `leaf` for each of its weights."""
    abstract, leaves = _abstract_leaves(build)
    graph, state = nnx.split(abstract)
    flat = dict(nnx.to_flat_state(state))
    filled = {path: flat[path].replace(leaf(spec)) for path, spec in leaves}
    return nnx.merge(graph, nnx.from_flat_state(filled))


def _abstract_leaves(build: Callable[[], Module]) -> tuple[Module, Iterable[tuple[tuple, WeightSpec]]]:
    abstract = nnx.eval_shape(build)
    flat = nnx.to_flat_state(nnx.state(abstract, nnx.Param))
    leaves = []
    for path, param in flat:
        value = param.get_value()
        name = ".".join(str(part) for part in path)
        leaves.append((path, WeightSpec(name, value.shape, value.dtype, param.get_metadata("logical_axes"))))
    return abstract, leaves
