"""Prompt files as they are read everywhere: UTF-8 text, a prompt a line, faults named by file and line."""

import json
import reprlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def numbered_lines(path: Path) -> Iterator[tuple[str, str]]:
    """Yields (file and line number, line) for every line that is not blank.

    Only a line feed ends a line: U+2028 and its kin may stand inside JSON strings and prompts.

    Raises:
      ValueError: a line is not UTF-8; names file and line.
    """
    for number, raw in enumerate(path.read_bytes().split(b"\n"), 1):
        where = f"{path} line {number}"
        try:
            line = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{where}: not UTF-8: found byte 0x{raw[error.start]:02x}; convert the file") from None
        if line.strip():
            yield where, line


def conversation(where: str, line: str) -> dict[str, Any]:
    """The JSON object of a line; its "turns" are a list of at least one text, none of them empty.

    Raises:
      ValueError: beginning with `where`, for anything else, and for half a surrogate pair anywhere in it.
    """
    try:
        raw = json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError(f"{where}: not JSON") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{where}: found {reprlib.repr(raw)}, expected an object with 'turns'")
    turns = raw.get("turns")
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
        raise ValueError(f"{where}: turns: found {reprlib.repr(turns)}, expected a list of texts")
    try:
        json.dumps(raw, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise ValueError(f"{where}: found {half!r}, half a surrogate pair, expected whole characters") from None
    return raw
