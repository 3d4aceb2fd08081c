"""`jaxspec evaluate` through the command's own entry point: what it refuses."""

import json
import shutil

import pytest
from tokenizers import Tokenizer as Backend

from tests.support.evaluations import EvaluateCommand


@pytest.fixture(scope="module")
def evaluate(tmp_path_factory):
    return EvaluateCommand(tmp_path_factory.mktemp("evaluation"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--budgets", "8,x"], "--budgets: found 'x'"),
        (["--budgets", "2000"], "SpeculationConfig.budget: found 2000"),
        (["--budgets", "6,4,6"], "--budgets: found 6 twice"),
        (["--temperatures", "0,0.0"], "--temperatures: found 0 twice"),
        (["--top-k-cap", 261, "--budgets", 6], "SpeculationConfig.top_k_cap: found 261, expected at most"),
        (["--temperatures", "-1"], "SamplingParams.temperature: found -1.0"),
        (["--temperatures", "nan"], "SamplingParams.temperature: found nan"),
        (["--batch", 0], "EngineConfig.slots: found 0"),
        (["--limit", 0], "--limit: found 0"),
        (["--dtype", "int8"], "--dtype: found 'int8'"),
        (["--prompts", "missing.jsonl"], "missing.jsonl"),
    ],
)
def test_bad_options_are_one_line(evaluate, tmp_path, options, message):
    result = evaluate(tmp_path / "run", *options)
    assert result.exit_code == 2
    errors = [line for line in result.stderr.splitlines() if line.startswith("error:")]
    assert len(errors) == 1
    assert message in errors[0]
    assert not list(tmp_path.iterdir())


def test_prompt_too_long_is_named(evaluate, tmp_path):
    path = tmp_path / "huge.jsonl"
    path.write_text(json.dumps({"id": "h-0", "turns": ["y" * 500]}) + "\n")
    result = evaluate(tmp_path / "run", "--prompts", path)
    assert result.exit_code == 2
    assert "prompt h-0 of huge: found 503 tokens, expected at most 399" in result.stderr


def test_drafter_of_another_tokenizer_is_refused(evaluate, tmp_path):
    other = tmp_path / "drafter" / "tokenizer"
    shutil.copytree(evaluate.folder, other)
    backend = Backend.from_file(str(other / "tokenizer.json"))
    backend.add_tokens(["more"])
    backend.save(str(other / "tokenizer.json"))
    result = evaluate(tmp_path / "run", "--drafter", other.parent)
    assert result.exit_code == 2
    assert "error: drafter tokenizer: found fingerprint" in result.stderr
    shutil.copyfile(evaluate.folder / "tokenizer.json", other / "tokenizer.json")
    result = evaluate(tmp_path / "run", "--drafter", other.parent, "--top-k-cap", 261)
    assert "error: SpeculationConfig.top_k_cap" in result.stderr  # the next thing to be refused
