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


def jit_on_mesh(
    body: Callable[..., Any], mesh: Mesh, in_specs: Any, out_specs: Any, donate: tuple[int, ...] = ()
) -> Any:
    """`jax.jit` of what each device of `mesh` runs: `body` sees one device's part of each argument.

    Args:
      in_specs, out_specs: how arguments and results are split over the mesh, a tree or a prefix of one; `REPLICATED`
        for what is equal on all devices.
      donate: places of the arguments whose memory the results may take.
    """
    # Replicated results are equal on all devices by construction; the checker cannot see that of gathered ones.
    program = jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return jax.jit(program, donate_argnums=donate)


def lower_on_mesh(
    body: Callable[..., Any], mesh: Mesh, arguments: tuple[Any, ...], out_specs: Any, donate: tuple[int, ...] = ()
) -> Any:
    """Lowers `jit_on_mesh` of `body` for these very arguments, arrays on the mesh or on the host.

    Returns:
      what `jax.jit(...).lower` gives: compile it, or read it.
    """
    return jit_on_mesh(body, mesh, specs_of(arguments), out_specs, donate).lower(*arguments)


def compile_on_mesh(
    body: Callable[..., Any],
    mesh: Mesh,
    arguments: tuple[Any, ...],
    out_specs: Any,
    donate: tuple[int, ...] = (),
    options: Mapping[str, str | bool] | None = None,
) -> Callable[..., Any]:
    """Compiles `body` for these very arguments; see `jit_on_mesh`.

    Args:
      options: of XLA, beside the defaults.
    """
    return lower_on_mesh(body, mesh, arguments, out_specs, donate).compile(compiler_options=dict(options or {}))


def replicate(tree: Any, mesh: Mesh) -> Any:
    """Puts host arrays on every device of the mesh."""
    return jax.device_put(tree, NamedSharding(mesh, REPLICATED))
