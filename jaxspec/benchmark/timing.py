"""What a round costs: as the engine runs it, by its parts, and against the bytes it must move.

The whole round is the engine's own compiled program. The parts are the same functions compiled one by one, so what the
compiler fuses across them, and the host's price of starting a program, make their sum exceed the whole.
"""

import dataclasses
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxspec.benchmark.round_parts import RoundParts
from jaxspec.config import EngineConfig, SamplingParams, SpeculationConfig
from jaxspec.engine.engine import Engine
from jaxspec.engine.memory import cache_bytes_per_token, weight_bytes
from jaxspec.engine.scheduler import CALLS_AHEAD
from jaxspec.sharding.arithmetic import cdiv

REPEATS = 20  # of which the median is taken
WARM_UP = 3
ENGINE_CALLS = 28  # of the requests that the engine itself is timed on: 20 and those that fill and drain the pipe
PARTS = ("draft", "grow", "verify", "commit")


@dataclass(frozen=True)
class PartTiming:
    """One part of a round, or the whole.

    Attributes:
      seconds: with calls dispatched ahead, so that the device never waits for the host.
      waited_seconds: with the host waiting for each call.
      bytes_moved: that one device must move, by `bytes_moved`.
    """

    seconds: float
    waited_seconds: float
    bytes_moved: int

    def bound_share(self, bandwidth: float) -> float:
        """The least time that the bytes allow at `bandwidth` bytes/s, as a share of the time taken."""
        return self.bytes_moved / bandwidth / self.seconds


@dataclass(frozen=True)
class RoundTiming:
    """A round under one setting.

    Attributes:
      budget: N; None without a drafter.
      whole: one round, a call's time over its rounds.
      parts: by name, those of `PARTS` that the setting has.
      engine_seconds: a round's share of wall time while the engine serves requests.
    """

    budget: int | None
    whole: PartTiming
    parts: dict[str, PartTiming]
    engine_seconds: float

    @property
    def host_wait(self) -> float:
        """Seconds a round for which the device waits for the host while the engine serves requests."""
        return self.engine_seconds - self.whole.seconds


def measure_bandwidth(device: jax.Device) -> float:
    """Bytes/s, read and written together, of a large copy on `device`."""
    elements = 2**25 if device.platform == "cpu" else 2**28
    array = jax.device_put(jax.random.bits(jax.random.key(0), (elements,), jnp.uint32), device)
    # In place, since a CPU would pay for new memory page by page; the second result is what can be waited for.
    flip = jax.jit(lambda x: (~x, x[0]), donate_argnums=0)

    def call() -> jax.Array:
        nonlocal array
        array, first = flip(array)
        return first

    return 2 * array.nbytes / seconds_ahead(call)


def seconds_waited(call: Callable[[], Any], repeats: int = REPEATS) -> float:
    """The median time of `call` with the host waiting for its result, after warming up."""
    for _ in range(WARM_UP):
        jax.block_until_ready(call())
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def seconds_ahead(call: Callable[[], Any], repeats: int = REPEATS) -> float:
    """The median time of a call in a pipeline of as many as the engine keeps in flight, after warming up."""
    in_flight: deque[Any] = deque()
    times = []
    for _ in range(WARM_UP + repeats):
        began = time.perf_counter()
        in_flight.append(call())
        if len(in_flight) == CALLS_AHEAD:
            jax.block_until_ready(in_flight.popleft())
        times.append(time.perf_counter() - began)
    jax.block_until_ready(list(in_flight))
    return statistics.median(times[WARM_UP:])


def bytes_moved(target: Any, drafter: Any, speculation: SpeculationConfig, context: int, batch: int) -> dict[str, int]:
    """The fewest bytes that one device moves in each part of a round.

    Weights that a part multiplies by are read once; embedding rows and norms' activations are neglected. Context keys
    and values are read once, up to `context`; new ones are written once, for the longest path. Logits, float32, are
    written once and read once.

    Args:
      drafter: module, or None.
      context: tokens of each of `batch` sequences.
    Returns:
      bytes by part, for the parts of `PARTS` that the setting has.
    """
    weights = weight_bytes(target)
    tied = "lm_head.weight" not in weights
    head = weights["embed_tokens.weight" if tied else "lm_head.weight"]
    body = sum(weights.values()) - weights["embed_tokens.weight"] - (0 if tied else head)
    config = target.config
    logits = 2 * 4 * batch * config.vocab_size // target.layout.shares("vocab")  # one row each
    target_row = cache_bytes_per_token(target, None)
    drafter_row = cache_bytes_per_token(target, drafter) - target_row
    nodes = speculation.budget + 1
    parts = {}
    depth = 0
    features = 0
    if drafter is not None:
        drafter_weights = weight_bytes(drafter)
        context_only = ("fc.", "hidden_norm.")
        features = sum(
            size
            for name, size in drafter_weights.items()
            if name.startswith(context_only) or name.split(".")[-2] in ("k_proj", "v_proj", "k_norm")
        )
        if speculation.budget:
            depth = speculation.length(drafter.config.depth)
            block = sum(size for name, size in drafter_weights.items() if not name.startswith(context_only))
            parts["draft"] = block + head + batch * context * drafter_row + depth * logits
            # Token and log-prob of each candidate; five 32-bit fields, a flag and its row of visibility for each node.
            parts["grow"] = batch * (depth * speculation.top_k_cap * 8 + nodes * (5 * 4 + 1 + nodes))
    parts["verify"] = body + head + batch * context * target_row + nodes * logits
    parts["commit"] = features + batch * (depth + 1) * (target_row + drafter_row)
    return parts


def timing_tokens(speculation: SpeculationConfig) -> int:
    """How many tokens timing may add to each sequence."""
    return 4 * ENGINE_CALLS * speculation.rounds_per_call


def make_engine(
    target: Any,
    drafter: Any,
    mesh: Mesh,
    speculation: SpeculationConfig,
    context: int,
    batch: int,
    report: Callable[[str], None] = lambda line: None,
) -> Engine:
    """An engine of `batch` slots with room for `context` tokens and what timing adds to them."""
    config = EngineConfig(
        devices=mesh.size,
        slots=batch,
        batch_buckets=(batch,),
        max_context=cdiv(context + timing_tokens(speculation), EngineConfig.page_size) * EngineConfig.page_size,
        keep_prefixes=False,
    )
    return Engine(target, drafter, mesh=mesh, speculation=speculation, config=config, eos_token_ids=(), report=report)


def time_round(engine: Engine, context: int) -> RoundTiming:
    """Times a round of the engine's current setting with all its slots at `context` tokens.

    The engine's own run comes first and compiles its program, which is then timed alone on random caches.
    """
    engine_seconds = _engine_seconds(engine, context)
    bench = RoundParts(engine, context)
    speculation, slots = engine.speculation, engine.config.slots
    moved = bytes_moved(engine.target, engine.drafter, speculation, context, slots)

    def timing(call: Callable[[], Any], size: int, rounds: int = 1) -> PartTiming:
        bench.reset()
        waited = seconds_waited(call)
        bench.reset()
        return PartTiming(seconds_ahead(call) / rounds, waited / rounds, size)

    whole = timing(bench.round, sum(moved.values()), speculation.rounds_per_call)
    parts = {name: timing(call, moved[name]) for name, call in bench.parts().items()}
    return RoundTiming(None if engine.drafter is None else speculation.budget, whole, parts, engine_seconds)


def _engine_seconds(engine: Engine, context: int) -> float:
    """Median wall time of a round while the engine decodes one long request a slot, nothing left to compile."""
    random = np.random.default_rng(0)
    prompts = random.integers(0, engine.target.config.vocab_size, (engine.config.slots, context + 1))
    rounds = engine.speculation.rounds_per_call
    sampling = SamplingParams(temperature=0, max_tokens=ENGINE_CALLS * rounds, ignore_eos=True)
    engine.generate(prompts.tolist(), dataclasses.replace(sampling, max_tokens=WARM_UP * rounds))
    for prompt in prompts.tolist():
        engine.add(prompt, sampling)
    times = []
    while engine.has_work:
        began = time.perf_counter()
        if engine.step():
            times.append(time.perf_counter() - began)
    # The first steps fill the pipe and the last two drain it.
    return statistics.median(times[WARM_UP:-2] or times) / rounds
