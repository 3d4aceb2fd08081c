"""Log-probabilities as a request's answer carries them, read from what a program returned."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from jaxspec.speculation.log_probs import LogProbRows


@dataclass(frozen=True)
class TokenLogProb:
    """One token's log-probability.

    Attributes:
      top: (token id, log-probability) of the most probable tokens, best first, as many as were asked for.
    """

    token: int
    log_prob: float
    top: tuple[tuple[int, float], ...]


def host_log_probs(rows: "LogProbRows", row: int, tokens: Sequence[int], top: int) -> list[TokenLogProb]:
    """The first `len(tokens)` entries of one row, which lies on the host, with `top` alternatives each."""
    chosen, values, ids = (np.asarray(array[row]) for array in (rows.chosen, rows.top, rows.top_ids))
    return [
        TokenLogProb(
            token,
            float(chosen[i]),
            tuple(zip(ids[i, :top].tolist(), values[i, :top].tolist(), strict=True)),
        )
        for i, token in enumerate(tokens)
    ]
