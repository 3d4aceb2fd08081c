"""Times plain steps and speculative rounds; the same as `jaxspec bench` (see `--help`)."""

import typer

from jaxspec.serve.cli.bench import bench_command

app = typer.Typer(add_completion=False)
app.command()(bench_command)

if __name__ == "__main__":
    app()
