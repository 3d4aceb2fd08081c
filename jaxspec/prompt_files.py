"""Prompt files as they are read everywhere: UTF-8 text, a prompt a line, faults named by file and line."""

import json
import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Conversation:
    """One line of a JSON Lines file of prompts.

    Attributes:
      where: file and line number, for messages.
      turns: what the user says, turn by turn; at least one text, none of them empty.
      fields: the line's whole JSON object.
    """

    where: str
    turns: tuple[str, ...]
    fields: Mapping[str, Any]


def read_conversations(path: Path) -> Iterator[Conversation]:
    """Yields the conversation of every line that is not blank, a JSON object with a list of texts in "turns".

    Raises:
      ValueError: naming file and line, for anything else, for half a surrogate pair, and for what is not UTF-8.
    """
    for where, line in numbered_lines(path):
        yield _conversation(where, line)


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


def _conversation(where: str, line: str) -> Conversation:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError(f"{where}: not JSON") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{where}: found {reprlib.repr(fields)}, expected an object with 'turns'")
    turns = fields.get("turns")
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
        raise ValueError(f"{where}: turns: found {reprlib.repr(turns)}, expected a list of texts")
    try:
        json.dumps(fields, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise ValueError(f"{where}: found {half!r}, half a surrogate pair, expected whole characters") from None
    return Conversation(where, tuple(turns), fields)
