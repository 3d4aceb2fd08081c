"""Compiling before serving, so that no request waits for a program."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from jaxspec.config import SamplingParams

if TYPE_CHECKING:
    from jaxspec.engine.engine import Engine

WARM_UPS = ("first", "all")
# Greedy, sampled, and sampled from the likeliest.
KINDS = tuple(
    SamplingParams(temperature=temperature, top_p=top_p, max_tokens=2, ignore_eos=True)
    for temperature, top_p in ((0.0, 1.0), (1.0, 1.0), (1.0, 0.9))
)
SMALLEST_PROMPT = 32  # tokens


def warm_up(engine: "Engine", extent: str) -> None:
    """Compiles the programs of one short greedy request, or those of every batch size, prompt length and of `KINDS`.

    Programs for longer contexts, penalties, log-probabilities and grammars are still compiled when first asked for.

    Args:
      engine: idle.
      extent: "first" or "all".
    """
    engine.warm_up()
    if extent == "first":
        return
    room = min(engine.max_context, engine.page_count * engine.config.page_size // engine.config.slots)
    for batch in engine.config.batch_sizes:
        for sampling in KINDS:
            _generate(engine, [[0, 0]] * batch, sampling)
        for length in _prompt_lengths(min(engine.config.prefill_chunk, room - 2)):
            one_token = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
            _generate(engine, [[0] * (length + 1)] * batch, one_token)


def _generate(engine: "Engine", prompts: list[list[int]], sampling: SamplingParams) -> None:
    engine.generate(prompts, sampling)
    engine.forget_prefixes()  # or the next prompts would be processed in smaller chunks


def _prompt_lengths(longest: int) -> Iterator[int]:
    """Yields a length for each size of chunk that prompts are processed in."""
    length = SMALLEST_PROMPT
    while length < longest:
        yield length
        length *= 4
    yield longest
