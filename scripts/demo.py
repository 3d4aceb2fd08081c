"""`make demo`: SmolLM2 answers through the shipped drafter, then plain and speculative decoding side by side."""

import sys
import time
from dataclasses import dataclass
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from jaxspec.config import EngineConfig, SamplingParams, SpeculationConfig
from jaxspec.engine import Engine
from jaxspec.requests import RequestStatistics
from model.tokenizer import Tokenizer
from serve.answer import Answer
from serve.packaged import converted, packaged_gguf
from serve.startup import StartUp, bad_input, banner, say, use_compilation_cache

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache" / "checkpoints"
DRAFTER = ROOT / "drafters" / "smollm2-135m-dflash"
PROMPTS = (
    "Give me three tips for sleeping better.",
    "Tom has 3 boxes with 12 pencils each and gives away 7 pencils. How many are left? Explain step by step.",
    "Write a Python function that returns the sum of the even numbers in a list.",
)
BUDGETS = (8, 16, 32)
TEMPERATURES = (0.0, 1.0)
TOKENS = 64


@dataclass(frozen=True)
class Measured:
    """Decoding of all prompts with one setting: speed, τ and the tokens, to compare."""

    tokens_per_second: float
    tau: float
    tokens: list[list[int]]


def main() -> None:
    """Runs the demo."""
    use_compilation_cache()
    start_up = StartUp()
    with bad_input():
        if not DRAFTER.is_dir():
            raise FileNotFoundError(f"{DRAFTER}: no such folder; the demo's drafter is part of the repository")
        start_up.report("converting SmolLM2-135M-Instruct and its drafter, unless done before")
        target, drafter = converted(packaged_gguf(), CACHE), converted(DRAFTER, CACHE)
        config = EngineConfig(slots=1, max_context=256)
        engine = Engine.from_checkpoints(target, drafter, config=config, report=start_up.report)
        tokenizer = Tokenizer.from_checkpoint(target)
    prompts = [tokenizer.encode_chat([{"role": "user", "content": prompt}]) for prompt in PROMPTS]
    banner(engine.describe())
    say(f"\n> {PROMPTS[0]}\n")
    answer = Answer(engine, prompts[0], SamplingParams(temperature=0, max_tokens=160), start_up, stream=True)
    answer.run()
    answer.summarise()
    if answer.finish_reason == "interrupted":
        raise KeyboardInterrupt

    depth = engine.depth
    settings = [("plain decoding", SpeculationConfig(budget=0)), ("DFlash chain", SpeculationConfig(depth, 1))]
    settings += [(f"DDTree, budget {budget}", SpeculationConfig(budget)) for budget in BUDGETS]
    say(f"\nMeasuring {len(settings)} settings at two temperatures; the first time, each is compiled.")
    rows = []
    for name, speculation in settings:
        engine.speculation = speculation
        rows.append((name, [measure(engine, prompts, temperature) for temperature in TEMPERATURES]))
    Console().print(table(rows, depth))


def measure(engine: Engine, prompts: list[list[int]], temperature: float) -> Measured:
    """Answers the prompts one after another, once the programs are compiled."""
    engine.generate(prompts[:1], SamplingParams(temperature=temperature, max_tokens=2 * engine.depth + 2))
    sampling = SamplingParams(temperature=temperature, seed=1, max_tokens=TOKENS)
    began = time.perf_counter()
    answers = [engine.generate([prompt], sampling)[0] for prompt in prompts]
    seconds = time.perf_counter() - began
    total = RequestStatistics()
    for answer in answers:
        total.merge(answer.statistics)
    return Measured(total.produced / seconds, total.tau, [answer.tokens for answer in answers])


def table(rows: list[tuple[str, list[Measured]]], depth: int) -> Table:
    """What was measured, against the first row."""
    result = Table(
        title=f"SmolLM2-135M-Instruct, {len(PROMPTS)} prompts, {TOKENS} tokens each, one request at a time",
        caption=f"τ: tokens committed per target pass. The chain's {depth} drafts are greedy, at temperature 1 too.\n"
        "Same text: answers equal to plain decoding's, token for token, at the same seed.",
    )
    result.add_column("")
    for temperature in TEMPERATURES:
        for heading in (f"T={temperature:g}  tokens/s", "speed", "τ", "same text"):
            result.add_column(heading, justify="right")
    plain = rows[0][1]
    for name, measured in rows:
        cells = []
        for one, base in zip(measured, plain, strict=True):
            same = sum(a == b for a, b in zip(one.tokens, base.tokens, strict=True))
            speed = one.tokens_per_second / base.tokens_per_second
            cells += [f"{one.tokens_per_second:.1f}", f"{speed:.2f}×", f"{one.tau:.2f}", f"{same}/{len(base.tokens)}"]
        result.add_row(name, *cells)
    return result


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted")
    except typer.Exit as exit_:
        sys.exit(exit_.exit_code)
