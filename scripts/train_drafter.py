"""Trains a DFlash drafter; the same as `jaxspec train`."""

import typer

from jaxspec.serve.cli.train import train_command

if __name__ == "__main__":
    typer.run(train_command)
