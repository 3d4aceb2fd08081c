"""`make demo`: SmolLM2 answers through the shipped drafter, then plain and speculative decoding side by side."""

import sys
import time
from dataclasses import dataclass
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from jaxspec.config import EngineConfig, SamplingParams, SpeculationConfig
from jaxspec.engine.engine import Engine
from jaxspec.engine.request import RequestStatistics
from jaxspec.model.text.tokenizer import Tokenizer
from jaxspec.serve.cli.answer import Answer
from jaxspec.serve.cli.demo_model import converted, packaged_gguf
from jaxspec.serve.cli.demo_prompts import DEMO_PROMPTS
from jaxspec.serve.cli.startup import StartUp, bad_input, banner, say, use_compilation_cache

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache" / "checkpoints"
DRAFTER = ROOT / "drafters" / "smollm2-135m-dflash"
PROMPTS = tuple(text for _, text in DEMO_PROMPTS[::7])  # one of each kind
BUDGETS = (8, 16, 32)
TEMPERATURES = (0.0, 1.0)
TOKENS = 24


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
    answer = Answer(engine, prompts[0], SamplingParams(temperature=0, max_tokens=96), start_up, stream=True)
    answer.run()
    answer.summarise()
    if answer.finish_reason == "interrupted":
        raise KeyboardInterrupt

    settings = [
        ("plain decoding", SpeculationConfig(0)),
        ("DFlash chain", SpeculationConfig(engine.depth, top_k_cap=1)),
    ]
    settings += [(f"DDTree, budget {budget}", SpeculationConfig(budget)) for budget in BUDGETS]
    say(f"\nMeasuring {len(settings)} settings at two temperatures; the first time, each is compiled.")
    rows = []
    for name, speculation in settings:
        engine.speculation = speculation
        rows.append((name, [measure(engine, prompts, temperature) for temperature in TEMPERATURES]))
    Console().print(table(rows))
    if engine.mesh.devices.flat[0].platform == "cpu":
        say(
            "A CPU is short of arithmetic: each row checked costs time. A GPU waits for weights: rows come almost free."
        )


def measure(engine: Engine, prompts: list[list[int]], temperature: float) -> Measured:
    """Answers the prompts one after another, once the programs are compiled."""
    engine.generate(prompts[:1], SamplingParams(temperature=temperature, max_tokens=2))
    sampling = SamplingParams(temperature=temperature, seed=1, max_tokens=TOKENS)
    began = time.perf_counter()
    answers = [engine.generate([prompt], sampling)[0] for prompt in prompts]
    seconds = time.perf_counter() - began
    total = RequestStatistics()
    for answer in answers:
        total.merge(answer.statistics)
    return Measured(total.produced / seconds, total.tau, [answer.tokens for answer in answers])


def table(rows: list[tuple[str, list[Measured]]]) -> Table:
    """What was measured at each temperature, against the first row."""
    result = Table(
        title=f"{len(PROMPTS)} prompts, {TOKENS} tokens each, one request at a time",
        caption="τ: tokens committed per target pass. Same text: answers equal to plain decoding's, token for token.",
    )
    result.add_column("")
    for heading in ("tokens/s", "speed", "τ", "same text"):
        result.add_column(heading, justify="right")
    for index, temperature in enumerate(TEMPERATURES):
        result.add_section()
        plain = rows[0][1][index]
        for name, measured in rows:
            one = measured[index]
            # The published chain samples its drafts; here they are the drafter's likeliest tokens at any temperature.
            drafts = ", greedy drafts" if "chain" in name and temperature else ""
            same = sum(a == b for a, b in zip(one.tokens, plain.tokens, strict=True))
            speed = one.tokens_per_second / plain.tokens_per_second
            cells = f"{one.tokens_per_second:.1f}", f"{speed:.2f}×", f"{one.tau:.2f}", f"{same}/{len(plain.tokens)}"
            result.add_row(f"T={temperature:g}  {name}{drafts}", *cells)
    return result


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted")
    except typer.Exit as exit_:
        sys.exit(exit_.exit_code)
