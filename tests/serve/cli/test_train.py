"""`jaxspec train` through the command's own entry point: what it refuses, and how early."""

import numpy as np
import pytest

from jaxspec.serve.cli.app import main
from jaxspec.serve.cli.demo_model import converted
from tests.support.published import write_byte_tokenizer, write_model

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 260,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 6,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "eos_token_id": 257,
}
TEMPLATE = "{% for m in messages %}<s>{{ m.role[0] }}:{{ m.content }}{% endfor %}"
SIZES = ["--layers", 1, "--taps", 3, "--block-size", 4, "--slots", 4, "--max-prompt-tokens", 40]
SIZES += ["--max-answer-tokens", 8, "--lengths", "48", "--mask-token", 259, "--answer-temperatures", "0"]
SIZES += ["--steps", 1, "--batch", 2, "--anchors", 2, "--held-out", 2]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    folder = write_model(root / "target", CONFIG, scale=1.0)
    write_byte_tokenizer(folder, {"eos_token": "</s>", "chat_template": TEMPLATE})
    return converted(folder, root)


@pytest.fixture
def train(target, tmp_path, capsys, monkeypatch):
    """Runs the command in `tmp_path`; `options` come after those that make a tiny run. Returns code and errors."""
    monkeypatch.setattr("jaxspec.serve.cli.train.use_compilation_cache", lambda: None)

    def run(*options):
        arguments = ["train", "--target", target, "--output", tmp_path / "out", "--work", tmp_path / "work", *SIZES]
        with pytest.raises(SystemExit) as exit_:
            main(list(map(str, [*arguments, *options])))
        errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
        return exit_.value.code or 0, errors

    return run


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("--layers", "0", "1 to 256"),
        ("--layers", "-1", "1 to 256"),
        ("--taps", "0", "1 to 256"),
        ("--taps", "4", "1 to 3"),
        ("--block-size", "1", "2 to 256"),
        ("--block-size", "500", "2 to 256"),
        ("--intermediate-size", "-1", "1 to"),
        ("--slots", "0", "1 to 256"),
        ("--chunk", "0", "1 to"),
        ("--invent", "-1", "0 to"),
        ("--templates", "-1", "0 to"),
        ("--max-prompt-tokens", "0", "1 to"),
        ("--max-prompt-tokens", "2", "4 to 127"),
        ("--max-prompt-tokens", "300", "4 to 127"),
        ("--max-answer-tokens", "0", "1 to"),
        ("--max-answer-tokens", "100", "1 to 88"),
        ("--answer-temperatures", "0,nan", "0 to 100"),
        ("--answer-temperatures", "x", "numbers"),
        ("--lengths", "nan", "whole numbers"),
        ("--lengths", "1,8", "2 to"),
        ("--lengths", "8,8", "ascending"),
        ("--steps", "0", "1 to"),
        ("--epochs", "nan", "to 1000000.0"),
        ("--batch", "0", "1 to"),
        ("--anchors", "0", "1 to"),
        ("--learning-rate", "nan", "to 1000.0"),
        ("--learning-rate", "inf", "to 1000.0"),
        ("--learning-rate", "0", "to 1000.0"),
        ("--held-out", "0", "1 to"),
        ("--evaluate-every", "0", "1 to"),
        ("--save-every", "0", "1 to"),
        ("--dtype", "int8", "bfloat16, float16, float32"),
        ("--seed", "-1", "0 to 4294967295"),
        ("--stage", "x", "prompts, answers, train, export"),
    ],
)
def test_options_are_checked_before_anything_is_written(train, tmp_path, option, value, expected):
    code, errors = train("--templates", 8, option, value)
    assert (code, len(errors)) == (2, 1)
    assert errors[0].startswith(f"error: {option}: found ")
    assert expected in errors[0]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("options", [[], ["--templates", 3]])
def test_no_prompts_are_refused(train, tmp_path, options):
    code, errors = train(*options)
    assert (code, len(errors)) == (2, 1)
    assert "prompts: found none to collect" in errors[0]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.jsonl", b'{"turns": ["a"]}\n[1]\n', "line 2: found [1], expected an object"),
        ("p.jsonl", b'{"turns": ["a"]}\n{"turns": "b"}\n', "line 2: turns: found 'b', expected a list of texts"),
        ("p.jsonl", b'{"turns": [3]}\n', "line 1: turns: found [3]"),
        ("p.jsonl", b'\n{"turns"', "line 2: not JSON"),
        ("p.jsonl", b'{"turns": ["\\udcff"]}\n', "line 1: found '\\udcff', half a surrogate pair"),
        ("p.txt", b"a\nb\xff\n", "line 2: not UTF-8: found byte 0xff"),
        ("p.txt", b"\n", "prompts: found 0"),
    ],
)
def test_faulty_prompt_files_are_named(train, tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    code, errors = train("--stage", "prompts", "--prompts", tmp_path / name)
    assert (code, len(errors)) == (2, 1)
    assert message in errors[0]
    assert name in errors[0] or content == b"\n"
    assert not (tmp_path / "work" / "prompts.jsonl").exists()


def test_stages_refuse_what_other_settings_left(train, tmp_path):
    def refused(message, *options):
        code, errors = train(*options)
        assert (code, len(errors)) == (2, 1), errors
        assert message in errors[0]

    work = tmp_path / "work"
    refused("prompts.jsonl: not there; run the stage 'prompts' first", "--stage", "answers")
    refused("no answers there", "--stage", "train")
    (tmp_path / "p.txt").write_text("".join(f"Say {n}.\n" for n in range(12)))
    assert train("--stage", "prompts", "--prompts", tmp_path / "p.txt", "--stage", "answers") == (0, [])
    for option, value, message in (
        ("--chunk", 5, "chunk: found 4096, expected 5"),
        ("--max-answer-tokens", 9, "max_answer_tokens: found 8, expected 9"),
        ("--answer-temperatures", "0.5", "temperatures: found [0.0], expected [0.5]"),
    ):
        refused(f"settings.json {message}", "--stage", "answers", option, value)

    refused("checkpoint.safetensors: not there; run the stage 'train' first", "--stage", "export")
    assert train("--stage", "train") == (0, [])
    refused("belongs to another run", "--stage", "train", "--resume", "--learning-rate", 0.1)
    refused("belongs to another run", "--stage", "export", "--taps", 2)
    assert not (tmp_path / "out").exists()
    assert train("--stage", "export") == (0, [])
    assert (tmp_path / "out" / "model.safetensors").is_file()

    (work / "run" / "checkpoint.safetensors").write_bytes(b"short")
    refused("checkpoint.safetensors: not a readable checkpoint", "--stage", "export")
    (work / "answers" / "settings.json").write_text("{")
    refused("settings.json: not the settings of answers", "--stage", "answers")
    (work / "answers" / "00000.npz").write_bytes(b"PK\3\4")
    refused("00000.npz: not a readable file of answers", "--stage", "train")
    one = {"tokens": [5, 6, 7], "lengths": [3], "prompt_lengths": [1], "temperatures": [0.0], "sources": ["p"]}
    np.savez(work / "answers" / "00000.npz", **one)
    refused("answers: found 1 of two tokens or more, expected at least 2", "--stage", "train")
    (work / "prompts.jsonl").write_text('{"turns": ["a"]}\n')
    refused("prompts.jsonl line 1: source: found None", "--stage", "answers")


def test_folders_that_are_files(train, tmp_path):
    (tmp_path / "out").write_text("thesis")
    code, errors = train("--templates", 8)
    assert (code, len(errors)) == (2, 1)
    assert errors[0].startswith("error: --output: found a file at ")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
