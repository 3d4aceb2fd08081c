"""Modules as compiled programs take them: a flat tuple of arrays, and the way back to a module."""

from typing import Any

import jax
from flax import nnx


class FlatModule:
    """A module filled with arrays, apart as its leaves and the rest of it.

    Args:
      module: filled with arrays; or None, which has no leaves and stays None.
      only: first parts of the names of the weights wanted; all by default. Every further one would cost the host time
        in each call.
    """

    def __init__(self, module: Any, only: tuple[str, ...] | None = None):
        self._split = None if module is None else nnx.split(module)
        paths = [] if self._split is None else jax.tree.leaves_with_path(self._split[1])
        self._wanted = [only is None or path[0].key in only for path, _ in paths]
        self.leaves: tuple[jax.Array, ...] = tuple(
            leaf for (_, leaf), wanted in zip(paths, self._wanted, strict=True) if wanted
        )

    def holding(self, leaves: tuple[jax.Array, ...]) -> Any:
        """The module again, holding `leaves`; weights that were not wanted must not be used."""
        if self._split is None:
            return None
        graph, state = self._split
        everything, tree = jax.tree.flatten(state)
        given = iter(leaves)
        pairs = zip(everything, self._wanted, strict=True)
        return nnx.merge(graph, jax.tree.unflatten(tree, [next(given) if wanted else leaf for leaf, wanted in pairs]))
