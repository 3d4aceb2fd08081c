"""Evaluates decoding on prompt sets; the same as `jaxspec evaluate` (see `--help`)."""

import typer

from jaxspec.serve.cli.evaluate import evaluate_command

app = typer.Typer(add_completion=False)
app.command()(evaluate_command)

if __name__ == "__main__":
    app()
