"""A round's program and its parts, ready to be called again and again: for timing and for profiles."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

from jaxspec.benchmark.synthetic import random_cache
from jaxspec.config import MAX_STOP_IDS
from jaxspec.engine.engine import Engine
from jaxspec.engine.programs import DecodeShape, compiler_options, replicate
from jaxspec.model.layers.batch import ForwardOutput
from jaxspec.speculation.acceptance import accept
from jaxspec.speculation.drafting import Drafting, dflash_drafting, no_drafting
from jaxspec.speculation.log_probs import no_log_probs
from jaxspec.speculation.logits_processors import no_adjustments
from jaxspec.speculation.round import Caches, RoundResult, commit, verify
from jaxspec.speculation.sampling import SamplingLevel, SamplingWork, sample
from jaxspec.speculation.state import DecodeState, empty_rows
from jaxspec.speculation.tree import DraftTree, grow_tree, root_only

REPLICATED = PartitionSpec()


class RoundParts:
    """Runs an engine's compiled round, or a part of it, on caches of random values.

    Args:
      engine: of one batch bucket; has decoded greedily at its current setting, so that the program is compiled.
      context: tokens of each sequence after `reset`.
    """

    def __init__(self, engine: Engine, context: int):
        self._engine, self._mesh = engine, engine.mesh
        shapes = [key for key in engine._programs.compiled if isinstance(key, DecodeShape)]
        greedy = SamplingWork(SamplingLevel.GREEDY)
        own = [s for s in shapes if s.speculation == engine.speculation and s.work == greedy]
        self._shape = max(own, key=lambda shape: shape.pages)
        random = np.random.default_rng(1)
        slots, page_size = engine.config.slots, engine.config.page_size
        self._rows = empty_rows(slots, MAX_STOP_IDS)
        self._rows.anchor[:] = random.integers(0, engine.target.config.vocab_size, slots)
        self._rows.length[:] = context
        self._rows.remaining[:] = 2**20
        self._rows.finished[:] = False
        pages = random.permutation(engine.page_count)[: slots * self._shape.pages]
        self._slots, self._table, self._capacity = replicate(
            (
                np.arange(slots, dtype=np.int32),
                pages.reshape(slots, -1).astype(np.int32),
                np.full(slots, self._shape.pages * page_size, np.int32),
            ),
            self._mesh,
        )
        dtype = engine._programs.leaves[0].dtype

        def pools(module: Any) -> Any:
            return () if module is None else random_cache(module, engine.page_count, page_size, self._mesh, dtype)

        self._caches = Caches(target=pools(engine.target), drafter=pools(engine.drafter))
        self._adjustments = engine._programs.place(no_adjustments(slots, engine.target.config.vocab_size))
        self._pool_specs = jax.tree.map(lambda pool: pool.sharding.spec, self._caches)
        self.reset()

    def reset(self) -> DecodeState:
        """Sets every sequence back to its first length."""
        self._state = replicate(self._rows, self._mesh)
        return self._state

    def round(self) -> RoundResult:
        """One call of the engine's own program."""
        self._caches, self._state, self._adjustments, result = self._engine._programs.decode(
            self._shape, self._caches, self._state, self._adjustments, self._slots, self._table, self._capacity
        )
        return result

    def parts(self) -> dict[str, Callable[[], Any]]:
        """Compiles the parts of the current setting: draft and grow (with a budget), verify, commit.

        Each works on what the one before made when this was called.
        """
        parts: dict[str, Callable[[], Any]] = {}
        if self._engine.speculation.budget:
            parts["draft"] = self._draft()
            parts["grow"] = self._grow(parts["draft"]())
            tree = parts["grow"]()
        else:
            tree = self._compile(root_only, (self._state.anchor,), REPLICATED)(self._state.anchor)
        parts["verify"] = self._verify(tree)
        output, predicted = parts["verify"]()
        parts["commit"] = self._commit(tree, output, predicted)
        return parts

    def _draft(self) -> Callable[[], Any]:
        head = _Weights(self._engine.target, ("embed_tokens", "lm_head"))
        block = _Weights(self._engine.drafter)

        def body(head_leaves, block_leaves, cache, state, table):  # type: ignore[no-untyped-def]
            drafting = self._drafting(block.module(block_leaves), head.module(head_leaves))
            return drafting.propose(state, cache, table)

        arguments = (head.leaves, block.leaves, self._caches.drafter, self._state, self._table)
        program = self._compile(body, arguments, REPLICATED)
        return lambda: program(head.leaves, block.leaves, self._caches.drafter, self._state, self._table)

    def _grow(self, candidates: Any) -> Callable[[], DraftTree]:
        def body(anchor, candidates):  # type: ignore[no-untyped-def]
            return grow_tree(anchor, candidates, self._engine.speculation.budget)

        program = self._compile(body, (self._state.anchor, candidates), REPLICATED)
        return lambda: program(self._state.anchor, candidates)

    def _verify(self, tree: DraftTree) -> Callable[[], Any]:
        weights, depth = _Weights(self._engine.target), self._engine.depth
        drafting = self._drafting(self._engine.drafter, None)  # Only its taps are used.

        def body(leaves, cache, state, table, tree):  # type: ignore[no-untyped-def]
            target = weights.module(leaves)
            output = verify(target, drafting, Caches(cache, ()), state, table, tree)
            logits = target.logits(output.hidden)
            return output, sample(logits, tree.depths, state, depth, SamplingLevel.GREEDY, target.vocab_split)

        arguments = (weights.leaves, self._caches.target, self._state, self._table, tree)
        program = self._compile(body, arguments, (self._engine._programs.output_specs, REPLICATED))
        return lambda: program(weights.leaves, self._caches.target, self._state, self._table, tree)

    def _commit(self, tree: DraftTree, output: ForwardOutput, predicted: jax.Array) -> Callable[[], RoundResult]:
        weights, depth = _Weights(self._engine.drafter), self._engine.depth

        def body(leaves, caches, state, table, capacity, tree, output, predicted):  # type: ignore[no-untyped-def]
            drafting = self._drafting(weights.module(leaves), None)
            accepted, log_probs = accept(tree, predicted, depth), no_log_probs(len(predicted))
            return commit(
                self._engine.target, drafting, caches, state, table, capacity, tree, output, accepted, log_probs
            )

        fixed = (self._table, self._capacity, tree, output, predicted)
        arguments = (weights.leaves, self._caches, self._state, *fixed)
        program = self._compile(body, arguments, (self._pool_specs, REPLICATED, REPLICATED), donate=(1, 2))

        def call() -> RoundResult:
            self._caches, self._state, result = program(weights.leaves, self._caches, self._state, *fixed)
            return result

        return call

    def _drafting(self, drafter: Any, target: Any) -> Drafting:
        if drafter is None:
            return no_drafting()
        speculation = self._engine.speculation
        length = speculation.draft_length or drafter.config.depth
        return dflash_drafting(drafter, target, length, speculation.top_k_cap)

    def _compile(
        self, body: Callable[..., Any], arguments: tuple[Any, ...], out_specs: Any, donate: tuple[int, ...] = ()
    ) -> Callable[..., Any]:
        in_specs = jax.tree.map(lambda array: array.sharding.spec, arguments)
        program = jax.shard_map(body, mesh=self._mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
        lowered = jax.jit(program, donate_argnums=donate).lower(*arguments)
        return lowered.compile(compiler_options=compiler_options(self._mesh, plain=self._engine.drafter is None))


class _Weights:
    """The weights of a module that a program needs, as a flat tuple: every further one would cost the host time.

    Args:
      module: or None, which has none.
      names: first parts of the names wanted; all by default.
    """

    def __init__(self, module: Any, names: tuple[str, ...] | None = None):
        self._split = None if module is None else nnx.split(module)
        paths = [] if self._split is None else jax.tree.leaves_with_path(self._split[1])
        self._wanted = [names is None or path[0].key in names for path, _ in paths]
        self.leaves = tuple(leaf for (_, leaf), wanted in zip(paths, self._wanted, strict=True) if wanted)

    def module(self, leaves: tuple[jax.Array, ...]) -> Any:
        """The module again, holding `leaves`; its other weights must not be used."""
        if self._split is None:
            return None
        graph, state = self._split
        everything, tree = jax.tree.flatten(state)
        given = iter(leaves)
        pairs = zip(everything, self._wanted, strict=True)
        return nnx.merge(graph, jax.tree.unflatten(tree, [next(given) if wanted else leaf for leaf, wanted in pairs]))
