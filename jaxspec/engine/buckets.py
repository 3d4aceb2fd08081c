"""Sizes that programs are compiled for: few, so that most calls find theirs."""

from collections.abc import Sequence

SMALLEST_CONTEXT = 256  # tokens
SMALLEST_CHUNK = 32  # tokens of a prompt


def bucket(value: int, largest: int, smallest: int = 1) -> int:
    """The least of smallest, 4 · smallest, 16 · smallest, …, capped at `largest`, that holds `value`."""
    size = smallest
    while size < value:
        size *= 4
    return min(size, largest)


def smallest_that_holds(value: int, sizes: Sequence[int]) -> int:
    """The first of ascending `sizes` that holds `value`."""
    return next(size for size in sizes if size >= value)
