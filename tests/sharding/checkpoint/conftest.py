"""The arrays of a small checkpoint, and the checkpoint."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from jaxspec.sharding.checkpoint.manifest import partition
from tests.support.checkpoints import GROUPS, write


@pytest.fixture(scope="session")
def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {t.name: (9 * rng.standard_normal(t.shape)).astype(t.dtype) for group in GROUPS.values() for t in group}


@pytest.fixture(scope="session")
def written(tmp_path_factory, arrays) -> Path:
    parts = partition(GROUPS, max_part_bytes=700)
    folder = tmp_path_factory.mktemp("written") / "model"
    write(folder, arrays, parts).finish({"kind": "target"}, parts)
    return folder


@pytest.fixture
def checkpoint(tmp_path: Path, written: Path) -> Path:
    """A checkpoint whose larger tensors are each cut into several slabs."""
    return Path(shutil.copytree(written, tmp_path / "model"))
