"""The compiled programs of an engine: few, named, of fixed shapes.

A program is what one device runs, inside `jax.shard_map` over the mesh. Weights enter as a flat tuple and are never
donated; the carry is, so that a commit writes in place.
"""

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import jax

from jaxspec.config import SpeculationConfig
from jaxspec.engine.modules import FlatModule
from jaxspec.model.families.protocols import Drafter, Target
from jaxspec.model.layers.batch import ForwardOutput
from jaxspec.model.layers.cache import RowSpec
from jaxspec.sharding.compilation import REPLICATED, compile_on_mesh, specs_of
from jaxspec.speculation.drafting import MakeDrafting, no_drafting
from jaxspec.speculation.log_probs import LogProbRows
from jaxspec.speculation.prefill import PromptChunk, prefill
from jaxspec.speculation.round import (
    Batch,
    Carry,
    Models,
    RoundOptions,
    RoundResult,
    Verified,
    accept,
    commit,
    decode_round,
    draft,
    verify,
)
from jaxspec.speculation.sampling import SamplingMode
from jaxspec.speculation.slot_table import COLUMNS, SlotTable, admit, put, slot_specs, take
from jaxspec.speculation.tree import DraftTree

# Lets independent kernels of a CUDA graph overlap, instead of running one after another. Measured on an H200: a plain
# step got faster (Qwen3-8B's shape 6.1 to 5.5 ms, a share of Kimi K2.6 14.2 to 8.6 ms), rounds with a drafter slower.
PLAIN_GPU_OPTIONS: dict[str, str | bool] = {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"}


@dataclass(frozen=True)
class DecodeShape:
    """What a decode program is compiled for: live slots, pages of context, and how it drafts and samples."""

    batch: int
    pages: int
    sampling: SamplingMode
    speculation: SpeculationConfig

    @property
    def options(self) -> RoundOptions:
        """Of its rounds."""
        return RoundOptions(self.speculation.budget, self.sampling)

    def __str__(self) -> str:
        return f"decode {self.batch} slot(s), {self.pages} pages, N={self.speculation.budget}, {self.sampling}"


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
    target: Target
    drafter: Drafter | None
    make_drafting: MakeDrafting
    report: Callable[[str], None] = lambda line: None
    compiled: dict[Hashable, Callable[..., Any]] = field(default_factory=dict)
    compiling: str | None = None

    def __post_init__(self) -> None:
        self._target, self._drafter = FlatModule(self.target), FlatModule(self.drafter)
        self.leaves = self._target.leaves + self._drafter.leaves
        # New rows are split as the pools are that they go to, but for pages whose rows are split.
        layout = self.target.layout
        rows = jax.tree.map(
            lambda row: layout.spec((None, None, *row.axes)),
            self.target.cache_rows,
            is_leaf=lambda node: isinstance(node, RowSpec),
        )
        self.output_specs = ForwardOutput(REPLICATED, REPLICATED, rows, REPLICATED)  # type: ignore[arg-type]

    def decode(self, shape: DecodeShape, carry: Carry, batch: Batch) -> tuple[Carry, RoundResult]:
        """Runs `rounds_per_call` rounds; results have a leading axis of rounds. Donates the carry."""

        def body(leaves: Any, carry: Carry, batch: Batch) -> tuple[Carry, RoundResult]:
            models, options = self._models(leaves, shape.speculation), shape.options

            def one_round(part: Carry, _: None) -> tuple[Carry, RoundResult]:
                return decode_round(models, part, batch, options)

            # A trip count of one is unrolled by the compiler; a longer loop keeps the caches in place.
            rounds = shape.speculation.rounds_per_call
            part, results = jax.lax.scan(one_round, _of_batch(carry, batch), length=rounds)
            return _of_all(carry, batch, part, options), results

        return self._run(shape, body, (carry, batch), (specs_of(carry), REPLICATED), donate_carry=True)

    def draft(self, shape: DecodeShape, carry: Carry, batch: Batch) -> DraftTree:
        """The first part of a round that waits for the host's masks."""

        def body(leaves: Any, carry: Carry, batch: Batch) -> DraftTree:
            models = self._models(leaves, shape.speculation)
            return draft(models, _of_batch(carry, batch), batch, shape.options)

        return self._run(("draft", shape), body, (carry, batch), REPLICATED)

    def verify(self, shape: DecodeShape, carry: Carry, batch: Batch, tree: DraftTree) -> Verified:
        """The second part: the target's pass."""

        def body(leaves: Any, carry: Carry, batch: Batch, tree: DraftTree) -> ForwardOutput:
            models = self._models(leaves, shape.speculation)
            return verify(models, _of_batch(carry, batch), batch, tree).output

        return Verified(tree, self._run(("verify", shape), body, (carry, batch, tree), self.output_specs))

    def accept_and_commit(
        self, shape: DecodeShape, carry: Carry, batch: Batch, verified: Verified
    ) -> tuple[Carry, RoundResult]:
        """The last part, with the host's masks in `batch`; as `decode` with one round. Donates the carry."""

        def body(leaves: Any, carry: Carry, batch: Batch, verified: Verified) -> tuple[Carry, RoundResult]:
            models, part, options = self._models(leaves, shape.speculation), _of_batch(carry, batch), shape.options
            accepted = accept(models, part, batch, verified, options)
            part, result = commit(models, part, batch, verified, accepted, options)
            return _of_all(carry, batch, part, options), jax.tree.map(lambda array: array[None], result)

        name, arguments = ("accept and commit", shape), (carry, batch, verified)
        return self._run(name, body, arguments, (specs_of(carry), REPLICATED), donate_carry=True)

    def prefill(self, shape: PrefillShape, carry: Carry, chunk: PromptChunk) -> tuple[Carry, LogProbRows]:
        """Processes one chunk of prompt for each request. Donates the carry."""

        def body(leaves: Any, carry: Carry, chunk: PromptChunk) -> tuple[Carry, LogProbRows]:
            models = self._models(leaves, SpeculationConfig())
            caches, log_probs = prefill(models, carry.caches, chunk, shape.log_probs)
            return Carry(caches, carry.slots), log_probs

        return self._run(shape, body, (carry, chunk), (specs_of(carry), REPLICATED), donate_carry=True)

    def admit(self, table: SlotTable, slots: Any, columns: dict[str, Any]) -> SlotTable:
        """Fills slots, int32 [requests], with requests' columns. Donates the table."""

        def body(leaves: Any, table: SlotTable, slots: Any, columns: dict[str, Any]) -> SlotTable:
            return admit(table, slots, columns)

        split = slot_specs(self.target.layout)
        columns = {
            name: self.place(column, getattr(split, name)) if COLUMNS[name].per_token else column
            for name, column in columns.items()
        }
        name = f"admit {len(slots)} request(s), {len(columns)} columns"
        return self._run(name, body, (table, slots, columns), specs_of(table), donate_carry=True)

    def place(self, tree: Any, specs: Any) -> Any:
        """Puts host arrays on the mesh, split as `specs` says."""
        return jax.tree.map(
            lambda array, spec: jax.device_put(array, jax.sharding.NamedSharding(self.mesh, spec)), tree, specs
        )

    def _models(self, leaves: tuple[jax.Array, ...], speculation: SpeculationConfig) -> Models:
        """One device's models, holding `leaves`."""
        count = len(self._target.leaves)
        target, drafter = self._target.holding(leaves[:count]), self._drafter.holding(leaves[count:])
        if self.drafter is None:
            return Models(target, no_drafting())
        length = speculation.length(self.drafter.config.depth)
        return Models(target, self.make_drafting(drafter, target, length, speculation.top_k_cap))

    def _run(
        self,
        key: Hashable,
        body: Callable[..., Any],
        arguments: tuple[Any, ...],
        out_specs: Any,
        donate_carry: bool = False,
    ) -> Any:
        if key not in self.compiled:
            began = time.perf_counter()
            plain = isinstance(key, DecodeShape) and self.drafter is None
            self.compiling = " of ".join(map(str, key)) if isinstance(key, tuple) else str(key)
            name = self.compiling
            try:
                self.compiled[key] = compile_on_mesh(
                    body,
                    self.mesh,
                    (self.leaves, *arguments),
                    out_specs,
                    donate=(1,) if donate_carry else (),
                    options=compiler_options(self.mesh, plain),
                )
            finally:
                self.compiling = None
            self.report(f"compiled {name} in {time.perf_counter() - began:.1f} s")
        return self.compiled[key](self.leaves, *arguments)


def _of_batch(carry: Carry, batch: Batch) -> Carry:
    """The carry of a call: the caches, and the batch's part of the slot table."""
    return Carry(carry.caches, take(carry.slots, batch.slots))


def _of_all(carry: Carry, batch: Batch, part: Carry, options: RoundOptions) -> Carry:
    """The carry of all slots again, with what a call changed in its batch's."""
    slots = put(carry.slots, batch.slots, part.slots, per_token=options.sampling.processed)
    return Carry(part.caches, slots)


def compiler_options(mesh: jax.sharding.Mesh, plain: bool) -> dict[str, str | bool]:
    """XLA's options, beside the defaults, for a program of a mesh that decodes without a drafter, or another."""
    return PLAIN_GPU_OPTIONS if plain and mesh.devices.flat[0].platform == "gpu" else {}
