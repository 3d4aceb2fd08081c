"""What verification passes cost one device, timed without an engine: for models that are a share of a larger one.

A pass is what a round runs of the target: all rows through it, its choice at each, and the accepted rows written.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxspec.benchmark.synthetic import random_cache
from jaxspec.benchmark.timing import seconds_ahead, seconds_waited
from jaxspec.engine.memory import cache_bytes_per_token, weight_bytes
from jaxspec.engine.modules import FlatModule
from jaxspec.engine.programs import compiler_options
from jaxspec.model.families.protocols import Target
from jaxspec.model.layers.batch import ForwardBatch
from jaxspec.model.layers.cache import PagedCache, write_rows
from jaxspec.sharding.arithmetic import cdiv
from jaxspec.sharding.compilation import REPLICATED, lower_on_mesh, replicate, specs_of

PAGE_SIZE = 16
COMPILERS = 4  # Programs compiled at a time; each keeps about one core busy.


@dataclass(frozen=True)
class VerifyTiming:
    """One program.

    Attributes:
      nodes: tree nodes beside the root; 0 is a plain step.
      context: tokens of context.
      seconds: with calls dispatched ahead, so that the device never waits for the host.
      waited_seconds: with the host waiting for each call.
      experts: different experts that the rows chose, the mean over layers; 0 in a dense model.
      bytes_moved: that the device must move at least; of the experts, those that were chosen.
    """

    nodes: int
    context: int
    seconds: float
    waited_seconds: float
    experts: float
    bytes_moved: int


class VerifyBench:
    """Compiled passes over one random cache.

    Args:
      target: module filled with arrays on `mesh`.
      taps: layers whose outputs a drafter would read.
      cases: (nodes, context) of each program.
      report: gets a line for each program compiled.
    """

    def __init__(
        self,
        target: Target,
        mesh: Mesh,
        taps: tuple[int, ...],
        cases: Sequence[tuple[int, int]],
        report: Callable[[str], None] = lambda line: None,
    ):
        self._target, self._mesh, self._taps = target, mesh, taps
        self._weights = FlatModule(target)
        pages = max(cdiv(context + nodes + 1, PAGE_SIZE) for nodes, context in cases)
        self._cache = random_cache(target, pages, PAGE_SIZE, mesh, target.embed_tokens.weight.dtype)
        self._table = np.random.default_rng(0).permutation(pages).astype(np.int32)[None]
        self._made = {case: self._inputs(*case) for case in cases}
        lowered = {case: self._lower(*case) for case in cases}

        def compiled(case: tuple[int, int]) -> Any:
            program = lowered[case].compile(compiler_options=compiler_options(mesh, plain=case[0] == 0))
            report(f"compiled {case[0]} nodes over {case[1]} tokens")
            return program

        with ThreadPoolExecutor(COMPILERS) as pool:
            self._programs = dict(zip(cases, pool.map(compiled, cases), strict=True))

    def time(self, nodes: int, context: int) -> VerifyTiming:
        """Times one of the programs."""
        _, chosen = self._call(nodes, context)
        distinct = [len(np.unique(layer)) for layer in np.asarray(chosen)]  # [layers with experts]
        return VerifyTiming(
            nodes,
            context,
            seconds_ahead(lambda: self._call(nodes, context)),
            seconds_waited(lambda: self._call(nodes, context)),
            float(np.mean(distinct)) if distinct else 0.0,
            pass_bytes(self._target, nodes + 1, context, distinct),
        )

    def _call(self, nodes: int, context: int) -> tuple[jax.Array, jax.Array]:
        """The target's choices int32 [1, rows] and its experts int32 [layers, 1, rows, k]."""
        batch, kept = self._made[nodes, context]
        self._cache, choices, experts = self._programs[nodes, context](self._weights.leaves, self._cache, batch, kept)
        return choices, experts

    def _inputs(self, nodes: int, context: int) -> tuple[ForwardBatch, jax.Array]:
        """Different tokens in a tree whose row i hangs from row (i - 1) // 2; its leftmost path is accepted."""
        rows = np.arange(nodes + 1)
        depths = np.floor(np.log2(rows + 1)).astype(np.int32)
        visibility = np.eye(nodes + 1, dtype=bool)
        for row in rows[1:]:
            visibility[row] |= visibility[(row - 1) // 2]
        vocab = self._target.config.vocab_size
        tokens = np.random.default_rng(1).permutation(max(vocab, nodes + 1))[: nodes + 1] % vocab
        batch = ForwardBatch(
            tokens=jnp.asarray(tokens[None], jnp.int32),
            positions=jnp.asarray((context + depths)[None]),
            page_table=jnp.asarray(self._table[:, : cdiv(context + nodes + 1, PAGE_SIZE)]),
            context_length=jnp.array([context], jnp.int32),
            visibility=jnp.asarray(visibility[None]),
        )
        return replicate((batch, jnp.asarray((rows == 2**depths - 1)[None])), self._mesh)

    def _lower(self, nodes: int, context: int) -> Any:
        layout = self._target.layout

        def body(leaves: tuple[jax.Array, ...], cache: PagedCache, batch: ForwardBatch, kept: jax.Array) -> Any:
            target: Target = self._weights.holding(leaves)
            output = target(batch, cache, self._taps)
            predicted = target.vocab.argmax(target.logits(output.hidden))
            shares = layout.shares("page_rows")
            cache = write_rows(cache, output.rows, batch.page_table, batch.positions, kept, shares)
            return cache, predicted, output.experts

        arguments = (self._weights.leaves, self._cache, *self._made[nodes, context])
        out_specs = (specs_of(self._cache), REPLICATED, REPLICATED)
        return lower_on_mesh(body, self._mesh, arguments, out_specs, donate=(1,))


def pass_bytes(target: Target, rows: int, context: int, distinct: Sequence[int]) -> int:
    """The fewest bytes that one device moves in a pass: weights read once, of the experts those that were chosen.

    Embedding rows and activations are neglected; logits, float32, are written once and read once.

    Args:
      distinct: for each layer with experts, how many of them the rows chose.
    """
    weights = weight_bytes(target)
    experts = sum(size for name, size in weights.items() if ".mlp.experts." in name)
    tied = "lm_head.weight" not in weights
    rest = sum(weights.values()) - experts - (0 if tied else weights["embed_tokens.weight"])
    layers = len(distinct)
    config: Any = target.config  # Of a family with experts, where there are layers of them.
    one_expert = experts // (layers * config.n_routed_experts) if layers else 0
    vocab = target.config.vocab_size // target.layout.shares("vocab")
    return rest + sum(distinct) * one_expert + context * cache_bytes_per_token(target, None) + rows * vocab * 8
