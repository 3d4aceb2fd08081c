"""Tokens per second of an engine, without the time that compiling takes."""

import time

from jaxspec.engine.engine import Engine
from jaxspec.engine.request import RequestOutput


class DecodeClock:
    """Times an engine's steps, leaving out those in which it compiled a program.

    Attributes:
      engine: whose steps to run.
    """

    def __init__(self, engine: Engine):
        self.engine = engine
        self._tokens = 0
        self._seconds = 0.0

    def step(self) -> list[RequestOutput]:
        """Runs one step and returns its outputs."""
        programs = self.engine.runner.programs.compiled
        compiled = len(programs)
        began = time.perf_counter()
        outputs = self.engine.step()
        if len(programs) == compiled:
            self._seconds += time.perf_counter() - began
            self._tokens += sum(len(output.tokens) for output in outputs)
        return outputs

    @property
    def tokens_per_second(self) -> float | None:
        """None while nothing was measured."""
        return self._tokens / self._seconds if self._tokens else None
