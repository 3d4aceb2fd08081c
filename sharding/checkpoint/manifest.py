"""What a checkpoint on disk holds: the manifest, parts of bounded size, and what each part holds of each tensor.

A checkpoint is a folder with `jaxspec.json` (the manifest and the sign that the folder is complete) and `params/PART`,
one Orbax checkpoint a part. A part holds a group of tensors (a layer's); a group too large for one part has several,
and a tensor too large for one is cut into slabs along its first dimension: a stack of experts into blocks of experts.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxspec.sharding.arithmetic import cdiv

FORMAT_VERSION = 3
MANIFEST = "jaxspec.json"
FLOAT_DTYPES = ("float32", "bfloat16", "float16")
DTYPES = (*FLOAT_DTYPES, "int32", "float8_e4m3fn")
MAX_PART_BYTES = 256 * 10**6  # While a part is written, Orbax's buffers hold it once or twice more.


@dataclass(frozen=True)
class Tensor:
    """The name, shape and dtype of one stored array."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """How many bytes it takes."""
        return int(np.prod(self.shape)) * jnp.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Slab:
    """A tensor from `start` to `stop` along its first dimension; most slabs are whole tensors."""

    tensor: Tensor
    start: int
    stop: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the slab itself."""
        return (self.stop - self.start, *self.tensor.shape[1:])

    @property
    def nbytes(self) -> int:
        """How many bytes it takes."""
        return self.tensor.nbytes // self.tensor.shape[0] * (self.stop - self.start)


@dataclass(frozen=True)
class Part:
    """What one Orbax checkpoint holds: slabs of different tensors, stored under their tensors' names."""

    name: str
    slabs: tuple[Slab, ...]

    @property
    def nbytes(self) -> int:
        """How many bytes its arrays take."""
        return sum(slab.nbytes for slab in self.slabs)


# Of one part: the name of each tensor → sha256 of its slab's bytes, row-major and little-endian.
Digests = Mapping[str, str]


@dataclass(frozen=True)
class Manifest:
    """A checkpoint's contents: its parts, their digests, and what the writer said about them (`about`)."""

    about: Mapping[str, Any]
    parts: tuple[Part, ...]
    digests: Mapping[str, Digests]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name."""
        return {slab.tensor.name: slab.tensor for part in self.parts for slab in part.slabs}


def partition(groups: Mapping[str, Sequence[Tensor]], max_part_bytes: int = MAX_PART_BYTES) -> tuple[Part, ...]:
    """Makes one part of each named group of tensors, and several where that would exceed `max_part_bytes`."""
    parts = []
    for name, tensors in groups.items():
        filled: list[list[Slab]] = [[]]
        for tensor in tensors:
            length = tensor.shape[0]
            count = cdiv(length, max(1, max_part_bytes * length // tensor.nbytes))
            bounds = [length * i // count for i in range(count + 1)]
            for start, stop in pairwise(bounds):
                slab = Slab(tensor, start, stop)
                # Two slabs of one tensor would share a name, and need not fit together anyway.
                if filled[-1] and (count > 1 or sum(s.nbytes for s in (*filled[-1], slab)) > max_part_bytes):
                    filled.append([])
                filled[-1].append(slab)
        names = [name] if len(filled) == 1 else [f"{name}-{index}" for index in range(len(filled))]
        parts += [Part(part, tuple(slabs)) for part, slabs in zip(names, filled, strict=True)]
    return tuple(parts)


def seal(table: Mapping[str, Any]) -> str:
    """sha256 of a manifest's content, apart from the seal itself, as JSON with sorted keys and no spaces."""
    content = {key: value for key, value in table.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes `jaxspec.json`, the last file of a checkpoint."""
    entries: dict[str, dict[str, Any]] = {}
    for part in manifest.parts:
        for slab in part.slabs:
            tensor = slab.tensor
            empty = {"name": tensor.name, "shape": tensor.shape, "dtype": tensor.dtype, "slabs": []}
            entry = entries.setdefault(tensor.name, empty)
            sha256 = manifest.digests[part.name][tensor.name]
            entry["slabs"].append({"part": part.name, "start": slab.start, "stop": slab.stop, "sha256": sha256})
    for entry in entries.values():  # Parts may come in any order.
        entry["slabs"].sort(key=lambda slab: slab["start"])
    table = {"format": FORMAT_VERSION, **manifest.about, "tensors": list(entries.values())}
    table["sha256"] = seal(table)
    unfinished = folder / (MANIFEST + ".tmp")
    unfinished.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    unfinished.replace(folder / MANIFEST)


def read_manifest(folder: Path) -> Manifest:
    """Reads `jaxspec.json`.

    Raises:
      ValueError: in one line, if the folder is not a complete checkpoint, or the manifest is damaged or of another
        format version.
    """
    if not (folder / MANIFEST).is_file():
        partial = partial_folder(folder)
        hint = (
            f"its conversion is unfinished ({partial}), continue it with --resume" if partial.is_dir() else "convert it"
        )
        raise ValueError(f"{folder}: no {MANIFEST}, so not a converted checkpoint; {hint}")
    try:
        table = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if not isinstance(table, dict):
            raise ValueError(f"found {type(table).__name__}, expected an object")
        version = table.pop("format")
        if version != FORMAT_VERSION:
            raise ValueError(f"format: found {version}, expected {FORMAT_VERSION}; convert it again")
        if table.pop("sha256") != seal({"format": version, **table}):
            raise ValueError("sha256: its content has changed; convert it again")
        parts: dict[str, list[Slab]] = {}
        digests: dict[str, dict[str, str]] = {}
        entries = table.pop("tensors")
        if len({entry["name"] for entry in entries}) < len(entries):
            raise ValueError("tensors: one of them is listed twice")
        for entry in entries:
            for name, slab, sha256 in _read_entry(entry):
                parts.setdefault(name, []).append(slab)
                digests.setdefault(name, {})[slab.tensor.name] = sha256
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"{folder / MANIFEST}: damaged or of another version: {one_line(error)}") from error
    return Manifest(table, tuple(Part(name, tuple(parts[name])) for name in parts), digests)


def _read_entry(entry: Mapping[str, Any]) -> list[tuple[str, Slab, str]]:
    """Reads (part, slab, digest) for each slab of a tensor; raises ValueError unless they tile it in order."""
    name, shape, dtype = entry["name"], entry["shape"], entry["dtype"]
    if not isinstance(name, str) or not name:
        raise ValueError(f"tensor: found the name {name!r}, expected text")
    if not isinstance(shape, list) or not shape or not all(type(size) is int and size > 0 for size in shape):
        raise ValueError(f"tensor {name} shape: found {shape!r}, expected a list of sizes")
    if dtype not in DTYPES:
        raise ValueError(f"tensor {name} dtype: found {dtype!r}, expected one of {', '.join(DTYPES)}")
    tensor = Tensor(name, tuple(shape), dtype)
    pieces: dict[str, tuple[Slab, str]] = {}
    end = 0
    for piece in entry["slabs"]:
        part, start, stop, sha256 = piece["part"], piece["start"], piece["stop"], piece["sha256"]
        if not isinstance(part, str) or not re.fullmatch(r"\w[\w.-]*", part):
            raise ValueError(f"tensor {name} part: found {part!r}, expected a folder's name")
        if type(start) is not int or type(stop) is not int or start != end or not start < stop <= shape[0]:
            raise ValueError(f"tensor {name} slab: found {start!r} to {stop!r}, expected one from {end} on")
        if not isinstance(sha256, str) or not re.fullmatch("[0-9a-f]{64}", sha256):
            raise ValueError(f"tensor {name} sha256: found {sha256!r}, expected 64 hexadecimal digits")
        if part in pieces:
            raise ValueError(f"tensor {name} part: found {part} twice")
        pieces[part] = Slab(tensor, start, stop), sha256
        end = stop
    if end != shape[0]:
        raise ValueError(f"tensor {name}: found slabs up to {end}, expected {shape[0]}")
    return [(part, slab, sha256) for part, (slab, sha256) in pieces.items()]


def partial_folder(folder: Path) -> Path:
    """Where a checkpoint is written until it is complete."""
    return folder.with_name(folder.name + ".partial")


def one_line(error: BaseException) -> str:
    """An error's first line, at most 200 characters of it."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
