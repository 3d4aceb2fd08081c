"""Options that several commands have, and those whose text holds several numbers or a number of bytes."""

import re
from typing import Annotated

from typer import Option

Budget = Annotated[int, Option(help="Tree nodes verified a round; 0 decodes plainly.")]
TopKCap = Annotated[int, Option(help="Drafter's best tokens considered at each depth; 1 makes the tree a chain.")]
Devices = Annotated[int, Option(help="Devices to spread the models over.")]
ExpertLayout = Annotated[
    str, Option(help="tensor splits each expert over the devices, expert gives a device whole ones.")
]
ShardCache = Annotated[
    str | None, Option(help="sequence spreads each page's rows over the devices, where the target allows it.")
]
MemoryFraction = Annotated[float, Option(help="Share of each device's memory that weights and caches may take.")]

# What an int32 and a uint32 of the API hold.
LARGEST_COUNT, LARGEST_SEED = 2**31 - 1, 2**32 - 1
DTYPES = ("bfloat16", "float16", "float32")


def integers(option: str, text: str) -> list[int]:
    """Reads whole numbers with commas between, "0,16,32".

    Raises:
      ValueError: naming the option and what was found.
    """
    return [int(number) for number in _parts(option, text, int, "whole numbers")]


def decimals(option: str, text: str) -> list[float]:
    """Reads numbers with commas between, "0,0.7"; raises as `integers` does."""
    return [float(number) for number in _parts(option, text, float, "numbers")]


def byte_count(option: str, text: str) -> int:
    """Reads a number of bytes, "96GB" or "80GiB"; raises ValueError, naming the option, for anything else."""
    found = re.fullmatch(r"\s*([0-9]{1,12}(?:\.[0-9]+)?)\s*([KMGT])(i?)B\s*", text)
    if found is None:
        raise ValueError(f"{option}: found {text!r}, expected a number with KB, MB, GB, TB or KiB, MiB, GiB, TiB")
    number, prefix, binary = found.groups()
    return int(float(number) * (1024 if binary else 1000) ** ("KMGT".index(prefix) + 1))


def _parts(option: str, text: str, kind: type, expected: str) -> list[str]:
    parts = text.split(",")
    for part in parts:
        try:
            kind(part)
        except ValueError:
            raise ValueError(f"{option}: found {part!r} in {text!r}, expected {expected} with commas between") from None
    return parts
