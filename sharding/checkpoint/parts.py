"""How a part lies on disk: one Orbax checkpoint at its own path, each of its arrays known by a digest."""

import hashlib
from pathlib import Path

import numpy as np
from orbax.checkpoint import v1 as ocp

from jaxspec.sharding.checkpoint.manifest import Part

PARAMS = "params"
CHUNK_BYTES = 16 * 2**20  # Orbax writes a part in pieces of about this size.


def part_path(folder: Path, part: Part) -> Path:
    """Where a checkpoint in `folder` keeps a part."""
    return folder / PARAMS / part.name


def digest(array: np.ndarray) -> str:
    """sha256 of an array's bytes."""
    return hashlib.sha256(np.ascontiguousarray(array).view(np.uint8).data).hexdigest()


def orbax_context() -> ocp.Context:
    """Orbax's settings, for as long as it is entered, with which parts are written and read."""
    context = ocp.Context()
    context.array.saving.use_compression = False  # Weights barely compress, and it costs most of the time.
    context.array.saving.storage_options.chunk_byte_size = CHUNK_BYTES
    context.memory.deepcopy_host_arrays = False  # The save has ended before its arrays are touched again.
    return context
