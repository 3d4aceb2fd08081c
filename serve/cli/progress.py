"""How far a long stage is, on stderr."""

import sys
import time

from jaxspec.serve.cli.startup import say


class Progress:
    """Shows a line that rewrites itself on a terminal; elsewhere prints a new line now and then."""

    def __init__(self, name: str):
        self._name = name
        self._began = self._shown = time.monotonic()
        self._terminal = sys.stderr.isatty()

    def rate(self, count: float) -> float:
        """How many of `count` there were a second since the beginning."""
        return count / max(time.monotonic() - self._began, 1e-9)

    def show(self, done: int, total: int, text: str, *, keep: bool = False) -> None:
        """Shows where things stand; a line to `keep` is always printed and stays."""
        now = time.monotonic()
        if not keep and now - self._shown < (0.2 if self._terminal else 5.0) and done < total:
            return
        self._shown = now
        line = f"{self._name} {done:,}/{total:,}  {text}"
        if self._terminal:
            sys.stderr.write(f"\r{line}\x1b[K" + ("\n" if keep else ""))
            sys.stderr.flush()
        else:
            say(line)

    def close(self) -> None:
        """Ends the line."""
        if self._terminal:
            sys.stderr.write("\n")
