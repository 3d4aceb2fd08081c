"""A checkpoint of small arrays, for the tests of what is written and read."""

from pathlib import Path

import numpy as np

from jaxspec.sharding.checkpoint.manifest import Part, Slab, Tensor
from jaxspec.sharding.checkpoint.writer import CheckpointWriter

IDENTITY = {"source": "abc", "dtype": "float32"}
ROWS = Tensor("a.rows", (48, 6), "float32")
COLUMNS = Tensor("a.columns", (5, 80), "float32")
PACKED = Tensor("a.packed", (16, 3, 8), "int32")
EIGHTH = Tensor("a.eighth", (16, 24, 5), "float8_e4m3fn")
SMALL = Tensor("norm", (7,), "float32")
GROUPS = {"a": [ROWS, COLUMNS, PACKED, EIGHTH], "norm": [SMALL]}


def cut(array: np.ndarray, slab: Slab) -> np.ndarray:
    return array[slab.start : slab.stop]


def write(folder: Path, arrays: dict[str, np.ndarray], parts: tuple[Part, ...], **options: bool) -> CheckpointWriter:
    """Writes all parts that are not finished yet and leaves the finishing to the caller."""
    writer = CheckpointWriter(folder, IDENTITY, **({"resume": False, "overwrite": False} | options))
    for part in parts:
        if part.name not in writer.finished:
            writer.add(part, {s.tensor.name: cut(arrays[s.tensor.name], s) for s in part.slabs})
    return writer
