"""The ways to decode that an evaluation compares."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxspec.config import SpeculationConfig


@dataclass(frozen=True)
class Mode:
    """A way to decode. The chain drafts greedily, at a temperature too; published chains sample their drafts."""

    name: str
    speculation: SpeculationConfig


def modes(budgets: Sequence[int], top_k_cap: int, depth: int) -> list[Mode]:
    """Plain decoding, the chain of `depth` drafts, and DDTree at each positive budget."""
    trees = [Mode(f"ddtree-{n}", SpeculationConfig(budget=n, top_k_cap=top_k_cap)) for n in budgets if n]
    plain, chain = SpeculationConfig(budget=0), SpeculationConfig(budget=depth, top_k_cap=1)
    return [Mode("plain", plain), Mode("chain", chain), *trees]
