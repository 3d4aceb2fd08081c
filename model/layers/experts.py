"""Routed experts: stacked weights, as published (bfloat16 or float32, INT4, FP8), and two ways through them.

Few rows (decoding, trees): for each pair (row, chosen expert) the expert's weights are gathered, unpacked, scaled,
multiplied and summed in one fused loop, so that only chosen experts are read and no dequantised copy exists. Many rows
(prefill): pairs are sorted by expert into tiles of rows that share one, and a block of tiles at a time is dequantised
and multiplied as matrices.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec.model.families.kimi_config import KimiConfig
from jaxspec.model.layers.basic import product
from jaxspec.model.layers.parameters import weight
from jaxspec.model.quantization import fp8, int4
from jaxspec.model.quantization.config import BLOCK_SIZE, GROUP_SIZE, PACKED
from jaxspec.sharding.collectives import device_index
from jaxspec.sharding.layout import Layout

MOST_TILE_ROWS = 128


@dataclass(frozen=True)
class Costs:
    """What the choice between the two ways rests on.

    Attributes:
      pairs_an_expert: up to so many pairs for each expert there is, pairs are cheaper than tiles.
      block_bytes: of the weights dequantised at a time.
    """

    pairs_an_expert: float
    block_bytes: int


# A GPU writes and reads a tile's dequantised expert, several times its packed bytes, and wants few, large launches. A
# CPU runs pairs one value at a time, but keeps a single expert in its cache.
COSTS = {"gpu": Costs(2, 2**28), "cpu": Costs(0.25, 1)}


class ExpertLinear(nnx.Module):
    """One projection of every expert, y = x Wᵀ, its weights stacked [experts, out, in] and kept as published.

    Args:
      axes: logical names of the three dimensions.
      scheme: "int4", "fp8" or None.
      dtype: of activations, and of the weights where they are not quantised.
    """

    def __init__(self, shape: tuple[int, int, int], axes: tuple[str | None, ...], scheme: str | None, dtype: Any):
        experts, outputs, inputs = shape
        self.scheme, self.dtype = scheme, dtype
        if scheme == "int4":
            self.weight_packed = weight((experts, outputs, inputs // PACKED), jnp.int32, axes)
            self.weight_scale = weight((experts, outputs, inputs // GROUP_SIZE), jnp.bfloat16, axes)
        elif scheme == "fp8":
            self.weight = weight(shape, jnp.float8_e4m3fn, axes)
            self.weight_scale_inv = weight(fp8.scale_shape(shape), jnp.float32, axes)
        else:
            self.weight = weight(shape, dtype, axes)

    def pairs(self, x: jax.Array, experts: jax.Array) -> jax.Array:
        """Each row through one expert of its own: x [pairs, in], experts int32 [pairs] → [pairs, out], float32."""
        x = x.astype(jnp.float32)
        if self.scheme == "int4":
            return self._int4_pairs(x, experts)
        weights = self.weight[...][experts].astype(jnp.float32)  # [pairs, out, in]
        if self.scheme == "fp8":
            down, across = (jnp.arange(size) // BLOCK_SIZE for size in weights.shape[1:])
            weights *= self.weight_scale_inv[...][experts[:, None, None], down[:, None], across]
        return (weights * x[:, None]).sum(-1)

    def _int4_pairs(self, x: jax.Array, experts: jax.Array) -> jax.Array:
        """Word by word, its eight values one after the other: the compiler then loads each word once."""
        packed = self.weight_packed[...][experts]  # [pairs, out, in / 8]
        scale = self.weight_scale[...][experts].astype(jnp.float32)[..., None]  # [pairs, out, in / 32, 1]
        packed = packed.reshape(*scale.shape[:3], -1)  # words of one scale last
        places = x.reshape(x.shape[0], 1, *packed.shape[2:], PACKED)
        total = jnp.zeros((), jnp.float32)
        for place in range(PACKED):
            value = (((packed >> (4 * place)) & 0xF) - 8).astype(jnp.float32)
            if self.dtype == jnp.float32:
                value = _as_bfloat16(value * scale)
            total += value * places[..., place]
        if self.dtype != jnp.float32:
            total *= scale
        return total.sum((-2, -1))

    def dense(self, experts: jax.Array) -> jax.Array:
        """The weights of `experts`, int32 [n], dequantised: [n, out, in]."""
        if self.scheme == "int4":
            scale = self.weight_scale[...][experts].astype(jnp.float32)
            values = int4.unpack(self.weight_packed[...][experts]).astype(jnp.float32)
            groups = values.reshape(*scale.shape, GROUP_SIZE) * scale[..., None]
            return _as_bfloat16(groups).reshape(values.shape).astype(self.dtype)
        if self.scheme == "fp8":
            return fp8.dequantise(self.weight[...][experts], self.weight_scale_inv[...][experts], self.dtype)
        return self.weight[...][experts]


def _as_bfloat16(x: jax.Array) -> jax.Array:
    """float32, rounded to bfloat16's precision: published INT4 weights mean bf16(q · scale).

    Unlike a cast there and back, the compiler may not leave it out. Activations of a lower precision don't need it.
    """
    return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)


class Experts(nnx.Module):
    """SwiGLU experts, each split over the mesh or whole on one device, as the layout says."""

    def __init__(self, config: KimiConfig, layout: Layout, dtype: Any):
        self.owners_split = layout.splits("experts")
        self.split = self.owners_split or layout.splits("expert_mlp")
        self.config, self.dtype, self.inner_shares = config, dtype, layout.shares("expert_mlp")
        count, hidden, inner = config.n_routed_experts, config.hidden_size, config.moe_intermediate_size
        self.local = count // layout.shares("experts")
        self.gate_proj = ExpertLinear(
            (count, inner, hidden), ("experts", "expert_mlp", None), config.expert_scheme, dtype
        )
        self.up_proj = ExpertLinear(
            (count, inner, hidden), ("experts", "expert_mlp", None), config.expert_scheme, dtype
        )
        self.down_proj = ExpertLinear(
            (count, hidden, inner), ("experts", None, "expert_mlp"), config.expert_scheme, dtype
        )

    def __call__(self, x: jax.Array, chosen: jax.Array, weights: jax.Array) -> jax.Array:
        """Each row's experts, weighted and added: what this device's experts, or parts of them, contribute.

        Args:
          x: [rows, hidden].
          chosen: int32 [rows, k], experts of all devices.
          weights: float32 [rows, k].
        Returns:
          [rows, hidden] in the dtype of `x`, to be added over the devices where `split`.
        """
        experts = (chosen - device_index(self.owners_split) * self.local).reshape(-1)  # [rows * k]
        here = (experts >= 0) & (experts < self.local)
        few = experts.size <= self.costs.pairs_an_expert * self.local
        outputs = self.by_pair(x, experts, here) if few else self.by_tile(x, experts, here)  # [rows * k, hidden]
        weights = jnp.where(here.reshape(weights.shape), weights, 0)
        return (outputs.reshape(*weights.shape, -1) * weights[..., None]).sum(1).astype(x.dtype)

    def by_pair(self, x: jax.Array, experts: jax.Array, here: jax.Array) -> jax.Array:
        """[rows * k, hidden] float32, one pair at a time; pairs of other devices' experts give any finite value."""
        mine = jnp.where(here, experts, 0)
        if len(x) == 1:
            return self._through(jnp.broadcast_to(x, (mine.size, x.shape[1])), mine)
        # Equal experts stand together, so that the second finds the first one's weights in the device's cache.
        order = jnp.argsort(mine)
        return self._through(x[order // (mine.size // len(x))], mine[order])[jnp.argsort(order)]

    def _through(self, rows: jax.Array, experts: jax.Array) -> jax.Array:
        """Each row through its one expert, [pairs, hidden] → the same shape, float32."""
        gate, up = (layer.pairs(rows, experts).astype(self.dtype) for layer in (self.gate_proj, self.up_proj))
        return self.down_proj.pairs(jax.nn.silu(gate) * up, experts)

    def by_tile(self, x: jax.Array, experts: jax.Array, here: jax.Array) -> jax.Array:
        """[rows * k, hidden], blocks of tiles one after the other; pairs of other devices' experts give 0."""
        each = experts.size // x.shape[0]
        slots, owners = make_tiles(jnp.where(here, experts, self.local), self.local, self._tiles_in_block(experts.size))

        def block(outputs: jax.Array, tiles: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            slots, owners = tiles  # [tiles, tile rows], [tiles]
            rows = x.at[slots // each].get(mode="fill", fill_value=0)
            gate, up = (product("tri,toi->tro", rows, layer.dense(owners)) for layer in (self.gate_proj, self.up_proj))
            result = product("tri,toi->tro", jax.nn.silu(gate) * up, self.down_proj.dense(owners))
            return outputs.at[slots].set(result, mode="drop", unique_indices=True), None

        outputs = jnp.zeros((experts.size, x.shape[1]), x.dtype)
        return jax.lax.scan(block, outputs, (slots, owners))[0]

    @property
    def costs(self) -> Costs:
        """Of the platform in use."""
        return COSTS["cpu" if jax.default_backend() == "cpu" else "gpu"]

    def _tiles_in_block(self, pairs: int) -> int:
        """As many tiles as keep the dequantised weights within `block_bytes`."""
        config, shares = self.config, self.inner_shares
        weights = 3 * config.hidden_size * config.moe_intermediate_size // shares
        most = max(1, self.costs.block_bytes // (weights * jnp.dtype(self.dtype).itemsize))
        return min(most, pairs)


def make_tiles(experts: jax.Array, count: int, block: int) -> tuple[jax.Array, jax.Array]:
    """Sorts pairs by expert into tiles of rows, none of which holds two experts' pairs.

    Args:
      experts: int32 [pairs]; `count` for pairs that belong to no expert here, which get no place.
      count: how many experts there are.
      block: tiles processed at a time.
    Returns:
      slots int32 [blocks, block, tile rows], the pair at each place, or a number of its own from `pairs` on where there
      is none; owners int32 [blocks, block], each tile's expert. Their number covers every choice of experts.
    """
    pairs = experts.size
    rows = MOST_TILE_ROWS
    while rows > 8 and rows * count >= 2 * pairs:
        rows //= 2
    tiles = min(pairs, pairs // rows + count)
    tiles += -tiles % block
    order = jnp.argsort(experts)  # stable
    owner = experts[order]
    sizes = jnp.zeros(count, jnp.int32).at[experts].add(1, mode="drop")
    needed = -(-sizes // rows)  # tiles
    ends = jnp.cumsum(needed)
    first_tile, first_pair = ends - needed, jnp.cumsum(sizes) - sizes
    place = first_tile[owner] * rows + jnp.arange(pairs) - first_pair[owner]
    place = jnp.where(owner < count, place, tiles * rows)
    slots = pairs + jnp.arange(tiles * rows, dtype=jnp.int32)
    slots = slots.at[place].set(order.astype(jnp.int32), mode="drop")
    owners = jnp.searchsorted(ends, jnp.arange(tiles), side="right").astype(jnp.int32)
    return slots.reshape(-1, block, rows), jnp.minimum(owners, count - 1).reshape(-1, block)
