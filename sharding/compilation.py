"""Programs that one device runs, compiled for all devices of a mesh."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

REPLICATED = PartitionSpec()


def specs_of(tree: Any) -> Any:
    """How each array of `tree` is split over its mesh; what lies on the host is given to every device."""

    def spec(array: Any) -> PartitionSpec:
        sharding = getattr(array, "sharding", None)
        return sharding.spec if isinstance(sharding, NamedSharding) else REPLICATED

    return jax.tree.map(spec, tree)


def lower_on_mesh(
    body: Callable[..., Any], mesh: Mesh, arguments: tuple[Any, ...], out_specs: Any, donate: tuple[int, ...] = ()
) -> Any:
    """Traces and lowers `body`, which sees one device's part of each argument.

    Args:
      body: runs inside `jax.shard_map` over `mesh`.
      arguments: arrays, or their shapes, as the program will be called; their partition is theirs in the program.
      out_specs: how the results are split over the mesh, a tree or a prefix of one; `REPLICATED` for what is equal on
        all devices.
      donate: places of the arguments whose memory the results may take.
    Returns:
      what `jax.jit(...).lower` gives: compile it, or read it.
    """
    # Replicated results are equal on all devices by construction; the checker cannot see that of gathered ones.
    program = jax.shard_map(body, mesh=mesh, in_specs=specs_of(arguments), out_specs=out_specs, check_vma=False)
    return jax.jit(program, donate_argnums=donate).lower(*arguments)


def compile_on_mesh(
    body: Callable[..., Any],
    mesh: Mesh,
    arguments: tuple[Any, ...],
    out_specs: Any,
    donate: tuple[int, ...] = (),
    options: Mapping[str, str | bool] | None = None,
) -> Callable[..., Any]:
    """Compiles `body` for `mesh`; see `lower_on_mesh`.

    Args:
      options: of XLA, beside the defaults.
    """
    return lower_on_mesh(body, mesh, arguments, out_specs, donate).compile(compiler_options=dict(options or {}))


def replicate(tree: Any, mesh: Mesh) -> Any:
    """Puts host arrays on every device of the mesh."""
    return jax.device_put(tree, NamedSharding(mesh, REPLICATED))
