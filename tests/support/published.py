"""Published checkpoints made on the spot: a model of random weights, and a tokenizer of single bytes."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from jaxspec.model.families.registry import FAMILIES, family_of
from jaxspec.model.layers.parameters import weight_specs


def write_model(folder: Path, config: dict[str, Any], scale: float) -> Path:
    """A Hugging Face folder of `config`, its matrices drawn with deviation `scale`, its norms with 1."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    family = FAMILIES[family_of(config)]
    draw = np.random.default_rng(1)
    tensors = {}
    for spec in weight_specs(family.build(family.read_config(config), 1, jnp.float32)):
        values = draw.standard_normal(spec.shape) * (1.0 if len(spec.shape) == 1 else scale)
        tensors[family.source_names(spec.name)[0]] = values.astype(np.float32)
    save_file(tensors, folder / "model.safetensors")
    return folder


def write_byte_tokenizer(folder: Path, settings: dict[str, Any]) -> None:
    """256 bytes, then <s> and </s>; `settings` become tokenizer_config.json."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
