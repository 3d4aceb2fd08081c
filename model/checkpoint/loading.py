"""Loading of converted checkpoints onto a mesh; each device reads its own slice of the weights that the mesh splits."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding

from jaxspec.model.families.config import DFlashConfig, TargetConfig, check_drafter
from jaxspec.model.families.protocols import Drafter, Target
from jaxspec.model.families.registry import FAMILIES, Family, Kind
from jaxspec.model.layers.parameters import WeightSpec, fill, weight_specs
from jaxspec.sharding.checkpoint.manifest import FLOAT_DTYPES, Manifest, Tensor, read_manifest
from jaxspec.sharding.checkpoint.reader import load_arrays
from jaxspec.sharding.layout import DEFAULT_PLACEMENT, Placement


@dataclass(frozen=True)
class Checkpoint:
    """A converted checkpoint, its weights not yet read.

    Attributes:
      folder: where it lies.
      family, kind: which model it is, "target" or "drafter".
      config: the family's config.
      raw_config: the `config.json` that it was read from.
      dtype: the weights' own.
      manifest: parts and digests, for `jaxspec.sharding.checkpoint.reader.verify`.
    """

    folder: Path
    family: str
    kind: Kind
    config: Any
    raw_config: dict[str, Any]
    dtype: str
    manifest: Manifest

    @property
    def tokenizer_folder(self) -> Path:
        """Where the tokenizer's files, chat template and generation settings lie."""
        return self.folder / "tokenizer"


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Reads a converted checkpoint's manifest.

    Raises:
      ValueError: in one line, if the folder is unfinished, damaged, or of a model that is not supported.
    """
    folder = Path(path)
    manifest = read_manifest(folder)
    about = manifest.about
    if missing := [key for key in ("kind", "family", "dtype", "config") if key not in about]:
        raise ValueError(f"{folder}: manifest {missing[0]}: missing, convert it again")
    family = FAMILIES.get(about["family"]) if isinstance(about["family"], str) else None
    if family is None:
        raise ValueError(f"{folder}: manifest family: found {about['family']!r}, expected one of {sorted(FAMILIES)}")
    for key, expected in (("kind", (family.kind,)), ("dtype", FLOAT_DTYPES)):
        if about[key] not in expected:
            raise ValueError(f"{folder}: manifest {key}: found {about[key]!r}, expected {' or '.join(expected)}")
    if not isinstance(about["config"], dict):
        raise ValueError(f"{folder}: manifest config: found {type(about['config']).__name__}, expected an object")
    try:
        config = family.read_config(about["config"])
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error
    return Checkpoint(folder, about["family"], family.kind, config, about["config"], about["dtype"], manifest)


def load_target(
    path: str | Path, mesh: jax.sharding.Mesh, dtype: Any = None, placement: Placement = DEFAULT_PLACEMENT
) -> Target:
    """Loads a target.

    Args:
      path: a converted checkpoint.
      mesh: where its weights go.
      dtype: of weights and activations; None takes the checkpoint's own.
      placement: the user's choices among the family's layouts.
    Raises:
      ValueError: in one line, if it is not a target, damaged, or its weights do not match its config.
    """
    return cast(Target, _load(open_checkpoint(path), "target", mesh, dtype, placement))


def load_drafter(path: str | Path, mesh: jax.sharding.Mesh, target_config: TargetConfig, dtype: Any = None) -> Drafter:
    """Loads a DFlash drafter made for the target of `target_config`; otherwise as `load_target`."""
    checkpoint = open_checkpoint(path)
    if isinstance(checkpoint.config, DFlashConfig):
        check_drafter(target_config, checkpoint.config)
    return cast(Drafter, _load(checkpoint, "drafter", mesh, dtype, DEFAULT_PLACEMENT))


def _load(checkpoint: Checkpoint, kind: Kind, mesh: jax.sharding.Mesh, dtype: Any, placement: Placement) -> nnx.Module:
    if checkpoint.kind != kind:
        raise ValueError(f"{checkpoint.folder}: found a {checkpoint.kind} ({checkpoint.family}), expected a {kind}")
    family: Family = FAMILIES[checkpoint.family]
    dtype = jnp.dtype(dtype or checkpoint.dtype)
    build = family.build(checkpoint.config, mesh.size, dtype, placement)
    layout = family.placed(checkpoint.config, mesh.size, placement)
    specs = {spec.name: spec for spec in weight_specs(build)}
    stored = checkpoint.manifest.tensors
    for name in sorted(set(stored) | set(specs)):
        expected = _described(specs[name]) if name in specs else "no such tensor"
        found = _described(stored[name]) if name in stored else "nothing"
        if found != expected:
            raise ValueError(
                f"{checkpoint.folder}: tensor {name}: found {found}, expected {expected}; convert it again"
            )
    wanted = {
        name: jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=NamedSharding(mesh, layout.spec(spec.axes)))
        for name, spec in specs.items()
    }
    arrays = load_arrays(checkpoint.folder, checkpoint.manifest, wanted)
    return fill(build, lambda spec: arrays.pop(spec.name))


def _described(tensor: Tensor | WeightSpec) -> str:
    """Shape and dtype; a float's dtype is left out, since it is cast."""
    dtype = str(tensor.dtype)
    return str(list(tensor.shape)) + ("" if dtype in FLOAT_DTYPES else f" of {dtype}")
