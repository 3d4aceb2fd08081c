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
from jaxspec.model.layers.batch import ForwardOutput
from jaxspec.model.layers.cache import RowSpec, pool_spec
from jaxspec.sharding.layout import Layout
from jaxspec.speculation.drafting import Drafting, MakeDrafting, no_drafting
from jaxspec.speculation.log_probs import LogProbRows
from jaxspec.speculation.logits_processors import AXES, Adjustments, put_row
from jaxspec.speculation.round import Caches, RoundResult, decode_round, draft_tree, prefill, settle, verify
from jaxspec.speculation.sampling import SamplingWork
from jaxspec.speculation.state import DecodeState, put_slots, take_slots
from jaxspec.speculation.tree import DraftTree

REPLICATED = PartitionSpec()

# Lets independent kernels of a CUDA graph overlap, instead of running one after another. Measured on an H200: a plain
# step got faster (Qwen3-8B's shape 6.1 to 5.5 ms, a share of Kimi K2.6 14.2 to 8.6 ms), rounds with a drafter slower.
PLAIN_GPU_OPTIONS: dict[str, str | bool] = {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"}


@dataclass(frozen=True)
class DecodeShape:
    """What a decode program is compiled for: live slots, pages of context, and how it drafts and samples."""

    batch: int
    pages: int
    work: SamplingWork
    speculation: SpeculationConfig

    def __str__(self) -> str:
        return f"decode {self.batch} slot(s), {self.pages} pages, N={self.speculation.budget}, {self.work}"


@dataclass(frozen=True)
class PrefillShape:
    """What a prefill program is compiled for."""

    batch: int
    pages: int
    chunk: int
    log_probs: bool = False

    def __str__(self) -> str:
        extra = ", log-probs" if self.log_probs else ""
        return f"prefill {self.batch} slot(s), {self.pages} pages, {self.chunk} tokens{extra}"


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
        # New rows are split as the pools are that they go to, but for pages whose rows are split.
        layout = self.target.layout
        rows = jax.tree.map(
            lambda row: layout.spec((None, None, *row.axes)),
            self.target.cache_rows,
            is_leaf=lambda node: isinstance(node, RowSpec),
        )
        self.output_specs = ForwardOutput(REPLICATED, REPLICATED, rows, REPLICATED)  # type: ignore[arg-type]
        self._adjustment_specs = Adjustments(**{name: self.target.layout.spec(axes) for name, axes in AXES.items()})

    def decode(self, shape: DecodeShape, *arguments: Any) -> tuple[Caches, DecodeState, Adjustments, RoundResult]:
        """Runs `rounds_per_call` rounds; results have a leading axis of rounds.

        Args:
          arguments: caches, state, adjustments (all donated), slots int32 [batch], page_table int32 [batch, pages],
            capacity int32 [batch].
        """
        return self._call(shape, self._decode_body(shape), 3, arguments)

    def draft(self, shape: DecodeShape, *arguments: Any) -> DraftTree:
        """The first part of a round that waits for the host's masks.

        Args:
          arguments: caches, state, slots int32 [batch], page_table int32 [batch, pages]; none is donated.
        """
        return self._call(("draft", shape), self._draft_body(shape), 0, arguments)[0]

    def verify(self, shape: DecodeShape, *arguments: Any) -> ForwardOutput:
        """The second part: the target's pass.

        Args:
          arguments: those of `draft`, and the tree.
        """
        return self._call(("verify", shape), self._verify_body(shape), 0, arguments, self.output_specs)[0]

    def settle(self, shape: DecodeShape, *arguments: Any) -> tuple[Caches, DecodeState, Adjustments, RoundResult]:
        """The last part.

        Args:
          arguments: those of `decode`, the tree, the target's output, and masks uint32 [batch, rows, words].
        """
        return self._call(("settle", shape), self._settle_body(shape), 3, arguments)

    def prefill(self, shape: PrefillShape, *arguments: Any) -> tuple[Caches, LogProbRows]:
        """Processes one chunk of prompt for each row.

        Args:
          arguments: caches (donated), tokens int32 [batch, chunk], start int32 [batch], count int32 [batch],
            page_table int32 [batch, pages], following int32 [batch, chunk].
        """
        return self._call(shape, self._prefill_body(shape), 1, arguments)

    def admit(self, *arguments: Any) -> DecodeState:
        """Fills slots: state (donated), slots int32 [n], their rows as a `DecodeState`."""
        return self._call(
            "admit", lambda leaves, state, slots, rows: (put_slots(state, slots, rows), ()), 1, arguments
        )[0]

    def adjust(self, *arguments: Any) -> Adjustments:
        """Fills one slot: adjustments (donated), slot int32 [1], its row."""
        return self._call("adjust", lambda leaves, *rest: (put_row(*rest), ()), 1, arguments)[0]

    def place(self, adjustments: Adjustments) -> Adjustments:
        """Puts the rows of all slots on the mesh, split as the logits are."""
        return jax.tree.map(
            lambda column, spec: jax.device_put(column, jax.sharding.NamedSharding(self.mesh, spec)),
            adjustments,
            self._adjustment_specs,
        )

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

        def body(leaves, caches, state, adjustments, slots, page_table, capacity):  # type: ignore[no-untyped-def]
            modules = self.modules(leaves)
            drafting = self.drafting(modules, speculation)

            def one_round(carry, _):  # type: ignore[no-untyped-def]
                caches, rows, adjustments = carry
                caches, rows, adjustments, result = decode_round(
                    modules[0],
                    drafting,
                    caches,
                    rows,
                    adjustments,
                    slots,
                    page_table,
                    capacity,
                    speculation.budget,
                    shape.work,
                )
                return (caches, rows, adjustments), result

            carry = (caches, take_slots(state, slots), adjustments)
            # A trip count of one is unrolled by the compiler; a longer loop keeps the caches in place.
            (caches, rows, adjustments), results = jax.lax.scan(one_round, carry, length=speculation.rounds_per_call)
            return caches, put_slots(state, slots, rows), adjustments, results

        return body

    def _draft_body(self, shape: DecodeShape) -> Callable[..., Any]:
        def body(leaves, caches, state, slots, page_table):  # type: ignore[no-untyped-def]
            drafting = self.drafting(self.modules(leaves), shape.speculation)
            return (draft_tree(drafting, caches, take_slots(state, slots), page_table, shape.speculation.budget),)

        return body

    def _verify_body(self, shape: DecodeShape) -> Callable[..., Any]:
        def body(leaves, caches, state, slots, page_table, tree):  # type: ignore[no-untyped-def]
            modules = self.modules(leaves)
            drafting = self.drafting(modules, shape.speculation)
            return (verify(modules[0], drafting, caches, take_slots(state, slots), page_table, tree),)

        return body

    def _settle_body(self, shape: DecodeShape) -> Callable[..., Any]:
        def body(leaves, caches, state, adjustments, slots, page_table, capacity, tree, output, allowed):  # type: ignore[no-untyped-def]
            modules = self.modules(leaves)
            drafting = self.drafting(modules, shape.speculation)
            depth = drafting.depth if shape.speculation.budget else 0
            caches, rows, adjustments, result = settle(
                modules[0],
                drafting,
                caches,
                take_slots(state, slots),
                adjustments,
                slots,
                page_table,
                capacity,
                tree,
                output,
                allowed,
                depth,
                shape.work,
            )
            results = jax.tree.map(lambda array: array[None], result)  # one round
            return caches, put_slots(state, slots, rows), adjustments, results

        return body

    def _prefill_body(self, shape: PrefillShape) -> Callable[..., Any]:
        def body(leaves, caches, tokens, start, count, page_table, following):  # type: ignore[no-untyped-def]
            modules = self.modules(leaves)
            drafting = self.drafting(modules, SpeculationConfig())
            return prefill(modules[0], drafting, caches, tokens, start, count, page_table, following, shape.log_probs)

        return body

    def _call(
        self, key: Any, body: Callable[..., Any], donated: int, arguments: tuple[Any, ...], results: Any = REPLICATED
    ) -> Any:
        if key not in self.compiled:
            self.compiled[key] = self._compile(key, body, donated, arguments, results)
        return self.compiled[key](self.leaves, *arguments)

    def _compile(
        self, key: Any, body: Callable[..., Any], donated: int, arguments: tuple[Any, ...], results: Any
    ) -> Any:
        began = time.perf_counter()
        split = {
            Caches: self._cache_specs,
            Adjustments: self._adjustment_specs,
            ForwardOutput: self.output_specs,
        }
        specs = tuple(split.get(type(argument), REPLICATED) for argument in arguments)
        in_specs = (self._leaf_specs, *specs)
        # Every program returns what was donated to it, and then its results.
        out_specs = (*specs[:donated], results)
        # Replicated outputs are equal on all devices by construction; the checker cannot see that of gathered ones.
        program = jax.shard_map(body, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
        jitted = jax.jit(program, donate_argnums=tuple(range(1, 1 + donated)))
        plain = isinstance(key, DecodeShape) and self.drafter is None
        name = " of ".join(map(str, key)) if isinstance(key, tuple) else str(key)
        self.compiling = name
        try:
            compiled = jitted.lower(self.leaves, *arguments).compile(
                compiler_options=compiler_options(self.mesh, plain)
            )
        finally:
            self.compiling = None
        self.report(f"compiled {name} in {time.perf_counter() - began:.1f} s")
        return compiled


def _pool_specs(rows: tuple[tuple[RowSpec, ...], ...], layout: Layout) -> Any:
    return tuple(tuple(pool_spec(row, layout) for row in layer) for layer in rows)


def compiler_options(mesh: jax.sharding.Mesh, plain: bool) -> dict[str, str | bool]:
    """XLA's options, beside the defaults, for a program of a mesh that decodes without a drafter, or another."""
    return PLAIN_GPU_OPTIONS if plain and mesh.devices.flat[0].platform == "gpu" else {}


def replicate(tree: Any, mesh: jax.sharding.Mesh) -> Any:
    """Puts host arrays on every device of the mesh."""
    return jax.device_put(tree, jax.sharding.NamedSharding(mesh, REPLICATED))
