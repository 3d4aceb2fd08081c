"""Arrays on disk: a manifest, and parts of bounded size that Orbax writes and each device reads its slice of.

A checkpoint is a folder with `jaxspec.json` (the manifest and the sign that the folder is complete) and `params/PART`,
one Orbax checkpoint a part. A part holds a group of tensors (a layer's); a group too large for one part has several,
and a tensor too large for one is cut into slabs along the axis that a mesh would split.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from orbax.checkpoint import v1 as ocp

FORMAT_VERSION = 2
MANIFEST = "jaxspec.json"
PARAMS = "params"
DTYPES = ("float32", "bfloat16", "float16")
MAX_PART_BYTES = 256 * 10**6  # While a part is written, Orbax's buffers hold it once or twice more.
CHECKED_ON_LOADING = 20 * 10**9  # Bytes of weights whose digests take seconds.
CHUNK_BYTES = (
    16 * 2**20
)  # What one read fetches at least: small against a part, so a device reads little but its slice.


@dataclass(frozen=True)
class Tensor:
    """One stored array; `axis` is the one it is cut along if it does not fit a part."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    axis: int = 0

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return int(np.prod(self.shape)) * jnp.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Slab:
    """The indices `start` to `stop` of a tensor along its axis; most slabs are whole tensors."""

    tensor: Tensor
    start: int
    stop: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The slab's own shape."""
        axis = self.tensor.axis
        return (*self.tensor.shape[:axis], self.stop - self.start, *self.tensor.shape[axis + 1 :])

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.tensor.nbytes // self.tensor.shape[self.tensor.axis] * (self.stop - self.start)

    @property
    def whole(self) -> bool:
        """Whether this is all of its tensor."""
        return self.shape == self.tensor.shape


@dataclass(frozen=True)
class Part:
    """What one Orbax checkpoint holds: slabs of different tensors, stored under their tensors' names."""

    name: str
    slabs: tuple[Slab, ...]

    @property
    def nbytes(self) -> int:
        """Size of the arrays in bytes."""
        return sum(slab.nbytes for slab in self.slabs)


Digests = Mapping[str, str]  # of one part: tensor name → sha256 of the slab's bytes, row-major, little-endian


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
            length = tensor.shape[tensor.axis]
            count = -(-length // max(1, max_part_bytes * length // tensor.nbytes))
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


def write_part(folder: Path, part: Part, arrays: Mapping[str, np.ndarray]) -> Digests:
    """Writes one part into `folder` (it appears whole or not at all) and returns its digests."""
    with _orbax():
        ocp.save(_part_path(folder, part).absolute(), dict(arrays))
    return {name: digest(array) for name, array in arrays.items()}


def digest(array: np.ndarray) -> str:
    """sha256 of an array's bytes."""
    return hashlib.sha256(np.ascontiguousarray(array).view(np.uint8).data).hexdigest()


def seal(table: Mapping[str, Any]) -> str:
    """sha256 of a manifest's content, apart from the seal itself, as JSON with sorted keys and no spaces."""
    content = {key: value for key, value in table.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes `jaxspec.json`, the last file of a checkpoint."""
    rows: dict[str, dict[str, Any]] = {}
    for part in manifest.parts:
        for slab in part.slabs:
            tensor = slab.tensor
            row = rows.setdefault(
                tensor.name,
                {"name": tensor.name, "shape": tensor.shape, "dtype": tensor.dtype, "axis": tensor.axis, "slabs": []},
            )
            sha256 = manifest.digests[part.name][tensor.name]
            row["slabs"].append({"part": part.name, "start": slab.start, "stop": slab.stop, "sha256": sha256})
    table = {"format": FORMAT_VERSION, **manifest.about, "tensors": list(rows.values())}
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
        rows = table.pop("tensors")
        if len({row["name"] for row in rows}) < len(rows):
            raise ValueError("tensors: one of them is listed twice")
        for row in rows:
            for name, slab, sha256 in _read_row(row):
                parts.setdefault(name, []).append(slab)
                digests.setdefault(name, {})[slab.tensor.name] = sha256
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"{folder / MANIFEST}: damaged or of another version: {_one_line(error)}") from error
    return Manifest(table, tuple(Part(name, tuple(parts[name])) for name in parts), digests)


def _read_row(row: Mapping[str, Any]) -> list[tuple[str, Slab, str]]:
    """One tensor's part, slab and digest for each of its slabs; raises ValueError unless they tile it in order."""
    name, shape, dtype, axis = row["name"], row["shape"], row["dtype"], row["axis"]
    if not isinstance(name, str) or not name:
        raise ValueError(f"tensor: found the name {name!r}, expected text")
    if not isinstance(shape, list) or not shape or not all(type(size) is int and size > 0 for size in shape):
        raise ValueError(f"tensor {name} shape: found {shape!r}, expected a list of sizes")
    if dtype not in DTYPES:
        raise ValueError(f"tensor {name} dtype: found {dtype!r}, expected one of {', '.join(DTYPES)}")
    if type(axis) is not int or not 0 <= axis < len(shape):
        raise ValueError(f"tensor {name} axis: found {axis!r}, expected 0 to {len(shape) - 1}")
    tensor = Tensor(name, tuple(shape), dtype, axis)
    pieces: dict[str, tuple[Slab, str]] = {}
    end = 0
    for piece in row["slabs"]:
        part, start, stop, sha256 = piece["part"], piece["start"], piece["stop"], piece["sha256"]
        if not isinstance(part, str) or not re.fullmatch(r"\w[\w.-]*", part):
            raise ValueError(f"tensor {name} part: found {part!r}, expected a folder's name")
        if type(start) is not int or type(stop) is not int or start != end or not start < stop <= shape[axis]:
            raise ValueError(f"tensor {name} slab: found {start!r} to {stop!r}, expected one from {end} on")
        if not isinstance(sha256, str) or not re.fullmatch("[0-9a-f]{64}", sha256):
            raise ValueError(f"tensor {name} sha256: found {sha256!r}, expected 64 hexadecimal digits")
        if part in pieces:
            raise ValueError(f"tensor {name} part: found {part} twice")
        pieces[part] = Slab(tensor, start, stop), sha256
        end = stop
    if end != shape[axis]:
        raise ValueError(f"tensor {name}: found slabs up to {end}, expected {shape[axis]}")
    return [(part, slab, sha256) for part, (slab, sha256) in pieces.items()]


def load_arrays(
    folder: Path,
    manifest: Manifest,
    dtype: Any,
    sharding: Callable[[Tensor], jax.sharding.Sharding],
) -> dict[str, jax.Array]:
    """Reads every tensor, cast to `dtype`, onto the devices that `sharding` names; each device gets its own slice.

    Digests are compared first where that takes seconds; of a larger checkpoint only `verify` compares them.

    Raises:
      ValueError: naming the part, if it is missing or damaged.
    """
    if sum(part.nbytes for part in manifest.parts) <= CHECKED_ON_LOADING:
        verify(folder, manifest)
    arrays: dict[str, jax.Array] = {}
    pending: dict[str, list[tuple[Slab, np.ndarray]]] = {}
    for part in manifest.parts:
        wanted = {
            slab.tensor.name: jax.ShapeDtypeStruct(slab.shape, dtype, sharding=sharding(slab.tensor))
            if slab.whole
            else np.empty(slab.shape, dtype)
            for slab in part.slabs
        }
        read = _read(folder, part, wanted)
        for slab in part.slabs:
            name = slab.tensor.name
            if slab.whole:
                arrays[name] = read[name]
                continue
            slabs = pending.setdefault(name, [])
            slabs.append((slab, read[name]))
            if sum(s.stop - s.start for s, _ in slabs) == slab.tensor.shape[slab.tensor.axis]:
                slabs.sort(key=lambda piece: piece[0].start)
                arrays[name] = _join(slab.tensor, pending.pop(name), sharding(slab.tensor))
    return arrays


def verify(folder: Path, manifest: Manifest, progress: Callable[[Part], None] = lambda part: None) -> None:
    """Reads every part back and compares digests.

    Raises:
      ValueError: naming the part and tensor that differs or cannot be read.
    """
    for part in manifest.parts:
        read = _read(folder, part, {s.tensor.name: np.empty(s.shape, s.tensor.dtype) for s in part.slabs})
        for name, expected in manifest.digests[part.name].items():
            if digest(read[name]) != expected:
                raise ValueError(
                    f"{_part_path(folder, part)}: {name} differs from its digest: damaged, convert it again"
                )
        progress(part)


def partial_folder(folder: Path) -> Path:
    """Where a checkpoint is written until it is complete."""
    return folder.with_name(folder.name + ".partial")


def _part_path(folder: Path, part: Part) -> Path:
    return folder / PARAMS / part.name


def _read(folder: Path, part: Part, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Restores a part as the abstract arrays in `wanted` say (on devices, or as NumPy arrays)."""
    path = _part_path(folder, part)
    try:
        with _orbax():
            return ocp.load(path.absolute(), dict(wanted))
    except Exception as error:  # damaged data reaches us as whatever the storage library raises, bare Exception too
        raise ValueError(f"{path}: cannot be read, convert it again: {_one_line(error)}") from error


def _join(tensor: Tensor, slabs: list[tuple[Slab, np.ndarray]], sharding: jax.sharding.Sharding) -> jax.Array:
    """Puts a tensor's slabs on the devices, each device's slice joined from the slabs that it crosses."""

    def local(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None
        before, after = index[: tensor.axis], index[tensor.axis + 1 :]
        start, stop, _ = index[tensor.axis].indices(tensor.shape[tensor.axis])
        crossed = [
            array[(*before, slice(max(start - slab.start, 0), stop - slab.start), *after)]
            for slab, array in slabs
            if slab.start < stop and start < slab.stop
        ]
        return np.concatenate(crossed, axis=tensor.axis)

    return jax.make_array_from_callback(tensor.shape, sharding, local)


def _orbax() -> ocp.Context:
    context = ocp.Context()
    context.array.saving.use_compression = False  # Weights barely compress, and it costs most of the time.
    context.array.saving.storage_options.chunk_byte_size = CHUNK_BYTES
    context.memory.deepcopy_host_arrays = False  # The save has ended before its arrays are touched again.
    return context


def _one_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
