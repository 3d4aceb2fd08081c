"""What a training run leaves behind: the drafter in the published DFlash layout, its record and its curve."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from jaxspec.model.families.config import DFlashConfig
from jaxspec.training.trainer import Parameters


def export_drafter(
    folder: Path,
    config: DFlashConfig,
    parameters: Parameters,
    record: Mapping[str, Any],
    history: Sequence[Mapping[str, Any]],
) -> None:
    """Writes `config.json`, `model.safetensors` (bfloat16), `training.json` (the record) and `curve.png`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(published_config(config), indent=2) + "\n")
    tensors = {name: np.asarray(value).astype(ml_dtypes.bfloat16) for name, value in parameters.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "training.json").write_text(json.dumps(record, indent=2) + "\n")
    save_curve(history, folder / "curve.png")


def published_config(config: DFlashConfig) -> dict[str, Any]:
    """A drafter's `config.json` in the keys of the published checkpoints; `read_dflash_config` reads it back.

    Raises:
      ValueError: layers slide over windows of different lengths, or differ in causality: no published key says that.
    """
    windows = set(config.windows) - {0}
    if len(windows) > 1:
        raise ValueError(f"windows: found {config.windows}, expected one length for all sliding layers")
    if len(set(config.causal)) > 1 and config.causal != tuple(window > 0 for window in config.windows):
        raise ValueError(f"causal: found {config.causal}, expected all layers alike, or just the sliding ones")
    rope = asdict(config.rope)
    theta, kind = rope.pop("theta"), rope.pop("kind")
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": theta,
        "rope_scaling": None if kind == "default" else {"rope_type": kind, **rope},
        "max_position_embeddings": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
        "layer_types": ["sliding_attention" if window else "full_attention" for window in config.windows],
        "sliding_window": max(config.windows) or None,
        "use_sliding_window": bool(windows),
        "num_target_layers": config.num_target_layers,
        "block_size": config.block_size,
        "is_causal": config.causal[0] if len(set(config.causal)) == 1 else None,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "dflash_config": {
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.target_layer_ids),
            "input_embedding_scale": config.input_embedding_scale,
            "output_multiplier": config.output_multiplier,
            "final_logit_softcapping": config.final_logit_softcapping,
        },
    }


def save_curve(history: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draws loss, and acceptance as training measures it, over the steps; one picture with two panels."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    loss, tau = figure.subplots(1, 2)
    measured = [entry for entry in history if "held_out" in entry]
    for axes, name, title in ((loss, "loss", "loss (nats, weighted)"), (tau, "tau", "tokens a round, greedy chain")):
        axes.plot([entry["step"] for entry in history], [entry[name] for entry in history], alpha=0.5, label="training")
        points = [entry["step"] for entry in measured], [entry["held_out"][name] for entry in measured]
        axes.plot(*points, marker="o", label="held out")
        axes.set(xlabel="step", title=title)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=110)
