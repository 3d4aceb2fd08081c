"""`jaxspec train`: a DFlash drafter for a converted target, from prompts to an exported checkpoint."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from jaxspec.config import MAX_SLOTS
from jaxspec.serve.checks import one_of, within
from jaxspec.serve.cli.options import DTYPES, decimals, integers
from jaxspec.serve.cli.progress import Progress
from jaxspec.serve.cli.startup import StartUp, bad_input, say, use_compilation_cache

if TYPE_CHECKING:
    from jaxspec.engine.engine import Engine
    from jaxspec.training.prompts import Prompt

Option = typer.Option
STAGES = ("prompts", "answers", "train", "export")
MOST = 2**31 - 1
TEMPLATE_KINDS = 4  # an equal share of each


def train_command(
    target: Annotated[Path, Option(help="Folder of the converted target.")],
    output: Annotated[Path, Option(help="Folder for the drafter, in the published DFlash layout.")],
    work: Annotated[Path, Option(help="Folder for prompts, answers and checkpoints; a stage reads the last one's.")],
    stage: Annotated[list[str] | None, Option(help=f"Run only these: {', '.join(STAGES)}.")] = None,
    prompts: Annotated[
        list[Path] | None, Option(help="Prompt files: JSON lines with 'turns', or one prompt a line.")
    ] = None,
    invent: Annotated[int, Option(help="Prompts that the target invents.")] = 0,
    templates: Annotated[int, Option(help="Prompts made from built-in templates.")] = 0,
    answer_temperatures: Annotated[str, Option(help="Taken in turn, one an answer.")] = "0,0.7,1",
    max_prompt_tokens: Annotated[int, Option(help="Longer prompts are skipped.")] = 160,
    max_answer_tokens: Annotated[int, Option(help="Answers are cut here.")] = 352,
    slots: Annotated[int, Option(help="Answers written at once.")] = 256,
    chunk: Annotated[int, Option(help="Prompts in a file of answers, the unit of resuming.")] = 4096,
    layers: Annotated[int, Option(help="Layers of the drafter.")] = 4,
    taps: Annotated[int, Option(help="Target layers that it reads.")] = 5,
    block_size: Annotated[int, Option(help="Rows of a pass, anchor included.")] = 8,
    intermediate_size: Annotated[int | None, Option(help="Width of its MLP; by default the target's.")] = None,
    mask_token: Annotated[int, Option(help="Id of the mask: one that no text holds (16 is SmolLM2's reserved).")] = 16,
    steps: Annotated[int | None, Option(help="Optimiser steps; without it, as many as --epochs takes.")] = None,
    epochs: Annotated[float, Option(help="Passes over the answers.")] = 6,
    batch: Annotated[int, Option(help="Sequences a step.")] = 64,
    anchors: Annotated[int, Option(help="Blocks drawn from each sequence.")] = 64,
    learning_rate: Annotated[float, Option(help="Peak of the schedule.")] = 6e-4,
    lengths: Annotated[str, Option(help="Sequences are padded to one of these and cut at the last.")] = "256,512",
    held_out: Annotated[int, Option(help="Examples kept for measuring.")] = 512,
    evaluate_every: Annotated[int, Option(help="Steps between held-out measurements.")] = 500,
    save_every: Annotated[int, Option(help="Steps between checkpoints.")] = 1000,
    dtype: Annotated[str | None, Option(help="Of the arithmetic; by default bfloat16, on a CPU float32.")] = None,
    seed: Annotated[int, Option(help="Of everything random.")] = 0,
    resume: Annotated[bool, Option("--resume", help="Go on from the checkpoint in --work.")] = False,
) -> None:
    """Train a DFlash drafter on answers that the target itself writes."""
    stages = stage or list(STAGES)
    with bad_input():
        for name in stages:
            one_of("--stage", name, STAGES)
        if dtype is not None:
            one_of("--dtype", dtype, DTYPES)
        for option, value, low, high in (
            ("--invent", invent, 0, MOST),
            ("--templates", templates, 0, MOST),
            ("--max-prompt-tokens", max_prompt_tokens, 1, MOST),
            ("--max-answer-tokens", max_answer_tokens, 1, MOST),
            ("--slots", slots, 1, MAX_SLOTS),
            ("--chunk", chunk, 1, MOST),
            ("--layers", layers, 1, 256),
            ("--taps", taps, 1, 256),
            ("--block-size", block_size, 2, 256),
            ("--intermediate-size", intermediate_size, 1, MOST),
            ("--steps", steps, 1, MOST),
            ("--epochs", epochs, 1e-6, 1e6),
            ("--batch", batch, 1, MOST),
            ("--anchors", anchors, 1, MOST),
            ("--learning-rate", learning_rate, 1e-12, 1e3),
            ("--held-out", held_out, 1, MOST),
            ("--evaluate-every", evaluate_every, 1, MOST),
            ("--save-every", save_every, 1, MOST),
            ("--seed", seed, 0, 2**32 - 1),
        ):
            if value is not None:
                within(option, value, low, high)
        temperatures, padded = decimals("--answer-temperatures", answer_temperatures), integers("--lengths", lengths)
        for temperature in temperatures:
            within("--answer-temperatures", temperature, 0, 100)
        for length in padded:
            within("--lengths", length, 2, MOST)
        if padded != sorted(set(padded)):
            raise ValueError(f"--lengths: found {lengths!r}, expected ascending lengths")
        if "prompts" in stages and not (prompts or invent or templates >= TEMPLATE_KINDS):
            raise ValueError(
                f"prompts: found none to collect, expected --prompts, --invent or --templates {TEMPLATE_KINDS} or more"
            )
        for option, folder in (("--work", work), ("--output", output)):
            if folder.exists() and not folder.is_dir():
                raise ValueError(f"{option}: found a file at {folder}, expected a folder")
    use_compilation_cache()
    import jax
    import jax.numpy as jnp

    from jaxspec.model.checkpoint.loading import load_target, open_checkpoint
    from jaxspec.model.families.config import ModelConfig, check_drafter
    from jaxspec.model.families.llama import LlamaForCausalLM
    from jaxspec.model.families.new_drafter import drafter_for
    from jaxspec.model.text.tokenizer import Tokenizer
    from jaxspec.sharding.mesh import make_mesh
    from jaxspec.training.answers import AnswerConfig, claim_answers, read_answers, split_examples, write_answers
    from jaxspec.training.batches import steps_per_epoch
    from jaxspec.training.checkpoint import CHECKPOINT, check_checkpoint, read_checkpoint
    from jaxspec.training.export import export_drafter
    from jaxspec.training.loop import train
    from jaxspec.training.prompts import Prompt, read_written_prompts
    from jaxspec.training.run_config import RunConfig

    start_up = StartUp()
    with bad_input():
        tokenizer = Tokenizer.from_checkpoint(target)
        checkpoint = open_checkpoint(target)
        if checkpoint.kind != "target":
            raise ValueError(f"--target {target}: found a {checkpoint.kind} ({checkpoint.family}), expected a target")
        target_config = checkpoint.config
        if not isinstance(target_config, ModelConfig):
            raise ValueError(
                f"--target {target}: found a {checkpoint.family} target, for which drafters are not trained"
            )
        within("--taps", taps, 1, max(1, target_config.num_hidden_layers - 3))
        drafter = drafter_for(
            target_config,
            layers=layers,
            taps=taps,
            block_size=block_size,
            mask_token_id=mask_token,
            intermediate_size=intermediate_size,
        )
        check_drafter(target_config, drafter)
        if "answers" in stages or ("prompts" in stages and invent):
            opening = len(tokenizer.encode_chat([{"role": "user", "content": "?"}]))
            within("--max-prompt-tokens", max_prompt_tokens, opening, target_config.max_position_embeddings - 1)
            most = target_config.max_position_embeddings - max_prompt_tokens
            within("--max-answer-tokens", max_answer_tokens, 1, most)
        work.mkdir(parents=True, exist_ok=True)
    answers = AnswerConfig(tuple(temperatures), max_prompt_tokens, max_answer_tokens, chunk, seed)
    engine: Engine | None = None

    def encode(prompt: Prompt) -> list[int]:
        return tokenizer.encode_chat([{"role": "user", "content": prompt.text}])

    def the_engine() -> "Engine":
        nonlocal engine
        engine = engine or _plain_engine(target, slots, max_prompt_tokens, max_answer_tokens, start_up)
        return engine

    if "prompts" in stages:
        with bad_input():
            collected = _collect_prompts(prompts or [], templates, seed)
        if invent:
            collected += _invent(the_engine(), encode, tokenizer.decode, invent, seed)
        with bad_input():
            _write_prompts(work / "prompts.jsonl", collected)
    if "answers" in stages:
        with bad_input():
            asked = read_written_prompts(work / "prompts.jsonl")
            claim_answers(work / "answers", asked, answers)
        progress = Progress("answers")
        write_answers(
            the_engine(),
            encode,
            asked,
            answers,
            work / "answers",
            lambda done, total, tokens: progress.show(
                done, total, f"{tokens:,} tokens, {progress.rate(tokens):,.0f}/s"
            ),
        )
        progress.close()
    engine = None  # its cache's memory is wanted for training
    if not {"train", "export"} & set(stages):
        return
    with bad_input():
        examples, measured = split_examples(read_answers(work / "answers"), held_out, seed)
        if (examples.tokens == mask_token).any():
            raise ValueError(
                f"--mask-token: found {mask_token} in the training text, expected an id that no text holds"
            )
        run = RunConfig(
            steps=steps or max(1, round(epochs * steps_per_epoch(examples, batch, tuple(padded)))),
            batch=batch,
            anchors=anchors,
            lengths=tuple(padded),
            learning_rate=learning_rate,
            evaluate_every=evaluate_every,
            save_every=save_every,
            seed=seed,
        )
        if resume and (work / "run" / CHECKPOINT).is_file():
            check_checkpoint(work / "run", drafter, run, examples)
    if "train" in stages:
        kind = dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
        start_up.report(f"loading target {target} as {kind}")
        module = cast(LlamaForCausalLM, load_target(target, make_mesh(1), jnp.dtype(kind)))
        start_up.report(
            f"training on {len(examples):,} examples ({examples.lengths.sum():,} tokens), {run.steps:,} steps, "
            f"{len(measured):,} examples held out"
        )
        progress = Progress("step")
        train(module, drafter, examples, measured, run, work / "run", resume, lambda entry: _show(progress, entry, run))
        progress.close()
    if "export" in stages:
        with bad_input():
            check_checkpoint(work / "run", drafter, run, examples)
            parameters, taken = read_checkpoint(work / "run" / CHECKPOINT)
            history = [json.loads(line) for line in (work / "run" / "history.jsonl").read_text().splitlines()]
            history = [entry for entry in history if entry["step"] <= taken]
            figures = work / "run" / "figures.json"  # not there while the run is unfinished
            record = {
                "target": target.name,
                "parameters": sum(value.size for value in parameters.values()),
                "examples": len(examples),
                "tokens": int(examples.lengths.sum()),
                "answer_tokens": int((examples.lengths - examples.prompt_lengths).sum()),
                "sources": {str(name): int((examples.sources == name).sum()) for name in sorted(set(examples.sources))},
                "answers": json.loads((work / "answers" / "settings.json").read_text()),
                "training": asdict(run) | {"finished_steps": taken},
                "held_out": json.loads(figures.read_text()) if figures.is_file() else {},
            }
            export_drafter(output, drafter, parameters, record, history)
        say(f"{output}: a drafter of {record['parameters'] / 1e6:.1f} M parameters")


def _show(progress: Progress, entry: dict[str, Any], run: Any) -> None:
    text = f"loss {entry['loss']:.3f}  τ {entry['tau']:.2f}  {entry['tokens_per_second']:,} tokens/s"
    text += f"  {entry['tflops']:.1f} TFLOP/s" + (f"  MFU {entry['mfu']:.1%}" if "mfu" in entry else "")
    held_out = entry.get("held_out")
    if held_out:
        depths = " ".join(f"{share:.0%}" for share in held_out["accuracy"])
        text += f"  held out: loss {held_out['loss']:.3f} τ {held_out['tau']:.2f} by depth {depths}"
    progress.show(entry["step"], run.steps, text, keep=held_out is not None)


def _plain_engine(target: Path, slots: int, max_prompt: int, max_answer: int, start_up: StartUp) -> "Engine":
    from jaxspec.config import EngineConfig, SpeculationConfig
    from jaxspec.engine.engine import Engine

    with bad_input():
        return Engine.from_checkpoints(
            target,
            None,
            # Eight tokens a call: with hundreds of slots the host is what would be waited for.
            speculation=SpeculationConfig(budget=0, rounds_per_call=8),
            config=EngineConfig(
                slots=slots,
                # Slots stay full until the last answers, which run in a smaller program.
                batch_buckets=tuple(sorted({min(32, slots), slots})),
                max_context=max_prompt + max_answer,
                prefill_chunk=min(128, max_prompt),
            ),
            report=start_up.report,
        )


def _collect_prompts(files: list[Path], templates: int, seed: int) -> list["Prompt"]:
    from jaxspec.training.prompts import file_prompts
    from jaxspec.training.templates import template_prompts

    return [prompt for path in files for prompt in file_prompts(path)] + template_prompts(templates, seed)


def _invent(engine: "Engine", encode: Any, decode: Any, count: int, seed: int) -> list["Prompt"]:
    from jaxspec.training.prompts import invent_prompts

    progress = Progress("invented")
    invented = invent_prompts(
        engine, encode, decode, count, seed, lambda found, wanted: progress.show(found, wanted, "")
    )
    progress.close()
    return invented


def _write_prompts(path: Path, prompts: list["Prompt"]) -> None:
    """Writes the prompts in random order: every file of answers is then a fair sample."""
    import random

    from jaxspec.training.prompts import without_duplicates, write_prompts

    unique = without_duplicates(prompts)
    random.Random(0).shuffle(unique)
    if not unique:
        raise ValueError("prompts: found 0, expected at least 1; give --prompts, --templates or --invent")
    write_prompts(path, unique)
    say(f"{path}: {len(unique):,} prompts")
