"""`jaxspec generate`: one prompt, its answer streamed as it comes, and what speculation did for it."""

import json
import secrets
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from jaxspec.config import EngineConfig, SamplingParams, SpeculationConfig
from jaxspec.serve.cli.options import Budget, Devices, ExpertLayout, ShardCache, TopKCap
from jaxspec.serve.cli.startup import StartUp, bad_input, banner, use_compilation_cache

Option = typer.Option


def generate_command(
    target: Annotated[Path, Option(help="Folder of the converted target.")],
    drafter: Annotated[Path | None, Option(help="Folder of the converted drafter; without it: plain decoding.")] = None,
    prompt: Annotated[str | None, Option(help="The prompt; without it, standard input.")] = None,
    system: Annotated[str | None, Option(help="A system message before the prompt.")] = None,
    raw: Annotated[bool, Option("--raw", help="Take the prompt as it is, without the chat template.")] = False,
    budget: Budget = SpeculationConfig.budget,
    top_k_cap: TopKCap = SpeculationConfig.top_k_cap,
    temperature: Annotated[float, Option(help="0 takes the most probable token.")] = 0.0,
    top_p: Annotated[float, Option(help="Keep the likeliest tokens up to this mass.")] = SamplingParams.top_p,
    top_k: Annotated[int, Option(help="Keep this many of the likeliest tokens; 0 keeps all.")] = SamplingParams.top_k,
    min_p: Annotated[
        float, Option(help="Keep tokens of at least this share of the likeliest one's probability.")
    ] = SamplingParams.min_p,
    seed: Annotated[int | None, Option(help="Seed of the sampling; without it, a random one.")] = None,
    max_tokens: Annotated[int, Option(help="New tokens at most.")] = SamplingParams.max_tokens,
    devices: Devices = EngineConfig.devices,
    expert_layout: ExpertLayout = EngineConfig.expert_layout,
    shard_cache: ShardCache = EngineConfig.shard_cache,
    as_json: Annotated[bool, Option("--json", help="Print one JSON object at the end, not text as it comes.")] = False,
) -> None:
    """Answer one prompt."""
    with bad_input():
        speculation = SpeculationConfig(budget=budget, top_k_cap=top_k_cap)
        sampling = SamplingParams(
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            seed=secrets.randbits(32) if seed is None else seed,
            max_tokens=max_tokens,
        )
        # Anything else is refused by the config itself.
        layout: Any = {"devices": devices, "expert_layout": expert_layout, "shard_cache": shard_cache}
        EngineConfig(**layout)
        text = _read_prompt(prompt)
    from jaxspec.engine.engine import Engine
    from jaxspec.model.checkpoint.loading import open_checkpoint
    from jaxspec.model.text.tokenizer import Tokenizer
    from jaxspec.serve.cli.answer import Answer

    use_compilation_cache()
    start_up = StartUp()
    with bad_input():
        checkpoint = open_checkpoint(target)
        if checkpoint.kind != "target":
            raise ValueError(f"--target {target}: found a {checkpoint.kind} ({checkpoint.family}), expected a target")
        ids = _encode(Tokenizer.from_checkpoint(target), text, system, raw)
        # One request: a cache for it and no more.
        limit = checkpoint.config.max_position_embeddings
        config = EngineConfig(**layout, slots=1, cache_tokens=min(len(ids) + max_tokens, limit))
        engine = Engine.from_checkpoints(
            target, drafter, speculation=speculation, config=config, report=start_up.report
        )
        answer = Answer(engine, ids, sampling, start_up, stream=not as_json)
    banner(engine.describe())
    start_up.report("compiling")
    answer.run()
    if as_json:
        given = {
            "prompt_tokens": len(ids),
            "budget": engine.speculation.budget,
            "top_k_cap": engine.speculation.top_k_cap,
            "temperature": temperature,
            "seed": sampling.seed,
        }
        print(json.dumps(answer.as_dict() | given, ensure_ascii=False))
    answer.summarise()
    if answer.finish_reason == "interrupted":
        raise typer.Exit(130)


def _read_prompt(prompt: str | None) -> str:
    try:
        text = sys.stdin.read().removesuffix("\n") if prompt is None else prompt
    except UnicodeDecodeError as error:
        raise ValueError(f"prompt: {error}; expected UTF-8 text on standard input") from None
    if not text:
        raise ValueError("prompt: found 0 characters, expected at least 1; give --prompt or standard input")
    return text


def _encode(tokenizer: Any, text: str, system: str | None, raw: bool) -> list[int]:
    if raw:
        if system is not None:
            raise ValueError("--system: found with --raw, expected with the chat template only")
        return tokenizer.encode(text)
    messages = [{"role": "user", "content": text}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return tokenizer.encode_chat(messages)
