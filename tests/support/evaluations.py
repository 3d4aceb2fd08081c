"""Evaluations of tiny random models through the command, for the tests of what is evaluated and how it is told."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from scripts.evaluate import app
from tests.support.builders import DFLASH, GROUPED, tiny_dflash, tiny_target
from tests.support.published import write_byte_tokenizer

SIZES = {"vocab_size": 260, "max_position_embeddings": 400}
TARGET = dataclasses.replace(GROUPED, **SIZES, eos_token_ids=(257,))
DRAFTER = dataclasses.replace(DFLASH, **SIZES, block_size=4, windows=(0, 0))
TEMPLATE = "{% for m in messages %}<s>{{ m.role[0] }}:{{ m.content }}{% endfor %}"
FILES = {
    "short": [["Hi"], ["Why?", "And how?"], ["1 + 1"]],
    "long": [["Tell me everything about trees, please."], ["x" * 60]],
}
REQUESTS, MODES, TEMPERATURES = 6, ("plain", "chain", "ddtree-6"), (0.0, 1.0)


class EvaluateCommand:
    """The command with a folder of models and prompt files.

    Attributes:
      folder: of target and drafter, as far as a tokenizer is concerned.
      prompts: the files of `FILES`.
    """

    def __init__(self, root: Path):
        self.folder = root / "target"
        self.folder.mkdir()
        write_byte_tokenizer(self.folder, {"eos_token": "</s>", "chat_template": TEMPLATE})
        self.prompts = [root / f"{name}.jsonl" for name in FILES]
        for path in self.prompts:
            prompts = enumerate(FILES[path.stem])
            lines = [json.dumps({"id": f"{path.stem}-{i}", "category": "c", "turns": turns}) for i, turns in prompts]
            path.write_text("\n".join(lines) + "\n")

    def __call__(self, output: Path, *options: Any) -> Result:
        """Runs it on tiny models; `options` come after the defaults."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("jaxspec.model.checkpoint.loading.load_target", lambda path, mesh, dtype: tiny_target(TARGET))
            patch.setattr(
                "jaxspec.model.checkpoint.loading.load_drafter", lambda path, mesh, config, dtype: tiny_dflash(DRAFTER)
            )
            arguments = ["--target", self.folder, "--drafter", self.folder, "--output", output, "--batch", 2]
            arguments += ["--max-tokens", 24, "--budgets", "0,6", "--top-k-cap", 4, *options]
            return CliRunner().invoke(app, list(map(str, [*arguments, "--prompts", *self.prompts])))


def select(records: list[dict[str, Any]], **wanted: Any) -> list[dict[str, Any]]:
    """The records with these values."""
    return [record for record in records if all(record[name] == value for name, value in wanted.items())]
