"""The options of the commands that are a server's clients."""

import pytest
from typer.testing import CliRunner

from jaxspec.serve.cli.app import app


@pytest.mark.parametrize("command", [["chat"], ["bench", "serve"]])
@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--tls-ca", "missing.pem", "missing.pem"),
        ("--tls-ca", "junk.pem", "--tls-ca junk.pem: no certificate or crl found, expected certificates in PEM"),
        ("--token-file", "junk.pem", "--token-file junk.pem: found 4 characters in 1 words"),
        ("--max-tokens", "0", "--max-tokens: found 0, expected 1 to 2147483647"),
        ("--max-tokens", "3000000000", "--max-tokens: found 3000000000, expected 1 to 2147483647"),
        ("--temperature", "nan", "--temperature: found nan, expected 0 to 100"),
        ("--seed", "-1", "--seed: found -1, expected 0 to 4294967295"),
    ],
)
def test_bad_options_are_one_line(tmp_path, monkeypatch, command, option, value, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "junk.pem").write_text("junk\n")
    done = CliRunner().invoke(app, [*command, "--address", "127.0.0.1:1", option, value])
    assert done.exit_code == 2
    assert done.output.startswith("error: ")
    assert message in done.output
    assert done.output.count("\n") == 1
