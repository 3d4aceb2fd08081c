"""One request's answer while it comes, for commands that show it."""

import sys
from typing import Any

from jaxspec.config import SamplingParams
from jaxspec.engine.decode_clock import DecodeClock
from jaxspec.engine.engine import Engine
from jaxspec.engine.request import RequestStatistics
from jaxspec.serve.cli.startup import StartUp, say


class Answer:
    """Runs an engine for the one request that is open and gathers what comes.

    Args:
      engine: with its tokenizer, and no request open.
      prompt: token ids.
      sampling: of the request.
      start_up: what the engine reports to.
      stream: whether to write the text to stdout as it comes.

    Raises:
      ValueError: the engine refuses the prompt.
    """

    def __init__(
        self, engine: Engine, prompt: list[int], sampling: SamplingParams, start_up: StartUp, *, stream: bool = False
    ):
        assert engine.tokenizer is not None
        self._engine, self._stream = engine, stream
        self._detokenizer = engine.tokenizer.detokenizer()
        self._start_up = start_up
        self._clock = DecodeClock(engine)
        self.tokens: list[int] = []
        self.text = ""
        self.finish_reason = "interrupted"
        self.statistics: RequestStatistics | None = None
        engine.add(prompt, sampling)

    def run(self) -> None:
        """Runs to the end; after an interrupt the engine must not be used again."""
        try:
            while self._engine.has_work:
                for output in self._clock.step():
                    if self._stream and not self.tokens:
                        self._start_up.report("ready")
                    self.tokens += output.tokens
                    self._show(self._detokenizer.push(output.tokens))
                    self.finish_reason = output.finish_reason or self.finish_reason
                    self.statistics = output.statistics
        except KeyboardInterrupt:
            self.finish_reason = "interrupted"
        self._show(self._detokenizer.flush())
        if self._stream:
            print(flush=True)

    @property
    def tokens_per_second(self) -> float | None:
        """Of decoding, without compiling; None while nothing was measured."""
        return self._clock.tokens_per_second

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        statistics = self.statistics
        return {
            "text": self.text,
            "tokens": self.tokens,
            "finish_reason": self.finish_reason,
            "tokens_per_second": self.tokens_per_second,
            "rounds": statistics and statistics.rounds,
            "drafted": statistics and statistics.drafted,
            "tau": statistics and statistics.tau,
            "acceptance_by_depth": statistics and statistics.acceptance_by_depth,
        }

    def summarise(self) -> None:
        """Prints tokens, speed, τ and acceptance on stderr."""
        speed = self.tokens_per_second
        say(f"{len(self.tokens)} tokens ({self.finish_reason}), {'–' if speed is None else f'{speed:.1f}'} tokens/s")
        if self.statistics is not None:
            depths = "  ".join(f"{share:.0%}" for share in self.statistics.acceptance_by_depth)
            say(f"τ {self.statistics.tau:.2f} in {self.statistics.rounds} rounds; accepted by depth: {depths or '–'}")

    def _show(self, text: str) -> None:
        self.text += text
        if self._stream and text:
            sys.stdout.write(text)
            sys.stdout.flush()
