"""A run that is interrupted and resumed."""

import dataclasses
import json

import numpy as np
import pytest

from jaxspec.training.answers import split_examples
from jaxspec.training.checkpoint import read_checkpoint
from jaxspec.training.loop import train
from tests.support.training import ONE_LAYER, RUN, examples_of


def test_interrupted_and_resumed_ends_like_uninterrupted(target, tmp_path):
    run = dataclasses.replace(RUN, lengths=(24,))
    examples, held_out = split_examples(examples_of(), 4, 0)
    whole, history = train(target, ONE_LAYER, examples, held_out, run, tmp_path / "a", False, lambda entry: None)

    def stop(entry):
        if entry["step"] == 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(target, ONE_LAYER, examples, held_out, run, tmp_path / "b", False, stop)
    seen: list[int] = []
    resumed, again = train(
        target, ONE_LAYER, examples, held_out, run, tmp_path / "b", True, lambda entry: seen.append(entry["step"])
    )
    assert seen == [6, 8, 10, 12], "from the checkpoint of step 5 on"
    for name in whole:
        np.testing.assert_array_equal(whole[name], resumed[name], err_msg=name)
    assert [entry["step"] for entry in again] == [entry["step"] for entry in history]
    assert again[-1]["held_out"] == history[-1]["held_out"]
    restored, taken = read_checkpoint(tmp_path / "b" / "checkpoint.safetensors")
    assert taken == history[-1]["step"]
    for name, value in restored.items():
        np.testing.assert_array_equal(value, whole[name])
    assert json.loads((tmp_path / "b" / "figures.json").read_text())["source counting"]["examples"] == len(held_out)
    other = dataclasses.replace(run, learning_rate=1e-3)
    with pytest.raises(ValueError, match="another run"):
        train(target, ONE_LAYER, examples, held_out, other, tmp_path / "b", True, lambda entry: None)
