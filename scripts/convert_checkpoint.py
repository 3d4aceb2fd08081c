"""Converts a published checkpoint; the same as `jaxspec convert` (see `--help`)."""

import typer

from jaxspec.serve.cli.convert import convert_command

app = typer.Typer(add_completion=False)
app.command()(convert_command)

if __name__ == "__main__":
    app()
