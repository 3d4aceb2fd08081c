"""`jaxspec evaluate`: acceptance and speed over prompt sets, with plain decoding beside every figure."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxspec.config import EngineConfig, SamplingParams, SpeculationConfig
from jaxspec.serve.checks import distinct, one_of, within
from jaxspec.serve.cli.options import DTYPES, Devices, decimals, integers
from jaxspec.serve.cli.startup import StartUp, bad_input, use_compilation_cache

if TYPE_CHECKING:
    from jaxspec.evaluation.evaluation import Progress

Option = typer.Option


def evaluate_command(
    target: Annotated[Path, Option(help="Folder of the converted target.")],
    drafter: Annotated[Path, Option(help="Folder of the converted drafter.")],
    prompts: Annotated[list[Path], Option(help="JSON Lines file of prompts; may be given several times.")],
    output: Annotated[Path, Option(help="Folder to write.")],
    budgets: Annotated[
        str, Option(help="Tree budgets, with commas between; plain and chain run too.")
    ] = "0,8,16,32,64",
    temperatures: Annotated[str, Option(help="Temperatures, with commas between.")] = "0,1",
    batch: Annotated[int, Option(help="Requests decoded at once.")] = EngineConfig.slots,
    limit: Annotated[int | None, Option(help="Prompts at most of each file.")] = None,
    max_tokens: Annotated[int, Option(help="New tokens at most of each answer.")] = 256,
    top_k_cap: Annotated[
        int, Option(help="Drafter's best tokens considered at each depth.")
    ] = SpeculationConfig.top_k_cap,
    seed: Annotated[int, Option(help="Seed of all sampling.")] = 0,
    devices: Devices = EngineConfig.devices,
    dtype: Annotated[str | None, Option(help="bfloat16, float16 or float32; by default the target's own.")] = None,
    overwrite: Annotated[bool, Option("--overwrite", help="Replace an existing output.")] = False,
    more_prompts: Annotated[list[Path] | None, typer.Argument(metavar="[FILE]...", help="More prompt files.")] = None,
) -> None:
    """Evaluate plain decoding, the DFlash chain and DDTree on prompt sets, all on the same requests."""
    with bad_input():
        sizes, at_temperatures = integers("--budgets", budgets), decimals("--temperatures", temperatures)
        distinct("--budgets", sizes)
        distinct("--temperatures", at_temperatures)
        for size in sizes:
            SpeculationConfig(budget=size, top_k_cap=top_k_cap)
        for temperature in at_temperatures:
            SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed)
        EngineConfig(slots=batch, devices=devices)
        if limit is not None:
            within("--limit", limit, 1, 2**31 - 1)
        if dtype is not None:
            one_of("--dtype", dtype, DTYPES)
    files = [*prompts, *(more_prompts or [])]

    import jax

    from jaxspec.engine.loading import check_tokenizers
    from jaxspec.evaluation.evaluation import Evaluation
    from jaxspec.evaluation.modes import modes
    from jaxspec.evaluation.prompts import read_prompts
    from jaxspec.evaluation.report import MARKDOWN, RunFolder, summarise
    from jaxspec.model.checkpoint.loading import load_drafter, load_target
    from jaxspec.model.text.tokenizer import Tokenizer
    from jaxspec.sharding.mesh import make_mesh

    use_compilation_cache()
    start_up = StartUp()
    with bad_input():
        if len({file.stem for file in files}) < len(files):
            raise ValueError("--prompts: found two files of one name, expected different ones: they name the sets")
        asked = [prompt for file in files for prompt in read_prompts(file, limit)]
        mesh = make_mesh(devices)
        tokenizer = Tokenizer.from_checkpoint(target)
        # Most drafters bring no tokenizer: they speak in the target's ids.
        if (drafter / "tokenizer" / "tokenizer.json").is_file():
            check_tokenizers(tokenizer, Tokenizer.from_checkpoint(drafter))
        start_up.report(f"loading target {target} and drafter {drafter}")
        target_module = load_target(target, mesh, dtype)
        own_dtype = target_module.embed_tokens.weight.dtype
        evaluation = Evaluation(
            target_module,
            load_drafter(drafter, mesh, target_module.config, own_dtype),
            tokenizer,
            asked,
            mesh=mesh,
            batch=batch,
            max_tokens=max_tokens,
            seed=seed,
            report=start_up.report,
        )
        every = modes(sizes, top_k_cap, evaluation.depth)
        evaluation.check(every)
        folder = RunFolder(output, overwrite=overwrite)
    about = {
        "target": str(target),
        "drafter": str(drafter),
        "prompts": [str(file) for file in files],
        "device": f"{devices} × {mesh.devices.flat[0].device_kind}",
        "jax": jax.__version__,
        "dtype": own_dtype.name,
        "batch": batch,
        "limit": limit,
        "max tokens": max_tokens,
        "top-k cap": top_k_cap,
        "seed": seed,
    }
    requests = sum(len(prompt.turns) for prompt in asked)
    passes = []
    with _progress(requests * len(every) * len(at_temperatures)) as step:
        for done in evaluation.run(every, at_temperatures, step):
            folder.add(done.records)
            passes.append(done)
            tau = sum(record["tau"] for record in done.records) / len(done.records)
            speed = "–" if done.tokens_per_second is None else f"{done.tokens_per_second:.0f}"
            for left in done.left_out:
                start_up.report(f"{left['id']} of {left['set']} ends before turn {left['turn'] + 1}: {left['reason']}")
            start_up.report(f"{done.mode.name}, temperature {done.temperature:g}: τ {tau:.2f}, {speed} tokens/s")
    summary = summarise(passes, about)
    folder.finish(summary)
    print((output / MARKDOWN).read_text(encoding="utf-8"))


@contextmanager
def _progress(total: int) -> "Iterator[Progress]":
    """Shows ended requests on stderr: a bar on a terminal; elsewhere the line that each pass ends with must do."""
    if not sys.stderr.isatty():
        yield lambda mode, temperature: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns: tuple[Any, ...] = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=total)
        yield lambda mode, temperature: bar.update(
            task, advance=1, description=f"{mode.name}, temperature {temperature:g}"
        )
