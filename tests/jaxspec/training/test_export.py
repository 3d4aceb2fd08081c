"""An exported drafter reads back as it was."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxspec.model.families.config import read_dflash_config
from jaxspec.model.layers.parameters import weight_specs
from jaxspec.training.export import export_drafter
from jaxspec.training.trainer import build_drafter
from tests.support.training import CAUSAL, FULL, MIXED, SLIDING, random_parameters


@pytest.mark.parametrize("config", [FULL, MIXED, SLIDING, CAUSAL], ids=["full", "mixed", "sliding", "causal"])
def test_export_reads_back(config, tmp_path):
    parameters = random_parameters(config)
    history = [{"step": 1, "loss": 2.0, "tau": 1.5, "held_out": {"loss": 2.1, "tau": 1.4}}]
    export_drafter(tmp_path, config, parameters, {"steps": 1}, history)
    assert read_dflash_config(json.loads((tmp_path / "config.json").read_text())) == config
    tensors = load_file(tmp_path / "model.safetensors")
    specs = weight_specs(lambda: build_drafter(config, parameters, jnp.bfloat16))
    assert {spec.name: spec.shape for spec in specs} == {name: value.shape for name, value in tensors.items()}
    assert len(tensors) == 11 * config.num_hidden_layers + 3
    for name, value in tensors.items():
        np.testing.assert_array_equal(value, parameters[name].astype(jnp.bfloat16))
    assert json.loads((tmp_path / "training.json").read_text()) == {"steps": 1}
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_export_refuses_what_no_published_key_says(tmp_path):
    config = dataclasses.replace(FULL, windows=(9, 5), causal=(True, True))
    with pytest.raises(ValueError, match="windows: found"):
        export_drafter(tmp_path, config, {}, {}, [])
