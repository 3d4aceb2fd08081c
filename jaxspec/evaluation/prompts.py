"""What an evaluation asks: prompts of one turn or several, and the requests that they become."""

import hashlib
import json
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from jaxspec.prompt_files import read_conversations


@dataclass(frozen=True)
class Prompt:
    """What a user says, turn by turn; `set` is the stem of the file that it came from."""

    set: str
    id: str
    category: str
    turns: tuple[str, ...]


@dataclass(frozen=True)
class Request:
    """One turn of a prompt, ready to be decoded."""

    prompt: Prompt
    turn: int
    tokens: list[int]

    @property
    def key(self) -> tuple[str, str, int]:
        """What identifies it: set, id and turn."""
        return self.prompt.set, self.prompt.id, self.turn


def read_prompts(path: Path, limit: int | None = None) -> list[Prompt]:
    """Reads a JSON Lines file of objects with `id`, `turns` and, if they have one, `category`.

    Args:
      limit: prompts at most, from the beginning.
    Raises:
      ValueError: naming file, line and field.
    """
    prompts: dict[str, Prompt] = {}
    for conversation in islice(read_conversations(path), limit):
        where, fields = conversation.where, conversation.fields
        name = str(fields.get("id", where.rpartition(" ")[2]))
        if name in prompts:
            raise ValueError(f"{where}: id: found {name!r} twice, expected one prompt of each id")
        prompts[name] = Prompt(path.stem, name, str(fields.get("category", path.stem)), conversation.turns)
    if not prompts:
        raise ValueError(f"{path}: found no prompts, expected at least 1")
    return list(prompts.values())


def request_seed(seed: int, key: tuple[str, str, int]) -> int:
    """A request's own 32-bit seed, whatever else is evaluated."""
    digest = hashlib.sha256(json.dumps([seed, *key]).encode()).digest()
    return int.from_bytes(digest[:4], "big")
