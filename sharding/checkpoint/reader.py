"""Reading a checkpoint's arrays: each part is read once, and every device gets its slice of them."""

from collections.abc import Callable, Mapping
from pathlib import Path

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from jaxspec.sharding.checkpoint.manifest import Digests, Manifest, Part, Slab, one_line
from jaxspec.sharding.checkpoint.parts import digest, orbax_context, part_path

CHECKED_ON_LOADING = 20 * 10**9  # Bytes of weights whose digests take seconds.


def load_arrays(folder: Path, manifest: Manifest, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """Reads every tensor, cast to the dtype and put on the devices that `wanted` names for it.

    A part is read once, whatever the number of devices, and each device is given its own slice. Beside the part, the
    host holds those of the tensors that other parts complete. Digests are compared where that takes seconds; those of
    a larger checkpoint only `verify` compares.

    Raises:
      ValueError: naming the part, if it is missing or damaged.
    """
    check = sum(part.nbytes for part in manifest.parts) <= CHECKED_ON_LOADING
    arrays: dict[str, jax.Array] = {}
    pending: dict[str, list[tuple[Slab, np.ndarray]]] = {}
    for part in manifest.parts:
        read = _read(folder, part)
        if check:
            _compare(folder, part, read, manifest.digests[part.name])
        for slab in part.slabs:
            name = slab.tensor.name
            slabs = pending.setdefault(name, [])
            slabs.append((slab, read[name].astype(wanted[name].dtype, copy=False)))
            if sum(s.stop - s.start for s, _ in slabs) == slab.tensor.shape[0]:
                arrays[name] = _join(pending.pop(name), wanted[name])
    return arrays


def verify(folder: Path, manifest: Manifest, progress: Callable[[Part], None] = lambda part: None) -> None:
    """Reads every part back and compares digests.

    Raises:
      ValueError: naming the part and tensor that differs or cannot be read.
    """
    for part in manifest.parts:
        _compare(folder, part, _read(folder, part), manifest.digests[part.name])
        progress(part)


def _read(folder: Path, part: Part) -> dict[str, np.ndarray]:
    """A part's arrays as they are stored."""
    path = part_path(folder, part)
    wanted = {slab.tensor.name: np.empty(slab.shape, slab.tensor.dtype) for slab in part.slabs}
    try:
        with orbax_context():
            return ocp.load(path.absolute(), wanted)
    except Exception as error:  # damaged data reaches us as whatever the storage library raises, bare Exception too
        raise ValueError(f"{path}: cannot be read, convert it again: {one_line(error)}") from error


def _compare(folder: Path, part: Part, read: Mapping[str, np.ndarray], digests: Digests) -> None:
    for name, expected in digests.items():
        if digest(read[name]) != expected:
            raise ValueError(f"{part_path(folder, part)}: {name} differs from its digest: damaged, convert it again")


def _join(slabs: list[tuple[Slab, np.ndarray]], wanted: jax.ShapeDtypeStruct) -> jax.Array:
    """Puts a tensor's slabs on the devices, each device's slice joined from the slabs that it crosses."""
    slabs = sorted(slabs, key=lambda piece: piece[0].start)

    def local(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None
        start, stop, _ = index[0].indices(wanted.shape[0])
        crossed = [
            array[(slice(max(start - slab.start, 0), stop - slab.start), *index[1:])]
            for slab, array in slabs
            if slab.start < stop and start < slab.stop
        ]
        return crossed[0] if len(crossed) == 1 else np.concatenate(crossed)

    return jax.make_array_from_callback(wanted.shape, wanted.sharding, local)
