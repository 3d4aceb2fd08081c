"""What requests get where they leave sampling unset."""

import json

import pytest

from jaxspec.serve.requests.served_model import default_sampling


def folder(tmp_path, content):
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "generation_config.json").write_text(content)
    return tmp_path


def test_defaults_are_the_checkpoints(tmp_path):
    config = {
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 20,
        "min_p": None,
        "seed": 3,
        "do_sample": True,
        "max_length": 9,
    }
    found = default_sampling(folder(tmp_path, json.dumps(config)))
    assert found == {"temperature": 0.6, "top_p": 0.95, "top_k": 20}


def test_a_checkpoint_need_not_have_any(tmp_path):
    assert default_sampling(tmp_path) == {}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"temperature": -1}', "temperature: found -1"),
        ('{"top_p": "x"}', "top_p: found 'x'"),
        ("[]", "generation_config.json"),
        ("{", "generation_config.json"),
    ],
)
def test_odd_defaults_are_refused(tmp_path, content, message):
    with pytest.raises(ValueError, match="generation_config.json: ") as raised:
        default_sampling(folder(tmp_path, content))
    assert message in str(raised.value)
