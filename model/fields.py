"""Typed reading of the tables in which a checkpoint describes itself: `config.json`, GGUF metadata.

JSON's null counts as absent, as in transformers. What is absent, of another type or out of range is refused by name.
"""

import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Fields:
    """A table and what errors call it. Every reader raises ValueError; a `default` of None makes its field required."""

    table: Mapping[str, Any]
    where: str = "config.json"

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        """An integer, both bounds included."""
        value = self._value(key, default)
        if not _is_integer(value, low, high):
            raise self.wrong(key, f"an integer from {low} to {high}")
        return value

    def integers(self, key: str, low: int, high: int) -> tuple[int, ...]:
        """A list of at least one integer, both bounds included."""
        value = self._value(key)
        if not isinstance(value, list) or not value or not all(_is_integer(item, low, high) for item in value):
            raise self.wrong(key, f"a list of integers from {low} to {high}")
        return tuple(value)

    def real(self, key: str, high: float = math.inf, default: float | None = None) -> float:
        """A number between 0 and `high`, bounds excluded, as float32 sees it; or the default itself."""
        value = self._value(key, default)
        if type(value) in (int, float) and (value == default or 0 < _float32(value) < high):
            return float(value)
        raise self.wrong(key, "a finite number above 0" + (f" and below {high:g}" if high < math.inf else ""))

    def reals(self, key: str) -> tuple[float, ...]:
        """A list of at least one number above 0."""
        value = self._value(key)
        numbers = value if isinstance(value, list) else []
        if numbers and all(type(x) in (int, float) and 0 < _float32(x) < math.inf for x in numbers):
            return tuple(float(x) for x in numbers)
        raise self.wrong(key, "a list of finite numbers above 0")

    def flag(self, key: str, default: bool | None = None) -> bool:
        """Reads true or false."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def section(self, key: str) -> dict[str, Any]:
        """A table inside this one, without its nulls; empty where there is none."""
        value = self._value(key, {})
        if not isinstance(value, dict):
            raise self.wrong(key, "an object")
        return {name: item for name, item in value.items() if item is not None}

    def only(self, supported: Mapping[str, Any]) -> None:
        """Refuses any other value of the fields named in `supported`; absent ones pass."""
        for key, value in supported.items():
            if self.table.get(key, value) not in (value, None):
                raise ValueError(f"{self.where} {key}: found {self.table[key]!r}, only {value!r} is supported")

    def wrong(self, key: str, expected: str) -> ValueError:
        """The error for a field that does not hold what is expected."""
        found = self.table.get(key)
        return ValueError(
            f"{self.where} {key}: missing, expected {expected}"
            if found is None
            else f"{self.where} {key}: found {reprlib.repr(found)}, expected {expected}"
        )

    def _value(self, key: str, default: Any = None) -> Any:
        value = self.table.get(key)
        return default if value is None else value


def _is_integer(value: Any, low: int, high: int) -> bool:
    return type(value) is int and low <= value <= high  # A bool is no integer here.


def _float32(value: float) -> float:
    try:
        with np.errstate(over="ignore", under="ignore"):
            return float(np.float32(value))
    except OverflowError:  # An integer beyond any float.
        return math.inf
