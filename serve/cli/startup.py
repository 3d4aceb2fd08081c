"""What the commands share: one-line errors, the start-up story on stderr, the compilation cache."""

import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import typer


def say(line: str) -> None:
    """Prints a line on stderr."""
    print(line, file=sys.stderr, flush=True)


@contextmanager
def bad_input() -> Iterator[None]:
    """Turns the errors that bad input causes into one line on stderr and exit code 2.

    Put it around what reads or checks input, not around work: there a ValueError is a fault of ours, and its
    traceback is wanted.
    """
    try:
        yield
    except (ValueError, OSError) as error:
        say(f"error: {' '.join(str(error).split()) or type(error).__name__}")
        raise typer.Exit(2) from error


class StartUp:
    """Tells each stage of start-up as it is reached, with the seconds since the beginning."""

    def __init__(self) -> None:
        self._began = time.perf_counter()

    def report(self, line: str) -> None:
        """Prints one stage; fits `Engine.from_checkpoints(report=…)`."""
        say(f"{time.perf_counter() - self._began:6.1f} s  {line}")


def banner(rows: Iterable[tuple[str, str]]) -> None:
    """Prints names and values as a two-column table."""
    from rich.console import Console
    from rich.table import Table

    grid = Table.grid(padding=(0, 2, 0, 1))
    grid.add_column(style="dim")
    for row in rows:
        grid.add_row(*row)
    Console(stderr=True).print(grid)


def use_compilation_cache() -> None:
    """Keeps compiled programs between runs, in JAX_COMPILATION_CACHE_DIR or the user's cache folder."""
    import jax

    if not jax.config.values["jax_compilation_cache_dir"]:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        jax.config.update("jax_compilation_cache_dir", str(base / "jaxspec" / "xla"))
