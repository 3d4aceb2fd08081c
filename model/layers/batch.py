"""What goes into a target's forward pass and what comes out.

One `ForwardBatch` serves prefill, decoding and verification; every mode fills every field.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

# One layer's new cache rows: a tuple of arrays [batch, rows, ...] shaped as that layer's pools are after their pages.
LayerRows = tuple[jax.Array, ...]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ForwardBatch:
    """The rows of one pass over a paged context.

    Attributes:
      tokens: int32 [batch, rows].
      positions: int32 [batch, rows], absolute; siblings of a tree share one.
      page_table: int32 [batch, pages], the pages that hold each sequence's context.
      context_length: int32 [batch], tokens of context whose rows are in the cache.
      visibility: bool [batch, rows, rows]; row i attends to row j. All context is visible to every row.
    """

    tokens: jax.Array
    positions: jax.Array
    page_table: jax.Array
    context_length: jax.Array
    visibility: jax.Array

    def check(self) -> None:
        """Checks shapes and dtypes while a program is traced.

        Raises:
          ValueError: naming the field, what was found and what was expected.
        """
        if getattr(self.tokens, "ndim", None) != 2:
            raise ValueError(f"ForwardBatch.tokens: found {_describe(self.tokens)}, expected int32[batch, rows]")
        batch, rows = self.tokens.shape
        pages = self.page_table.shape[-1] if getattr(self.page_table, "ndim", None) == 2 else -1
        for field, shape, dtype in (
            ("tokens", (batch, rows), jnp.int32),
            ("positions", (batch, rows), jnp.int32),
            ("page_table", (batch, pages), jnp.int32),
            ("context_length", (batch,), jnp.int32),
            ("visibility", (batch, rows, rows), jnp.bool_),
        ):
            value = getattr(self, field)
            if not hasattr(value, "shape") or value.shape != shape or value.dtype != dtype:
                expected = f"{jnp.dtype(dtype).name}[{', '.join(str(n) if n >= 0 else 'pages' for n in shape)}]"
                raise ValueError(f"ForwardBatch.{field}: found {_describe(value)}, expected {expected}")


def _describe(value: Any) -> str:
    if not hasattr(value, "dtype"):
        return repr(value)
    return f"{value.dtype}[{', '.join(map(str, value.shape))}]"


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ForwardOutput:
    """The result of a target's pass.

    Attributes:
      hidden: [batch, rows, hidden], after the final norm; `target.logits` turns it into logits.
      tapped: [batch, rows, taps * hidden], the residual stream after each tapped layer, in the order asked for.
      rows: the new cache rows of every layer. The pass itself writes no cache.
      experts: int32 [layers with experts, batch, rows, k], those that each row chose; of size 0 in a dense model.
    """

    hidden: jax.Array
    tapped: jax.Array
    rows: tuple[LayerRows, ...]
    experts: jax.Array
