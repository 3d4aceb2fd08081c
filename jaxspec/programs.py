"""The compiled programs of an engine: few, named, of fixed shapes.

A program is what one device runs, inside `jax.shard_map` over the mesh. Weights enter as a flat tuple and are never
donated; caches and state are donated, so a commit writes in place.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
from flax import nnx
from jax.sharding import PartitionSpec

from jaxspec.config import SpeculationConfig
from jaxspec.drafting import Drafting, MakeDrafting, no_drafting
from jaxspec.round import Caches, RoundResult, decode_round, prefill
from jaxspec.sampling import SamplingLevel
from jaxspec.state import DecodeState, put_slots, take_slots
from model.cache import RowSpec
from sharding.layout import Layout

REPLICATED = PartitionSpec()


@dataclass(frozen=True)
class DecodeShape:
    """What a decode program is compiled for: live slots, pages of context, and how it drafts and samples."""

    batch: int
    pages: int
    level: SamplingLevel
    speculation: SpeculationConfig

    def __str__(self) -> str:
        return (
            f"decode {self.batch} slot(s), {self.pages} pages, N={self.speculation.budget}, {self.level.name.lower()}"
        )


@dataclass(frozen=True)
class PrefillShape:
    """What a prefill program is compiled for."""

    batch: int
    pages: int
    chunk: int

    def __str__(self) -> str:
        return f"prefill {self.batch} slot(s), {self.pages} pages, {self.chunk} tokens"


def bucket(value: int, largest: int, smallest: int = 1) -> int:
    """The least of smallest, 4 · smallest, 16 · smallest, …, capped at `largest`, that holds `value`."""
    size = smallest
    while size < value:
        size *= 4
    return min(size, largest)


@dataclass
class Programs:
    """Compiles programs on demand and keeps them.

    Attributes:
      mesh: of every program.
      target: module filled with arrays on the mesh.
      drafter: module, or None.
      make_drafting: builds the drafting functions from the modules of one device.
      report: gets one line for each program compiled.
      compiling: the name of the program that is being compiled, else None.
    """

    mesh: jax.sharding.Mesh
    target: Any
    drafter: Any
    make_drafting: MakeDrafting
    report: Callable[[str], None] = lambda line: None
    compiled: dict[Any, Callable[..., Any]] = field(default_factory=dict)
    compiling: str | None = None

    def __post_init__(self) -> None:
        modules = (self.target,) if self.drafter is None else (self.target, self.drafter)
        split = [nnx.split(module) for module in modules]
        flat = [jax.tree.flatten(state) for _, state in split]
        self.leaves = tuple(leaf for leaves, _ in flat for leaf in leaves)
        self._leaf_specs = tuple(leaf.sharding.spec for leaf in self.leaves)
        self._rebuild = [(graph, tree, len(leaves)) for (graph, _), (leaves, tree) in zip(split, flat, strict=True)]
        self._cache_specs = Caches(
            target=_pool_specs(self.target.cache_rows, self.target.layout),
            drafter=_pool_specs(self.drafter.cache_rows, self.drafter.layout) if self.drafter is not None else (),
        )

    def decode(self, shape: DecodeShape, *arguments: Any) -> tuple[Caches, DecodeState, RoundResult]:
        """Runs `rounds_per_call` rounds; results have a leading axis of rounds.

        Args:
          arguments: caches, state (both donated), slots int32 [batch], page_table int32 [batch, pages],
            capacity int32 [batch].
        """
        return self._call(shape, self._decode_body(shape), 2, arguments)

    def prefill(self, shape: PrefillShape, *arguments: Any) -> Caches:
        """Processes one chunk of prompt for each row.

        Args:
          arguments: caches (donated), tokens int32 [batch, chunk], start int32 [batch], count int32 [batch],
            page_table int32 [batch, pages].
        """
        return self._call(shape, self._prefill_body(), 1, arguments)

    def admit(self, *arguments: Any) -> DecodeState:
        """Fills slots: state (donated), slots int32 [n], their rows as a `DecodeState`."""
        return self._call("admit", lambda leaves, state, slots, rows: put_slots(state, slots, rows), 1, arguments)

    def modules(self, leaves: tuple[jax.Array, ...]) -> list[Any]:
        """The modules again, holding `leaves`."""
        modules, taken = [], 0
        for graph, tree, count in self._rebuild:
            modules.append(nnx.merge(graph, jax.tree.unflatten(tree, leaves[taken : taken + count])))
            taken += count
        return modules

    def drafting(self, modules: list[Any], speculation: SpeculationConfig) -> Drafting:
        """The drafting functions of one device's modules."""
        if self.drafter is None:
            return no_drafting()
        length = speculation.draft_length or self.drafter.config.depth
        return self.make_drafting(modules[1], modules[0], length, speculation.top_k_cap)

    def _decode_body(self, shape: DecodeShape) -> Callable[..., Any]:
        speculation = shape.speculation

        def body(leaves, caches, state, slots, page_table, capacity):  # type: ignore[no-untyped-def]
            modules = self.modules(leaves)
            drafting = self.drafting(modules, speculation)

            def one_round(carry, _):  # type: ignore[no-untyped-def]
                caches, rows = carry
                caches, rows, result = decode_round(
                    modules[0], drafting, caches, rows, page_table, capacity, speculation.budget, shape.level
                )
                return (caches, rows), result

            carry = (caches, take_slots(state, slots))
            # A trip count of one is unrolled by the compiler; a longer loop keeps the caches in place.
            (caches, rows), results = jax.lax.scan(one_round, carry, length=speculation.rounds_per_call)
            return caches, put_slots(state, slots, rows), results

        return body

    def _prefill_body(self) -> Callable[..., Any]:
        def body(leaves, caches, tokens, start, count, page_table):  # type: ignore[no-untyped-def]
            modules = self.modules(leaves)
            drafting = self.drafting(modules, SpeculationConfig())
            return prefill(modules[0], drafting, caches, tokens, start, count, page_table)

        return body

    def _call(self, key: Any, body: Callable[..., Any], donated: int, arguments: tuple[Any, ...]) -> Any:
        if key not in self.compiled:
            self.compiled[key] = self._compile(key, body, donated, arguments)
        return self.compiled[key](self.leaves, *arguments)

    def _compile(self, key: Any, body: Callable[..., Any], donated: int, arguments: tuple[Any, ...]) -> Any:
        began = time.perf_counter()
        specs = tuple(self._cache_specs if isinstance(a, Caches) else REPLICATED for a in arguments)
        in_specs = (self._leaf_specs, *specs)
        # Every program returns what was donated to it; a decode program returns its results as well.
        out_specs = specs[0] if donated == 1 else (*specs[:2], REPLICATED)
        # Replicated outputs are equal on all devices by construction; the checker cannot see that of gathered ones.
        program = jax.shard_map(body, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
        jitted = jax.jit(program, donate_argnums=tuple(range(1, 1 + donated)))
        self.compiling = str(key)
        try:
            compiled = jitted.lower(self.leaves, *arguments).compile()
        finally:
            self.compiling = None
        self.report(f"compiled {key} in {time.perf_counter() - began:.1f} s")
        return compiled


def _pool_specs(rows: tuple[tuple[RowSpec, ...], ...], layout: Layout) -> Any:
    return tuple(tuple(layout.spec((None, None, *row.axes)) for row in layer) for layer in rows)


def replicate(tree: Any, mesh: jax.sharding.Mesh) -> Any:
    """Puts host arrays on every device of the mesh."""
    return jax.device_put(tree, jax.sharding.NamedSharding(mesh, REPLICATED))
