"""Training data: the target's own answers to prompts, written once in chunks and read back as token sequences.

A drafter learns to guess its target, so the text to learn from is the target's. Every chunk is a file that appears when
it is complete; an interrupted run goes on after the last one.
"""

import hashlib
import json
import os
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from jaxspec.config import SamplingParams
from jaxspec.training.prompts import Prompt

if TYPE_CHECKING:
    from jaxspec.engine.engine import Engine


CHUNK_FIELDS = ("tokens", "lengths", "prompt_lengths", "temperatures", "sources")


@dataclass(frozen=True)
class AnswerConfig:
    """How answers are written.

    Attributes:
      temperatures: taken in turn, one a prompt.
      max_prompt_tokens: longer prompts (chat template included) are skipped.
      max_answer_tokens: an answer is cut here.
      chunk: prompts a file.
    """

    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    max_prompt_tokens: int = 256
    max_answer_tokens: int = 384
    chunk: int = 4096
    seed: int = 0


@dataclass(frozen=True)
class Examples:
    """Prompts with their answers, end to end.

    Attributes:
      tokens: int32 [total].
      offsets: int64 [examples + 1]; example i is tokens[offsets[i]:offsets[i + 1]].
      prompt_lengths: int32 [examples], where each answer begins.
      temperatures: float32 [examples].
      sources: str [examples], where each prompt came from.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    prompt_lengths: np.ndarray
    temperatures: np.ndarray
    sources: np.ndarray

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> np.ndarray:
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]

    @property
    def lengths(self) -> np.ndarray:
        """int64 [examples], tokens of prompt and answer."""
        return np.diff(self.offsets)

    def select(self, chosen: np.ndarray) -> "Examples":
        """The chosen examples, in that order."""
        parts = [self[index] for index in chosen]
        return Examples(
            np.concatenate([np.zeros(0, np.int32), *parts]),
            np.cumsum([0, *map(len, parts)]),
            self.prompt_lengths[chosen],
            self.temperatures[chosen],
            self.sources[chosen],
        )


def write_answers(
    engine: "Engine",
    encode: Callable[[Prompt], list[int]],
    prompts: Sequence[Prompt],
    config: AnswerConfig,
    folder: Path,
    report: Callable[[int, int, int], None],
) -> None:
    """Lets the target answer every prompt, chunk by chunk; finished chunks in `folder` are kept.

    The next chunk begins while the last answers of one are still being written, so the engine's slots stay full.

    Args:
      encode: a prompt's token ids, chat template included.
      report: called after each step with (answers there, prompts to answer, answer tokens written by this call).
    Raises:
      ValueError: `folder` holds answers to other prompts or made with other settings.
    """
    claim_answers(folder, prompts, config)
    todo: list[_Chunk] = []
    for number, begin in enumerate(range(0, len(prompts), config.chunk)):
        path = folder / f"{number:05d}.npz"
        if not path.is_file():
            todo.append(_Chunk(path, begin, prompts[begin : begin + config.chunk]))
    total = sum(len(chunk.prompts) for chunk in todo)
    owners: dict[int, tuple[_Chunk, int]] = {}
    done = tokens = 0
    waiting = iter(todo)
    while True:
        while len(owners) < 2 * engine.config.slots and (chunk := next(waiting, None)):
            owners |= {request: (chunk, index) for request, index in chunk.begin_with(engine, encode, config)}
            done += len(chunk.prompts) - len(chunk.unfinished)
            chunk.write_if_finished()
        if not owners:
            return
        for output in engine.step():
            chunk, index = owners[output.request_id]
            chunk.answers[index] += output.tokens
            tokens += len(output.tokens)
            if output.finish_reason is not None:
                del owners[output.request_id]
                chunk.unfinished.remove(index)
                chunk.write_if_finished()
                done += 1
        report(done, total, tokens)


def claim_answers(folder: Path, prompts: Sequence[Prompt], config: AnswerConfig) -> None:
    """Notes in `folder` what its chunks answer, or checks that they answer this.

    Raises:
      ValueError: naming the setting, where they answer other prompts or were made with other settings.
    """
    folder.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256(json.dumps([asdict(prompt) for prompt in prompts]).encode()).hexdigest()
    wanted = json.loads(json.dumps({"prompts": digest, **asdict(config)}))
    path = folder / "settings.json"
    if not path.is_file():
        path.write_text(json.dumps(wanted, indent=1))
        return
    try:
        found = dict(json.loads(path.read_text()))
    except (ValueError, TypeError):
        raise ValueError(f"{path}: not the settings of answers; use another folder or remove it") from None
    for field, value in wanted.items():
        if found.get(field) != value:
            raise ValueError(
                f"{path} {field}: found {found.get(field)!r}, expected {value!r}; use another folder or remove it"
            )


def read_answers(folder: Path) -> Examples:
    """Reads all chunks of `folder`, in order; answers too short to hold an anchor and its label are left out.

    Raises:
      ValueError: there are none, or naming a file that cannot be read.
    """
    paths = sorted(folder.glob("[0-9]*.npz"))
    if not paths:
        raise ValueError(f"{folder}: no answers there; run the stage 'answers' first")
    chunks = []
    for path in paths:
        try:
            # By itself np.load leaves a file open that it cannot read.
            with path.open("rb") as opened, np.load(opened) as file:
                chunks.append({name: file[name] for name in CHUNK_FIELDS})
        except (ValueError, OSError, EOFError, KeyError, zipfile.BadZipFile):
            raise ValueError(f"{path}: not a readable file of answers; remove it and run the stage 'answers'") from None
    joined = {name: np.concatenate([chunk[name] for chunk in chunks]) for name in CHUNK_FIELDS}
    examples = Examples(
        joined["tokens"].astype(np.int32),
        np.concatenate([[0], np.cumsum(joined["lengths"], dtype=np.int64)]),
        joined["prompt_lengths"],
        joined["temperatures"],
        joined["sources"],
    )
    return examples.select(np.flatnonzero(examples.lengths - examples.prompt_lengths >= 2))


def split_examples(examples: Examples, held_out: int, seed: int) -> tuple[Examples, Examples]:
    """Splits into (training, held-out): `held_out` examples drawn at random, but never more than a tenth.

    Raises:
      ValueError: there are fewer than two.
    """
    if len(examples) < 2:
        raise ValueError(f"answers: found {len(examples)} of two tokens or more, expected at least 2; write more")
    order = np.random.default_rng(seed).permutation(len(examples))
    count = min(held_out, max(1, len(examples) // 10))
    return examples.select(np.sort(order[count:])), examples.select(np.sort(order[:count]))


class _Chunk:
    """One file's prompts and their answers as they come."""

    def __init__(self, path: Path, begin: int, prompts: Sequence[Prompt]):
        self.path, self.begin, self.prompts = path, begin, prompts
        self.encoded: dict[int, list[int]] = {}
        self.temperatures: dict[int, float] = {}
        self.answers: dict[int, list[int]] = {}
        self.unfinished: set[int] = set()

    def begin_with(
        self, engine: "Engine", encode: Callable[[Prompt], list[int]], config: AnswerConfig
    ) -> list[tuple[int, int]]:
        """Hands the prompts to the engine; returns (request, index) of each that is short enough."""
        requests = []
        for index, prompt in enumerate(self.prompts):
            place = self.begin + index
            ids = encode(prompt)
            if len(ids) > config.max_prompt_tokens:
                continue
            temperature = config.temperatures[place % len(config.temperatures)]
            seed = (config.seed * 1_000_003 + place) % 2**32
            sampling = SamplingParams(temperature=temperature, max_tokens=config.max_answer_tokens, seed=seed)
            requests.append((engine.add(ids, sampling), index))
            self.encoded[index], self.temperatures[index], self.answers[index] = ids, temperature, []
        self.unfinished = set(self.answers)
        return requests

    def write_if_finished(self) -> None:
        """Writes the file once every answer is there."""
        if self.unfinished:
            return
        sequences = [ids + self.answers[index] for index, ids in self.encoded.items()]
        partial = self.path.with_name(f".{self.path.name}")
        with partial.open("wb") as file:
            np.savez_compressed(
                file,
                tokens=np.array([token for sequence in sequences for token in sequence], np.int32),
                lengths=np.array([len(sequence) for sequence in sequences], np.int32),
                prompt_lengths=np.array([len(ids) for ids in self.encoded.values()], np.int32),
                temperatures=np.array(list(self.temperatures.values()), np.float32),
                sources=np.array([self.prompts[index].source for index in self.encoded], np.str_),
            )
        os.replace(partial, self.path)
