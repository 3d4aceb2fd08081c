"""Prompts to train on: read from files, or invented by the target itself."""

import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from jaxspec.config import SamplingParams
from jaxspec.prompt_files import numbered_lines, read_conversations

if TYPE_CHECKING:
    from jaxspec.engine.engine import Engine


@dataclass(frozen=True)
class Prompt:
    """A user's message, and where it came from."""

    text: str
    source: str


def file_prompts(path: Path) -> list[Prompt]:
    """Reads the prompts of a file: JSON lines with "turns", of which the first is taken, or one prompt a line.

    Raises:
      ValueError: naming file and line, for one that is not UTF-8 or, in a `.jsonl` file, holds no conversation.
    """
    if path.suffix != ".jsonl":
        return [Prompt(line.strip(), path.stem) for _, line in numbered_lines(path)]
    return [Prompt(conversation.turns[0], path.stem) for conversation in read_conversations(path)]


def write_prompts(path: Path, prompts: Iterable[Prompt]) -> None:
    """Writes prompts with their sources, for `read_written_prompts`."""
    lines = [json.dumps({"turns": [prompt.text], "source": prompt.source}) for prompt in prompts]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def read_written_prompts(path: Path) -> list[Prompt]:
    """Reads what `write_prompts` wrote.

    Raises:
      ValueError: naming the file, where it is missing, empty or something else.
    """
    if not path.is_file():
        raise ValueError(f"{path}: not there; run the stage 'prompts' first")
    prompts = []
    for conversation in read_conversations(path):
        source = conversation.fields.get("source")
        if not isinstance(source, str):
            raise ValueError(
                f"{conversation.where}: source: found {source!r}, expected a text; run the stage 'prompts'"
            )
        prompts.append(Prompt(conversation.turns[0], source))
    if not prompts:
        raise ValueError(f"{path}: found 0 prompts, expected at least 1; run the stage 'prompts' again")
    return prompts


def without_duplicates(prompts: Iterable[Prompt]) -> list[Prompt]:
    """The first of every set of prompts that differ only in case and white space."""
    return list({" ".join(prompt.text.casefold().split()): prompt for prompt in reversed(list(prompts))}.values())[::-1]


def invent_prompts(
    engine: "Engine",
    encode: Callable[[Prompt], list[int]],
    decode: Callable[[Sequence[int]], str],
    count: int,
    seed: int,
    report: Callable[[int, int], None],
) -> list[Prompt]:
    """Lets the target write `count` users' messages: it is given the chat template up to where the user would speak.

    (Magpie, arXiv 2406.08464.) Messages that do not end by themselves, repeat one another or do not read like a request
    are dropped and replaced, until enough are there or 6 of 7 fail.

    Args:
      encode: a prompt's token ids, chat template included.
      decode: token ids to text, control tokens left out.
      report: called with (messages found, messages wanted).
    """
    # Two messages that differ at once: what their encodings share is all that comes before a message.
    pairs = zip(encode(Prompt("0", "")), encode(Prompt("?", "")), strict=False)
    opening = [a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)]
    found: dict[str, Prompt] = {}
    batch = max(256, count // 4)
    for attempt in range(0, 7 * count, batch):
        sampling = [
            SamplingParams(temperature=1.0, max_tokens=160, seed=(seed * 7_919 + attempt + i) % 2**32)
            for i in range(batch)
        ]
        for completion in engine.generate([opening] * batch, sampling):
            text = decode(completion.tokens).strip()
            if completion.finish_reason == "stop" and reads_like_a_request(text):
                found.setdefault(" ".join(text.casefold().split()), Prompt(text, "invented"))
        report(min(len(found), count), count)
        if len(found) >= count:
            break
    return list(found.values())[:count]


def reads_like_a_request(text: str) -> bool:
    """Whether an invented message can stand as a user's: some length, begun and ended like a sentence, no refrain."""
    words = text.split()
    if not (5 <= len(words) <= 120 and len(text) <= 700 and text[0].isalnum() and text[-1] in ".?!:`)\"'"):
        return False
    return "\ufffd" not in text and len(set(words)) * 2 > len(words)
