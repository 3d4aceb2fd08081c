"""Tiny random models, and a drafter whose every guess is planned, for the tests of rounds and engines."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jaxspec.engine.engine import Engine
from jaxspec.engine.modules import FlatModule
from jaxspec.model.families import dflash, llama
from jaxspec.model.families.config import DFlashConfig, ModelConfig, RopeConfig
from jaxspec.model.layers.parameters import fill, weight
from jaxspec.sharding.compilation import REPLICATED, jit_on_mesh, specs_of
from jaxspec.sharding.layout import Layout
from jaxspec.sharding.mesh import make_mesh
from jaxspec.speculation.drafting import Drafting, dflash_drafting
from jaxspec.speculation.slot_table import SlotTable
from jaxspec.speculation.tree import Candidates

# 8 query heads over 2 K/V heads: on 8 devices queries are split and K/V replicated.
GROUPED = ModelConfig(
    family="llama",
    vocab_size=64,
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=4,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=1e4),
    max_position_embeddings=256,
    tie_word_embeddings=True,
    qk_norm=False,
)
# 9 heads over 3, as in SmolLM2: neither 2 nor 8 devices divide them.
UNEVEN = replace(
    GROUPED,
    num_attention_heads=9,
    num_key_value_heads=3,
    hidden_size=36,
    tie_word_embeddings=False,
    qk_norm=True,
    vocab_size=40,
)

DFLASH = DFlashConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=4,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=1e4),
    max_position_embeddings=256,
    block_size=8,
    mask_token_id=63,
    num_target_layers=2,
    target_layer_ids=(0,),
    windows=(0, 6),
    causal=(False, True),
)


def random_weights(build: Callable[[], nnx.Module], layout: Layout, mesh: jax.sharding.Mesh, seed: int) -> Any:
    """The module that `build` declares, its matrices wide enough for peaked, varied outputs."""
    rng = np.random.default_rng(seed)

    def leaf(spec: Any) -> jax.Array:
        if len(spec.shape) == 1:
            value = rng.normal(1, 0.2, spec.shape)
        else:
            value = rng.normal(0, 1.3 / np.sqrt(spec.shape[-1]), spec.shape)
        return jax.device_put(np.asarray(value, spec.dtype), NamedSharding(mesh, layout.spec(spec.axes)))

    return fill(build, leaf)


def tiny_target(
    config: ModelConfig = GROUPED, devices: int = 1, seed: int = 0, dtype: Any = jnp.float32
) -> llama.LlamaForCausalLM:
    layout = llama.layout_of(config, devices)
    return random_weights(lambda: llama.LlamaForCausalLM(config, layout, dtype), layout, make_mesh(devices), seed)


def tiny_dflash(
    config: DFlashConfig = DFLASH, devices: int = 1, seed: int = 1, dtype: Any = jnp.float32
) -> dflash.DFlashDrafter:
    layout = dflash.layout_of(config, devices)
    return random_weights(lambda: dflash.DFlashDrafter(config, layout, dtype), layout, make_mesh(devices), seed)


def on_mesh(devices: int, module: nnx.Module, body: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles `body(module, *arguments)`, arguments and results replicated, as each device of the mesh runs it."""
    flat = FlatModule(module)

    def run(leaves: tuple[jax.Array, ...], arguments: tuple[Any, ...]) -> Any:
        return body(flat.holding(leaves), *arguments)

    program = jit_on_mesh(run, make_mesh(devices), (specs_of(flat.leaves), REPLICATED), REPLICATED)
    return lambda *arguments: program(flat.leaves, arguments)


@dataclass(frozen=True)
class OracleConfig:
    """What an engine asks of a drafter's config."""

    depth: int


class Oracle(nnx.Module):
    """A drafter that knows what plain decoding answers and errs by plan.

    A round is recognised by its request's seed and its anchor's position. `known[r, p]` is the token at position p of
    request r (-1: unknown). `depth[r, p] = b` plans the round whose anchor stands at p: the true token is the best
    guess at depths below b, guess number `rank[r, p]` at depth b, and missing after it. b = 0 is wrong from the start;
    b = -1 puts every true token at a random rank below K, or leaves it out. All else is random, from (seed, position).
    """

    def __init__(self, config: OracleConfig, layout: Layout, requests: int, positions: int):
        self.config = config
        self.layout = layout
        self.seeds = weight((requests,), jnp.uint32, (None,))
        self.known = weight((requests, positions), jnp.int32, (None, None))
        self.depth = weight((requests, positions), jnp.int32, (None, None))
        self.rank = weight((requests, positions), jnp.int32, (None, None))

    cache_rows = ()


def oracle_drafting(drafter: Oracle, target: Any, length: int, top_k_cap: int) -> Drafting:
    vocab = target.config.vocab_size

    def one(seed: jax.Array, position: jax.Array) -> tuple[jax.Array, jax.Array]:
        match = drafter.seeds[...] == seed
        row = jnp.argmax(match)
        places = position + 1 + jnp.arange(length)
        known = drafter.known[...].at[row, places].get(mode="fill", fill_value=-1)
        truth = jnp.where(match.any(), known, -1)
        planned = jnp.where(match.any(), drafter.depth[...][row, position], -1)
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(7), seed), position)
        keys = jax.random.split(key, 3)
        levels = 1 + jnp.arange(length)
        # A rank of K leaves the true token out.
        loose = jax.random.randint(keys[0], (length,), 0, top_k_cap + 1)
        strict = jnp.where(
            levels < planned, 0, jnp.where(levels == planned, drafter.rank[...][row, position], top_k_cap)
        )
        ranks = jnp.where(truth < 0, top_k_cap, jnp.where(planned < 0, loose, strict))[:, None]
        noise = jax.random.uniform(keys[1], (length, vocab)).at[jnp.arange(length), truth].set(-1.0, mode="drop")
        _, others = jax.lax.top_k(noise, top_k_cap)
        guesses = jnp.arange(top_k_cap)
        shifted = jnp.concatenate([others[:, :1], others[:, :-1]], axis=1)
        tokens = jnp.where(guesses < ranks, others, jnp.where(guesses == ranks, truth[:, None], shifted))
        # Planned rounds: the path to depth b first, then the siblings there, then the rest.
        steps = jnp.where(levels == planned, 1e-3, 10.0)[:, None] * guesses
        sharp = -steps - jnp.where(levels > planned, 1.0, 0.0)[:, None]
        flat = -jnp.cumsum(jax.random.exponential(keys[2], (length, top_k_cap)), axis=1)
        return tokens.astype(jnp.int32), jnp.where(planned < 0, flat, sharp).astype(jnp.float32)

    def propose(state: SlotTable, cache: Any, page_table: jax.Array) -> Candidates:
        return Candidates(*jax.vmap(one)(state.seed, state.length))

    return Drafting(length, (), propose, lambda tapped, positions: ())


@dataclass(frozen=True)
class Plan:
    """How an oracle drafts for one request.

    Attributes:
      prompt_length, answer: of the request; the answer is plain decoding's.
      rounds: (b, rank) of one round after the other; rounds after the last are random.
    """

    seed: int
    prompt: Sequence[int]
    answer: Sequence[int]
    rounds: Sequence[tuple[int, int]] = ()


def accepted_by(rounds: Sequence[tuple[int, int]], budget: int) -> list[int]:
    """What a tree of `budget` nodes accepts of planned rounds: the sibling of rank r at depth b is node b + r."""
    return [b if b + rank <= budget else min(b - 1, budget) for b, rank in rounds]


def oracle(plans: Sequence[Plan], budget: int, depth: int, devices: int, positions: int = 256) -> Oracle:
    """An oracle that follows `plans` in rounds of `budget` nodes."""
    table = {name: np.full((len(plans), positions), -1, np.int32) for name in ("known", "depth")}
    table["rank"] = np.zeros((len(plans), positions), np.int32)
    table["seeds"] = np.array([plan.seed for plan in plans], np.uint32)
    for row, plan in enumerate(plans):
        tokens = [*plan.prompt, *plan.answer]
        table["known"][row, : len(tokens)] = tokens
        position = len(plan.prompt) - 1
        for (b, rank), accepted in zip(plan.rounds, accepted_by(plan.rounds, budget), strict=True):
            if position >= positions:
                break
            table["depth"][row, position], table["rank"][row, position] = b, rank
            position += accepted + 1
    layout = Layout(devices, ())
    mesh = make_mesh(devices)
    return fill(
        lambda: Oracle(OracleConfig(depth), layout, len(plans), positions),
        lambda spec: jax.device_put(table[spec.name], NamedSharding(mesh, PartitionSpec())),
    )


class Guided(nnx.Module):
    """An oracle's guesses over a DFlash drafter's cache, so that drafts are accepted and drafter rows are written."""

    def __init__(self, guesses: Oracle, drafter: dflash.DFlashDrafter):
        self.guesses, self.drafter = guesses, drafter
        self.config, self.layout, self.cache_rows = drafter.config, drafter.layout, drafter.cache_rows


def guided_drafting(drafter: Guided, target: Any, length: int, top_k_cap: int) -> Drafting:
    guesses = oracle_drafting(drafter.guesses, target, length, top_k_cap)
    return replace(dflash_drafting(drafter.drafter, target, length, top_k_cap), propose=guesses.propose)


def finish(engine: Engine, ids: Sequence[int]) -> dict[int, Any]:
    """Steps until the requests `ids` end; each one's (tokens, finish reason, statistics)."""
    tokens: dict[int, list[int]] = {}
    ended: dict[int, Any] = {}
    idle = 0
    while not all(i in ended for i in ids):
        outputs = engine.step()
        idle = 0 if outputs else idle + 1
        assert idle < 1000, "the engine brings nothing any more"
        for output in outputs:
            tokens.setdefault(output.request_id, []).extend(output.tokens)
            if output.finish_reason is not None:
                ended[output.request_id] = (tokens[output.request_id], output.finish_reason, output.statistics)
    return ended
