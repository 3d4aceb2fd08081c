"""A clock that leaves out the steps in which a program was compiled."""

from types import SimpleNamespace
from typing import Any

import pytest

from jaxspec.engine import decode_clock
from jaxspec.engine.decode_clock import DecodeClock

COMPILING, QUICK = 60.0, 0.5


class Compiling:
    """An engine whose first step compiles; it brings three tokens a step."""

    def __init__(self) -> None:
        self.now = 0.0
        self.compiled: dict[str, Any] = {}
        self.runner = SimpleNamespace(programs=SimpleNamespace(compiled=self.compiled))

    def step(self) -> list[Any]:
        self.now += QUICK if self.compiled else COMPILING
        self.compiled["decode"] = None
        return [SimpleNamespace(tokens=[1, 2]), SimpleNamespace(tokens=[3])]


def test_steps_that_compile_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Any = Compiling()
    monkeypatch.setattr(decode_clock, "time", SimpleNamespace(perf_counter=lambda: engine.now))
    clock = DecodeClock(engine)
    assert clock.tokens_per_second is None
    assert len(clock.step()) == 2
    assert clock.tokens_per_second is None
    for _ in range(4):
        clock.step()
    assert clock.tokens_per_second == pytest.approx(3 / QUICK)
