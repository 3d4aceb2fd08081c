"""A sequence processed pass after pass over pages, compared with a published model run on the whole of it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import torch

from jaxspec.model.families.protocols import Target
from jaxspec.model.layers.batch import ForwardBatch
from jaxspec.model.layers.cache import empty_cache, write_rows
from jaxspec.sharding.mesh import make_mesh
from tests.support.builders import on_mesh

TOLERANCE = 1e-4
# A tree under its root: two children, the first with two of its own, one of these with a child.
PARENTS = np.array([0, 0, 0, 1, 1, 3], np.int32)
DEPTHS = np.array([0, 1, 1, 2, 2, 3], np.int32)


@dataclass
class Session:
    """One sequence, processed pass after pass over a paged cache whose pages lie in no order."""

    target: Target
    taps: tuple[int, ...]
    page_size: int
    pages: int

    def __post_init__(self) -> None:
        mesh = make_mesh(1)
        self.cache = empty_cache(
            self.target.cache_rows, self.pages + 3, self.page_size, self.target.layout, mesh, "float32"
        )
        self.table = np.random.default_rng(0).permutation(self.pages + 3)[None, : self.pages].astype(np.int32)
        self.length = 0
        taps = self.taps

        def body(target: Any, batch: ForwardBatch, cache: Any, keep: jax.Array) -> Any:
            output = target(batch, cache, taps)
            cache = write_rows(cache, output.rows, batch.page_table, batch.positions, keep)
            return target.logits(output.hidden), output.tapped, cache

        self._run: Callable[..., Any] = on_mesh(1, self.target, body)

    def forward(self, tokens: np.ndarray, depths: np.ndarray, visibility: np.ndarray, keep: np.ndarray) -> Any:
        """One pass of rows after the context; kept rows become context. Logits and tapped features, [rows, ...]."""
        batch = ForwardBatch(
            tokens=tokens[None].astype(np.int32),
            positions=(self.length + depths)[None].astype(np.int32),
            page_table=self.table,
            context_length=np.array([self.length], np.int32),
            visibility=visibility[None],
        )
        logits, tapped, self.cache = self._run(batch, self.cache, keep[None])
        self.length += int(keep.sum())
        return np.asarray(logits[0]), np.asarray(tapped[0])

    def extend(self, tokens: np.ndarray, padded_to: int) -> Any:
        """A causal pass over real tokens, padded as a prefill chunk is."""
        count = len(tokens)
        padded = np.pad(tokens, (0, padded_to - count))
        rows = np.arange(padded_to)
        logits, tapped = self.forward(padded, rows, rows[:, None] >= rows, rows < count)
        return logits[:count], tapped[:count]

    def tree(self, tokens: np.ndarray) -> Any:
        """A pass over the fixed tree; nothing is kept."""
        visibility = np.eye(len(PARENTS), dtype=bool)
        for row in range(1, len(PARENTS)):
            visibility[row] |= visibility[PARENTS[row]]
        return self.forward(tokens, DEPTHS, visibility, np.zeros(len(PARENTS), bool))


def path_to(row: int) -> list[int]:
    return [row] if row == 0 else [*path_to(int(PARENTS[row])), row]


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def compare(
    target: Any, published: Any, tokens: np.ndarray, taps: tuple[int, ...], chunk: int, steps: int, step_rows: int = 1
) -> None:
    """Runs `tokens` in chunks, the last `steps` one by one, then the tree; compares logits and features everywhere.

    Args:
      step_rows: rows of a step's pass, the first of them real.
    """

    def reference(sequence: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        with torch.no_grad():
            output = published(torch.tensor(sequence[None]), output_hidden_states=True, use_cache=False)
        # Feature n is the residual stream after layer n; transformers lists the embedding first.
        features = torch.cat([output.hidden_states[n + 1] for n in taps], -1)
        return output.logits[0].numpy(), features[0].numpy()

    session = Session(target, taps, page_size=4, pages=-(-len(tokens) // 4) + 2)
    found = [
        session.extend(part, chunk) for part in np.split(tokens[:-steps], range(chunk, len(tokens) - steps, chunk))
    ]
    found += [session.extend(tokens[i : i + 1], step_rows) for i in range(len(tokens) - steps, len(tokens))]
    logits, features = (np.concatenate(parts) for parts in zip(*found, strict=True))
    expected_logits, expected_features = reference(tokens)
    assert relative_error(logits, expected_logits) <= TOLERANCE
    assert relative_error(features, expected_features) <= TOLERANCE

    nodes = np.random.default_rng(1).integers(0, target.config.vocab_size, len(PARENTS))
    before = jax.tree.map(np.asarray, session.cache)
    logits, features = session.tree(nodes)
    for leaf in sorted(set(range(len(PARENTS))) - set(PARENTS.tolist())):
        path = path_to(leaf)
        expected_logits, expected_features = reference(np.concatenate([tokens, nodes[path]]))
        assert relative_error(logits[path], expected_logits[-len(path) :]) <= TOLERANCE
        assert relative_error(features[path], expected_features[-len(path) :]) <= TOLERANCE
    jax.tree.map(np.testing.assert_array_equal, session.cache, before)
