"""The `jaxspec` command as a whole."""

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from jaxspec.serve.cli.app import app

COMMANDS = ["convert", "generate", "plan", "serve", "chat", "train", "bench", "bench serve", "evaluate"]
HEAVY = {"jax", "flax", "orbax", "grpc", "google.protobuf", "tokenizers", "llguidance", "numpy", "matplotlib"}


def test_help_needs_nothing_heavy():
    code = (
        "import contextlib, sys; from jaxspec.serve.cli.app import main\n"
        "with contextlib.suppress(SystemExit): main(['--help'])\n"
        f"print(sorted({HEAVY} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "Lossless speculative decoding" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command):
    done = CliRunner().invoke(app, [*command.split(), "--help"])
    assert done.exit_code == 0
    assert "Usage:" in done.output
