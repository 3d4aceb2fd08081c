"""Checks on real devices that a mesh changes no token: rounds with trees in float32, on 1 and N devices.

Two pairs are run: a converted target with its drafter, and random weights of Qwen3-8B's shape cut to a few layers,
whose 32 query and 8 K/V heads the mesh really splits. Exits with 1 where any answer differs.
"""

import dataclasses
import sys
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer

from jaxspec.benchmark.shapes import SHAPES, ModelPair
from jaxspec.benchmark.synthetic import random_models
from jaxspec.config import EngineConfig, SamplingParams, SpeculationConfig
from jaxspec.engine.engine import Engine
from jaxspec.model.checkpoint.loading import load_drafter, load_target
from jaxspec.serve.cli.startup import StartUp, bad_input
from jaxspec.sharding.mesh import make_mesh

Option = typer.Option
SPECULATION = SpeculationConfig(budget=16)
PROMPTS = 4


def main(
    target: Annotated[Path, Option(help="Folder of the converted target.")],
    drafter: Annotated[Path, Option(help="Folder of the converted drafter.")],
    devices: Annotated[int, Option(help="Devices to compare with one.")] = 2,
    layers: Annotated[int, Option(help="Layers of the random pair.")] = 4,
    max_tokens: Annotated[int, Option(help="New tokens of each answer.")] = 64,
) -> None:
    """Compare the tokens of one device with those of a mesh."""
    start_up = StartUp()

    def converted(mesh: jax.sharding.Mesh) -> tuple[Any, Any]:
        module = load_target(target, mesh, jnp.float32)
        return module, load_drafter(drafter, mesh, module.config, jnp.float32)

    def random(mesh: jax.sharding.Mesh) -> tuple[Any, Any]:
        shape = SHAPES["qwen3-8b"]
        cut = dataclasses.replace(shape.target, num_hidden_layers=layers)
        drafter = dataclasses.replace(
            shape.drafter,
            num_hidden_layers=2,
            num_target_layers=layers,
            target_layer_ids=(0, 1),
            windows=(0, 0),
            causal=(False, False),
        )
        return random_models(ModelPair(cut, drafter), mesh, jnp.float32)

    differing = 0
    for name, models in (("converted", converted), ("random", random)):
        with bad_input():
            answers = {count: _answers(models, count, max_tokens, start_up) for count in (1, devices)}
        same = sum(a == b for a, b in zip(answers[1], answers[devices], strict=True))
        differing += len(answers[1]) - same
        print(f"{name}: {same} of {len(answers[1])} answers equal on 1 and {devices} {jax.devices()[0].device_kind}")
    sys.exit(1 if differing else 0)


def _answers(models: Any, devices: int, max_tokens: int, start_up: StartUp) -> list[list[int]]:
    """Greedy and sampled answers to random prompts, with trees."""
    mesh = make_mesh(devices)
    target, drafter = models(mesh)
    config = EngineConfig(devices=devices, slots=PROMPTS, batch_buckets=(PROMPTS,), max_context=256)
    engine = Engine(
        target,
        drafter,
        mesh=mesh,
        speculation=SPECULATION,
        config=config,
        eos_token_ids=(),
        report=start_up.report,
    )
    prompts = np.random.default_rng(0).integers(0, target.config.vocab_size, (PROMPTS, 40)).tolist()
    sampling = [SamplingParams(temperature=i % 2, seed=i, max_tokens=max_tokens) for i in range(PROMPTS)]
    return [completion.tokens for completion in engine.generate(prompts, sampling)]


if __name__ == "__main__":
    typer.run(main)
