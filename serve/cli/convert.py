"""`jaxspec convert`: a published checkpoint into the layout that jaxspec loads."""

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxspec.serve.cli.startup import bad_input

if TYPE_CHECKING:
    from jaxspec.model.checkpoint.conversion import ConversionPlan
    from jaxspec.sharding.checkpoint.manifest import Part


def convert_command(
    source: Annotated[Path, typer.Option(help="Hugging Face folder (safetensors) or GGUF file.")],
    output: Annotated[Path, typer.Option(help="Folder to write.")],
    kind: Annotated[str | None, typer.Option(help="target or drafter; detected, refused if it differs.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16; by default the source's own.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an unfinished run.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing output.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan; write nothing.")] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Read the result back and compare digests.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """Convert a published target or DFlash drafter into the layout that jaxspec loads."""
    say = (lambda line: None) if as_json else print
    with bad_input():
        report = _run(source, output, kind, dtype, resume, overwrite, dry_run, verify, say)
    if as_json:
        print(json.dumps(report))


def _run(
    path: Path,
    output: Path,
    kind: Any,
    dtype: str | None,
    resume: bool,
    overwrite: bool,
    dry_run: bool,
    verify: bool,
    say: Callable[[str], None],
) -> dict[str, Any]:
    # Imported late, so that --help and a mistyped option answer at once.
    import jax

    jax.config.update("jax_platforms", "cpu")  # A conversion needs no accelerator and must not take its memory.
    from jaxspec.model.checkpoint.conversion import convert, is_converted, plan_conversion
    from jaxspec.model.checkpoint.sources import open_source
    from jaxspec.sharding.checkpoint.manifest import read_manifest
    from jaxspec.sharding.checkpoint.reader import verify as verify_digests

    if kind not in (None, "target", "drafter"):
        raise ValueError(f"--kind: found {kind!r}, expected target or drafter")
    begun = time.monotonic()
    source = open_source(path)
    plan = plan_conversion(source, kind=kind, dtype=dtype)
    report = {
        "kind": plan.kind,
        "family": plan.family,
        "dtype": plan.dtype,
        "tensors": len(plan.recipes),
        "bytes": plan.nbytes,
        "parts": len(plan.parts),
        "notes": list(plan.notes),
        "output": str(output),
    }
    size = f"{len(plan.recipes)} tensors, {plan.nbytes / 1e6:,.1f} MB as {plan.dtype}, {len(plan.parts)} part(s)"
    say(f"{path}: {plan.kind} ({plan.family}), {size}")
    for note in plan.notes:
        say(f"note: {note}")
    if dry_run:
        mapping = _mapping(plan)
        for weight in mapping:
            say(f"{weight['source']} -> {weight['name']}  {weight['shape']}  part {', '.join(weight['parts'])}")
        return report | {"dry_run": True, "mapping": mapping}
    if not (resume and is_converted(output, source, plan)):
        with _progress("converting", plan.parts) as step:
            convert(source, plan, output, resume=resume, overwrite=overwrite, progress=step)
    if verify:
        with _progress("verifying", plan.parts) as step:
            verify_digests(output, read_manifest(output), step)
    seconds = time.monotonic() - begun
    say(f"{output}: ready{', digests verified' if verify else ''}, {seconds:.1f} s")
    return report | {"verified": verify, "seconds": round(seconds, 3)}


def _mapping(plan: "ConversionPlan") -> list[dict[str, Any]]:
    """Lists for each weight its name in the source and here, its shape and the parts that hold it."""
    mapping: dict[str, dict[str, Any]] = {}
    for part in plan.parts:
        for slab in part.slabs:
            name = slab.tensor.name
            weight = {"source": plan.recipes[name].label, "name": name, "shape": list(slab.tensor.shape), "parts": []}
            mapping.setdefault(name, weight)["parts"].append(part.name)
    return list(mapping.values())


@contextmanager
def _progress(verb: str, parts: "tuple[Part, ...]") -> "Iterator[Callable[[Part], None]]":
    """Shows finished parts on stderr, as a bar on a terminal and as a line for each part elsewhere."""
    total = sum(part.nbytes for part in parts)
    if not sys.stderr.isatty():
        done = 0

        def line(part: "Part") -> None:
            nonlocal done
            done += part.nbytes
            print(f"{verb}: {done / 1e6:,.1f} of {total / 1e6:,.1f} MB", file=sys.stderr, flush=True)

        yield line
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(verb, total=total)
        yield lambda part: bar.advance(task, part.nbytes)
