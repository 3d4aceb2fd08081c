"""Models of published shapes with random weights, for timing: the cost of a round does not depend on their values."""

import dataclasses
import functools
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from model.cache import PagedCache, RowSpec, pool_spec
from model.config import DFlashConfig, ModelConfig, RopeConfig, default_target_layers
from model.families import FAMILIES
from model.parameters import WeightSpec, fill


@dataclass(frozen=True)
class ModelPair:
    """A target and the DFlash drafter made for it."""

    target: ModelConfig
    drafter: DFlashConfig

    def with_drafter(self, layers: int, block_size: int) -> "ModelPair":
        """The same target with a drafter of another depth or block; the taps follow the published rule.

        Raises:
          ValueError: naming the value, where no such drafter can be.
        """
        most = self.target.num_hidden_layers - 3
        if not 1 <= layers <= most:
            raise ValueError(f"drafter layers: found {layers}, expected 1 to {most}")
        if not 2 <= block_size <= 256:
            raise ValueError(f"block size: found {block_size}, expected 2 to 256")
        drafter = dataclasses.replace(
            self.drafter,
            num_hidden_layers=layers,
            block_size=block_size,
            target_layer_ids=default_target_layers(self.target.num_hidden_layers, layers),
            windows=(0,) * layers,
            causal=(False,) * layers,
        )
        return ModelPair(self.target, drafter)


def pair_of(target: ModelConfig, layers: int, block_size: int) -> ModelPair:
    """A target and a drafter of the target's own width, heads and MLP."""
    shared = {field.name for field in dataclasses.fields(DFlashConfig)} & {
        field.name for field in dataclasses.fields(ModelConfig)
    }
    drafter = DFlashConfig(
        **{name: getattr(target, name) for name in shared - {"num_hidden_layers"}},
        num_hidden_layers=layers,
        block_size=block_size,
        mask_token_id=target.vocab_size - 1,
        num_target_layers=target.num_hidden_layers,
        target_layer_ids=(),
        windows=(),
        causal=(),
    )
    return ModelPair(target, drafter).with_drafter(layers, block_size)


SHAPES: Mapping[str, ModelPair] = {
    "smollm2": pair_of(
        ModelConfig(
            family="llama",
            vocab_size=49152,
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
            head_dim=64,
            rms_norm_eps=1e-5,
            rope=RopeConfig(theta=1e5),
            max_position_embeddings=8192,
            tie_word_embeddings=True,
            qk_norm=False,
        ),
        layers=4,
        block_size=8,
    ),
    "qwen3-8b": pair_of(
        ModelConfig(
            family="qwen3",
            vocab_size=151936,
            hidden_size=4096,
            intermediate_size=12288,
            num_hidden_layers=36,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=128,
            rms_norm_eps=1e-6,
            rope=RopeConfig(theta=1e6),
            max_position_embeddings=40960,
            tie_word_embeddings=False,
            qk_norm=True,
        ),
        layers=5,
        block_size=16,
    ),
}


def random_models(pair: ModelPair, mesh: Mesh, dtype: Any, seed: int = 0) -> tuple[Any, Any]:
    """Target and drafter filled with random weights on the devices of `mesh`, each made where it lies."""
    target_key, drafter_key = jax.random.split(jax.random.key(seed))
    return (
        _random_module(pair.target.family, pair.target, mesh, dtype, target_key),
        _random_module("dflash", pair.drafter, mesh, dtype, drafter_key),
    )


def random_cache(module: Any, pages: int, page_size: int, mesh: Mesh, dtype: Any, seed: int = 0) -> PagedCache:
    """Pools shaped as `model.cache.empty_cache` makes them, full of standard normal values."""
    key, made = jax.random.key(seed), itertools.count()

    def pool(spec: RowSpec) -> jax.Array:
        sharding = NamedSharding(mesh, pool_spec(spec, module.layout))
        pool_key = jax.random.fold_in(key, next(made))
        return _normal(pool_key, (pages, page_size, *spec.shape), dtype, sharding, 0.0, 1.0)

    return jax.tree.map(pool, module.cache_rows, is_leaf=lambda node: isinstance(node, RowSpec))


def _random_module(family_name: str, config: Any, mesh: Mesh, dtype: Any, key: jax.Array) -> Any:
    family = FAMILIES[family_name]
    layout = family.layout_of(config, mesh.size)
    made = itertools.count()

    def leaf(spec: WeightSpec) -> jax.Array:
        # Matrices keep the scale of what they multiply; norms stay near one.
        mean, scale = (1.0, 0.1) if len(spec.shape) == 1 else (0.0, spec.shape[-1] ** -0.5)
        sharding = NamedSharding(mesh, layout.spec(spec.axes))
        return _normal(jax.random.fold_in(key, next(made)), spec.shape, spec.dtype, sharding, mean, scale)

    return fill(family.build(config, mesh.size, jnp.dtype(dtype)), leaf)


def _normal(key: jax.Array, shape: tuple[int, ...], dtype: Any, sharding: Any, mean: float, scale: float) -> jax.Array:
    return _normal_program(shape, jnp.dtype(dtype), sharding)(key, mean, scale)


@functools.cache
def _normal_program(shape: tuple[int, ...], dtype: Any, sharding: Any) -> Any:
    def make(key: jax.Array, mean: jax.Array, scale: jax.Array) -> jax.Array:
        return (jax.random.normal(key, shape, dtype) * scale + mean).astype(dtype)

    return jax.jit(make, out_shardings=sharding)
