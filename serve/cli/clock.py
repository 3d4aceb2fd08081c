"""Tokens per second of an engine, without the time that compiling takes."""

import time

from jaxspec.engine.engine import Engine
from jaxspec.engine.request import RequestOutput
from jaxspec.serve.cli.startup import StartUp


class DecodeClock:
    """Times an engine's steps, leaving out those in which it compiled a program.

    Args:
      engine: whose steps to run.
      start_up: what the engine reports to; a line that comes during a step is a program compiled.
    """

    def __init__(self, engine: Engine, start_up: StartUp):
        self._engine, self._start_up = engine, start_up
        self._tokens = 0
        self._seconds = 0.0

    def step(self) -> list[RequestOutput]:
        """Runs one step and returns its outputs."""
        lines = self._start_up.lines
        began = time.perf_counter()
        outputs = self._engine.step()
        if self._start_up.lines == lines:
            self._seconds += time.perf_counter() - began
            self._tokens += sum(len(output.tokens) for output in outputs)
        return outputs

    @property
    def tokens_per_second(self) -> float | None:
        """None while nothing was measured."""
        return self._tokens / self._seconds if self._tokens else None
