"""Converts a published checkpoint; the same as `jaxspec convert` (see `--help`)."""

import typer

from serve.convert import convert_command

app = typer.Typer(add_completion=False)
app.command()(convert_command)

if __name__ == "__main__":
    app()
