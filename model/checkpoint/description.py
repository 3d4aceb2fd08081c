"""What a model is, read without its weights: from a converted checkpoint, or from a folder with only a config.json."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxspec.model.checkpoint.loading import Checkpoint, open_checkpoint
from jaxspec.model.families.config import read_dtype
from jaxspec.model.families.registry import FAMILIES, Family, Kind, family_of
from jaxspec.sharding.checkpoint.manifest import MANIFEST


@dataclass(frozen=True)
class Description:
    """A model without its weights.

    Attributes:
      name: of the family, "kimi" say.
      config: the family's config.
      dtype: of its weights, quantised ones aside.
    """

    name: str
    config: Any
    dtype: str

    @property
    def family(self) -> Family:
        """The family's entry in the registry."""
        return FAMILIES[self.name]


def describe_checkpoint(checkpoint: Checkpoint, kind: Kind) -> Description:
    """What a converted checkpoint holds; raises ValueError if that is not a model of `kind`."""
    if checkpoint.kind != kind:
        raise ValueError(f"{checkpoint.folder}: found a {checkpoint.kind} ({checkpoint.family}), expected a {kind}")
    return Description(checkpoint.family, checkpoint.config, checkpoint.dtype)


def describe(folder: Path, kind: Kind) -> Description:
    """Reads a converted checkpoint's manifest, or else a published checkpoint's config.json.

    Raises:
      ValueError: in one line, if there is neither, or a model that is not supported or not of `kind`.
    """
    if (folder / MANIFEST).is_file():
        return describe_checkpoint(open_checkpoint(folder), kind)
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder}: found neither {MANIFEST} nor config.json, expected a checkpoint's folder")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{path}: found {type(raw).__name__}, expected a JSON object")
    try:
        name = family_of(raw)
        if FAMILIES[name].kind != kind:
            raise ValueError(f"found a {FAMILIES[name].kind} ({name}), expected a {kind}")
        return Description(name, FAMILIES[name].read_config(raw), read_dtype(raw))
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error
