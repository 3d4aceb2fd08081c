"""Checks of settings, for commands and server alike: each raises a ValueError that names the option."""

from collections.abc import Sequence


def within(option: str, value: float, low: float, high: float) -> None:
    """Raises ValueError, naming the option, unless low <= value <= high (NaN never is)."""
    if not low <= value <= high:
        raise ValueError(f"{option}: found {value}, expected {low} to {high}")


def one_of(option: str, value: str, names: Sequence[str]) -> None:
    """Raises ValueError, naming the option, for any other name."""
    if value not in names:
        raise ValueError(f"{option}: found {value!r}, expected {', '.join(names)}")


def distinct(option: str, numbers: Sequence[float]) -> None:
    """Raises ValueError, naming the option, where a number comes twice."""
    for place, number in enumerate(numbers):
        if number in numbers[:place]:
            raise ValueError(f"{option}: found {number:g} twice, expected different numbers")
