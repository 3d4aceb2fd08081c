"""From converted checkpoints to models on a mesh: first whether they fit, then the weights."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax

from jaxspec.config import EngineConfig
from jaxspec.engine.memory import available_bytes, wanted_context
from jaxspec.engine.memory_plan import placement_of, plan_models
from jaxspec.model.checkpoint.description import describe_checkpoint
from jaxspec.model.checkpoint.loading import load_drafter, load_target, open_checkpoint
from jaxspec.model.families.protocols import Drafter, Target
from jaxspec.model.text.tokenizer import Tokenizer
from jaxspec.sharding.mesh import make_mesh


@dataclass(frozen=True)
class LoadedModels:
    """A target and its drafter (or None), filled with arrays on `mesh`, and the target's tokenizer."""

    target: Target
    drafter: Drafter | None
    mesh: jax.sharding.Mesh
    tokenizer: Tokenizer


def load_models(
    target: Path | str, drafter: Path | str | None, config: EngineConfig, report: Callable[[str], None]
) -> LoadedModels:
    """Loads converted checkpoints onto `config.devices` devices.

    Args:
      report: gets a line at each stage.

    Raises:
      ValueError: in one line, for a folder that is not a finished converted checkpoint, or models and settings
        that do not fit together, before any weight is read.
    """
    mesh = make_mesh(config.devices)
    plan = plan_models(
        describe_checkpoint(open_checkpoint(target), "target"),
        None if drafter is None else describe_checkpoint(open_checkpoint(drafter), "drafter"),
        config,
    )
    context = wanted_context(config, plan.max_context)
    free = available_bytes(mesh)
    tokens = config.cache_tokens or context
    if free is not None and (refusal := plan.shortfall(int(config.memory_fraction * free), tokens)):
        raise ValueError(refusal)
    report(f"loading target {target}")
    target_module = load_target(Path(target), mesh, placement=placement_of(config))
    tokenizer = Tokenizer.from_checkpoint(Path(target))
    drafter_module: Drafter | None = None
    if drafter is not None:
        report(f"loading drafter {drafter}")
        drafter_module = load_drafter(Path(drafter), mesh, target_module.config)
        # Most drafters bring no tokenizer: they speak in the target's ids.
        if (Path(drafter) / "tokenizer" / "tokenizer.json").is_file():
            check_tokenizers(tokenizer, Tokenizer.from_checkpoint(Path(drafter)))
    return LoadedModels(target_module, drafter_module, mesh, tokenizer)


def check_tokenizers(target: Tokenizer, drafter: Tokenizer) -> None:
    """Raises ValueError where the drafter's tokenizer gives other ids than the target's."""
    if target.fingerprint != drafter.fingerprint:
        raise ValueError(
            f"drafter tokenizer: found fingerprint {drafter.fingerprint[:12]}, but the target's is "
            f"{target.fingerprint[:12]}: a drafter of another tokenizer"
        )
