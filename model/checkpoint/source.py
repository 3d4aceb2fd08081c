"""What conversion reads a model from: named tensors, of which a few rows at a time are read.

Whatever the format, a source presents a Hugging Face `config.json` and Hugging Face tensor names.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class SourceTensor:
    """Shape and dtype of a tensor in a source; `dtype` is the one it is kept in unless another is asked for."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """How many bytes it takes in that dtype."""
        return int(np.prod(self.shape)) * jnp.dtype(self.dtype).itemsize


class Source(Protocol):
    """A published checkpoint.

    Attributes:
      path: the folder or file.
      config: its `config.json`, or the equivalent of one.
      tensors: every tensor, by Hugging Face name, in the order in which they lie in the files.
      fingerprint: changes when the files do.
    """

    path: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, SourceTensor]
    fingerprint: str

    def read(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Rows `start` to `stop` of the tensor `name`, in float32 or the tensor's own dtype.

        Raises:
          ValueError: if the file has been cut short meanwhile.
        """
        ...

    def write_tokenizer(self, folder: Path) -> None:
        """Puts the tokenizer's files, chat template and generation settings into `folder`.

        Raises:
          ValueError: if the tokenizer is of a kind that is not read.
        """
        ...


def fingerprint(files: list[Path]) -> str:
    """sha256 over the files' names, sizes and times of change; reading all of a large checkpoint would take minutes."""
    states = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in sorted(files)]
    return hashlib.sha256(json.dumps(states).encode()).hexdigest()
