"""The `jaxspec` command. A subcommand is one import and one line here; its module imports JAX only when it runs."""

import os
import sys
from collections.abc import Sequence
from typing import cast

import typer

from jaxspec.serve.cli.bench import bench_command
from jaxspec.serve.cli.bench_serve import bench_serve_command
from jaxspec.serve.cli.chat import chat_command
from jaxspec.serve.cli.convert import convert_command
from jaxspec.serve.cli.evaluate import evaluate_command
from jaxspec.serve.cli.generate import generate_command
from jaxspec.serve.cli.plan import plan_command
from jaxspec.serve.cli.serve import serve_command
from jaxspec.serve.cli.train import train_command

app = typer.Typer(
    help="Lossless speculative decoding for large language models in JAX.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("convert")(convert_command)
app.command("generate")(generate_command)
app.command("plan")(plan_command)
app.command("serve")(serve_command)
app.command("chat")(chat_command)
app.command("train")(train_command)
bench = typer.Typer(invoke_without_command=True)
bench.callback()(bench_command)
bench.command("serve")(bench_serve_command)
app.add_typer(bench, name="bench")
app.command("evaluate")(evaluate_command)

# Of the errors that the command line's parser raises, typer exports only this kind of UsageError.
UsageError = cast(type[typer.BadParameter], typer.BadParameter.__mro__[1])


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs a subcommand and exits: 0 done, 1 failed, 2 bad input (one line on stderr), 130 interrupted."""
    try:
        code = app(arguments, prog_name="jaxspec", standalone_mode=False)
    except UsageError as error:
        print(f"error: {' '.join(error.format_message().split())}", file=sys.stderr)
        code = 2
    except (KeyboardInterrupt, typer.Abort):
        print("interrupted", file=sys.stderr)
        code = 130
    except BrokenPipeError:
        # The reader of our output is gone; keep Python from complaining when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    sys.exit(code)


if __name__ == "__main__":
    main()
