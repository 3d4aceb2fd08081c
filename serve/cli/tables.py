"""Where commands print their tables."""

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def console(width: int = 120, *, highlight: bool = True) -> "Console":
    """Prints on stdout, as wide as the terminal; `width` is for an output that is no terminal."""
    from rich.console import Console

    return Console(file=sys.stdout, width=None if sys.stdout.isatty() else width, highlight=highlight)
