"""A finished evaluation, and what it was made of."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.evaluations import EvaluateCommand


@pytest.fixture(scope="session")
def evaluate(tmp_path_factory: pytest.TempPathFactory) -> EvaluateCommand:
    return EvaluateCommand(tmp_path_factory.mktemp("evaluation"))


@pytest.fixture(scope="session")
def folder(evaluate: EvaluateCommand) -> Path:
    """A target's folder, as far as its tokenizer is concerned."""
    return evaluate.folder


@pytest.fixture(scope="session")
def finished(
    evaluate: EvaluateCommand, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[dict[str, Any]], dict[str, Any]]:
    """A finished evaluation: its folder, records and summary."""
    output = tmp_path_factory.mktemp("runs") / "run"
    result = evaluate(output)
    assert result.exit_code == 0, result.output
    records = [json.loads(line) for line in (output / "results.jsonl").read_text().splitlines()]
    return output, records, json.loads((output / "summary.json").read_text())
