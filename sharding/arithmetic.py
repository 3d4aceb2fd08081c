"""Integer arithmetic that every package uses; imports nothing."""

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import jax

Integers = TypeVar("Integers", int, "jax.Array")


def cdiv(dividend: Integers, divisor: int) -> Integers:
    """`dividend / divisor`, rounded up: how many parts of `divisor` hold `dividend`; ints or integer arrays."""
    return -(-dividend // divisor)
