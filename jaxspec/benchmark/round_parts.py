"""A round's program and its parts, ready to be called again and again: for timing and for profiles."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxspec.benchmark.synthetic import random_cache
from jaxspec.engine.engine import Engine
from jaxspec.engine.modules import FlatModule
from jaxspec.engine.programs import DecodeShape, compiler_options
from jaxspec.model.layers.batch import ForwardOutput
from jaxspec.model.layers.cache import PagedCache
from jaxspec.sharding.compilation import REPLICATED, compile_on_mesh, replicate, specs_of
from jaxspec.speculation.acceptance import confirm
from jaxspec.speculation.drafting import Drafting, dflash_drafting, no_drafting
from jaxspec.speculation.log_probs import no_log_probs
from jaxspec.speculation.logits_processors import everything_allowed
from jaxspec.speculation.round import (
    Accepted,
    Batch,
    Caches,
    Carry,
    Models,
    RoundResult,
    Verified,
    commit,
    verify,
)
from jaxspec.speculation.sampling import SamplingLevel, SamplingMode, sample
from jaxspec.speculation.slot_table import empty_slots, slot_specs
from jaxspec.speculation.tree import DraftTree, grow_tree, root_only

GREEDY = SamplingMode(SamplingLevel.GREEDY)


class RoundParts:
    """Runs an engine's compiled round, or a part of it, on caches of random values.

    Args:
      engine: of one batch bucket; has decoded greedily at its current setting, so that the program is compiled.
      context: tokens of each sequence after `reset`.

    Attributes:
      carry: what the next call takes over.
    """

    def __init__(self, engine: Engine, context: int):
        self._engine, self._mesh, self._programs = engine, engine.mesh, engine.runner.programs
        shapes = [key for key in self._programs.compiled if isinstance(key, DecodeShape)]
        own = [s for s in shapes if s.speculation == engine.speculation and s.sampling == GREEDY]
        self._shape = max(own, key=lambda shape: shape.pages)
        self._options = self._shape.options
        random = np.random.default_rng(1)
        slots, page_size, vocab = engine.config.slots, engine.config.page_size, engine.target.config.vocab_size
        self._table = empty_slots(slots, vocab)
        self._table.anchor[:] = random.integers(0, vocab, slots)
        self._table.length[:] = context
        self._table.remaining[:] = 2**20
        self._table.finished[:] = False
        pages = random.permutation(engine.page_count)[: slots * self._shape.pages]
        arrays: dict[str, Any] = {
            "slots": np.arange(slots, dtype=np.int32),
            "page_table": pages.reshape(slots, -1).astype(np.int32),
            "capacity": np.full(slots, self._shape.pages * page_size, np.int32),
            "allowed": everything_allowed(slots),
        }
        self._batch = replicate(Batch(**arrays), self._mesh)
        dtype = self._programs.leaves[0].dtype

        def pools(module: Any) -> PagedCache:
            return () if module is None else random_cache(module, engine.page_count, page_size, self._mesh, dtype)

        self.carry = Carry(Caches(pools(engine.target), pools(engine.drafter)), self._placed())

    def reset(self) -> None:
        """Sets every sequence back to its first length."""
        self.carry = Carry(self.carry.caches, self._placed())

    def round(self) -> RoundResult:
        """One call of the engine's own program."""
        self.carry, result = self._programs.decode(self._shape, self.carry, self._batch)
        return result

    def parts(self) -> dict[str, Callable[[], Any]]:
        """Compiles the parts of the current setting: draft and grow (with a budget), verify, commit.

        Each works on what the one before made when this was called.
        """
        parts: dict[str, Callable[[], Any]] = {}
        if self._options.budget:
            parts["draft"] = self._draft()
            parts["grow"] = self._grow(parts["draft"]())
            tree = parts["grow"]()
        else:
            tree = self._compile(root_only, (self.carry.slots.anchor,), REPLICATED)(self.carry.slots.anchor)
        parts["verify"] = self._verify(tree)
        output, predicted = parts["verify"]()
        parts["commit"] = self._commit(Verified(tree, output), predicted)
        return parts

    def _placed(self) -> Any:
        return self._programs.place(self._table, slot_specs(self._engine.target.layout))

    def _draft(self) -> Callable[[], Any]:
        head = FlatModule(self._engine.target, ("embed_tokens", "lm_head"))
        block = FlatModule(self._engine.drafter)

        def body(head_leaves: Any, block_leaves: Any, carry: Carry, batch: Batch) -> Any:
            drafting = self._drafting(block.holding(block_leaves), head.holding(head_leaves))
            return drafting.propose(carry.slots, carry.caches.drafter, batch.page_table)

        def arguments() -> tuple[Any, ...]:
            carry = Carry(Caches((), self.carry.caches.drafter), self.carry.slots)
            return head.leaves, block.leaves, carry, self._batch

        program = self._compile(body, arguments(), REPLICATED)
        return lambda: program(*arguments())

    def _grow(self, candidates: Any) -> Callable[[], DraftTree]:
        def body(anchor: jax.Array, candidates: Any) -> DraftTree:
            return grow_tree(anchor, candidates, self._options.budget)

        program = self._compile(body, (self.carry.slots.anchor, candidates), REPLICATED)
        return lambda: program(self.carry.slots.anchor, candidates)

    def _verify(self, tree: DraftTree) -> Callable[[], tuple[ForwardOutput, jax.Array]]:
        weights, depth = FlatModule(self._engine.target), self._engine.depth
        drafting = self._drafting(self._engine.drafter, None)  # Only its taps are used.

        def body(leaves: Any, carry: Carry, batch: Batch, tree: DraftTree) -> tuple[ForwardOutput, jax.Array]:
            target = weights.holding(leaves)
            output = verify(Models(target, drafting), carry, batch, tree).output
            logits = target.logits(output.hidden)
            return output, sample(logits, tree.depths, carry.slots, target.vocab, GREEDY.level, depth)

        def arguments() -> tuple[Any, ...]:
            return weights.leaves, Carry(Caches(self.carry.caches.target, ()), self.carry.slots), self._batch, tree

        program = self._compile(body, arguments(), (self._programs.output_specs, REPLICATED))
        return lambda: program(*arguments())

    def _commit(self, verified: Verified, predicted: jax.Array) -> Callable[[], RoundResult]:
        weights, depth = FlatModule(self._engine.drafter), self._engine.depth

        def body(
            leaves: Any, carry: Carry, batch: Batch, verified: Verified, predicted: jax.Array
        ) -> tuple[Carry, RoundResult]:
            models = Models(self._engine.target, self._drafting(weights.holding(leaves), None))
            accepted = Accepted(confirm(verified.tree, predicted, depth), no_log_probs(len(predicted)))
            return commit(models, carry, batch, verified, accepted, self._options)

        fixed = (self._batch, verified, predicted)
        out_specs = (specs_of(self.carry), REPLICATED)
        program = self._compile(body, (weights.leaves, self.carry, *fixed), out_specs, donate=(1,))

        def call() -> RoundResult:
            self.carry, result = program(weights.leaves, self.carry, *fixed)
            return result

        return call

    def _drafting(self, drafter: Any, target: Any) -> Drafting:
        if drafter is None:
            return no_drafting()
        speculation = self._engine.speculation
        return dflash_drafting(drafter, target, speculation.length(drafter.config.depth), speculation.top_k_cap)

    def _compile(
        self, body: Callable[..., Any], arguments: tuple[Any, ...], out_specs: Any, donate: tuple[int, ...] = ()
    ) -> Callable[..., Any]:
        options = compiler_options(self._mesh, plain=self._engine.drafter is None)
        return compile_on_mesh(body, self._mesh, arguments, out_specs, donate, options)
