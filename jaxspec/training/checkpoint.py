"""A training run's checkpoint: one file, replaced whole, that only the very same run goes on from."""

import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save_file

from jaxspec.model.families.config import DFlashConfig
from jaxspec.training.answers import Examples
from jaxspec.training.run_config import RunConfig
from jaxspec.training.trainer import Parameters, TrainingState

CHECKPOINT = "checkpoint.safetensors"


def check_checkpoint(folder: Path, drafter: DFlashConfig, run: RunConfig, examples: Examples) -> None:
    """Raises ValueError unless the checkpoint in `folder` can be read and is of this very run."""
    path = folder / CHECKPOINT
    if not path.is_file():
        raise ValueError(f"{path}: not there; run the stage 'train' first")
    try:
        with safe_open(path, framework="numpy") as file:
            found = (file.metadata() or {}).get("run")
    except SafetensorError as error:
        raise ValueError(f"{path}: not a readable checkpoint ({error}); remove it and train again") from None
    expected = fingerprint(drafter, run, examples)
    if found != expected:
        raise ValueError(
            f"{path}: belongs to another run ({found}), expected {expected}; remove it or keep the settings"
        )


def read_checkpoint(path: Path) -> tuple[Parameters, int]:
    """Reads the drafter's float32 weights in a checkpoint of `train`, and the steps that they have taken."""
    with safe_open(path, framework="numpy") as file:
        prefix, suffix = ".parameters['", "']"
        names = [key for key in file.keys() if key.startswith(prefix)]  # noqa: SIM118
        parameters = {key[len(prefix) : -len(suffix)]: jnp.asarray(file.get_tensor(key)) for key in names}
        return parameters, int(file.get_tensor(".step"))


def save_checkpoint(path: Path, state: TrainingState, purpose: str) -> None:
    """Writes a state; `purpose` is the fingerprint of its run. The file before stays until this one is whole."""
    leaves = {jax.tree_util.keystr(key): np.asarray(leaf) for key, leaf in jax.tree_util.tree_leaves_with_path(state)}
    save_file(leaves, path.with_suffix(".partial"), metadata={"run": purpose})
    os.replace(path.with_suffix(".partial"), path)


def load_checkpoint(path: Path, like: TrainingState) -> TrainingState:
    """Reads the state in a checkpoint; `like` has its structure."""
    leaves = load_file(path)
    return jax.tree_util.tree_map_with_path(lambda key, _: jnp.asarray(leaves[jax.tree_util.keystr(key)]), like)


def fingerprint(drafter: DFlashConfig, run: RunConfig, examples: Examples) -> str:
    """What makes a run the very same: the drafter, the settings and the examples."""
    return f"{drafter} {run} {len(examples)} examples of {len(examples.tokens)} tokens"
