"""Routed experts: stacked weights, kept in their scheme, and two ways through them.

An *assignment* is one row with one expert that it chose. Few of them (decoding, trees) are gathered: for each, its
expert's weights are read, unpacked, scaled, multiplied and summed in one fused loop, so that only chosen experts are
read and no dequantised copy exists. Many (prefill) are grouped: sorted by expert into tiles of rows that share one,
of which a block at a time is dequantised and multiplied as matrices.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec.model.layers.basic import product
from jaxspec.model.layers.parameters import weight
from jaxspec.model.quantization.scheme import Scheme
from jaxspec.sharding.arithmetic import cdiv
from jaxspec.sharding.collectives import device_index
from jaxspec.sharding.layout import Layout

MOST_TILE_ROWS = 128


@dataclass(frozen=True)
class Costs:
    """What the choice between the two ways rests on.

    Attributes:
      gathered_per_expert: up to so many assignments for each expert there is, gathering is cheaper than grouping.
      block_bytes: of the weights dequantised at a time.
    """

    gathered_per_expert: float
    block_bytes: int


# A GPU writes and reads a tile's dequantised expert, several times its packed bytes, and wants few, large launches. A
# CPU gathers one value at a time, but keeps a single expert in its cache.
COSTS = {"gpu": Costs(2, 2**28), "cpu": Costs(0.25, 1)}


@dataclass(frozen=True)
class ExpertsConfig:
    """Sizes of the routed experts, and how their weights are kept. Field names are those of transformers.

    Attributes:
      moe_intermediate_size: inner units of one expert.
    """

    n_routed_experts: int
    hidden_size: int
    moe_intermediate_size: int
    scheme: Scheme


class ExpertLinear(nnx.Module):
    """One projection of every expert, y = x Wᵀ, its weights stacked [experts, out, in] and kept in their scheme.

    Args:
      axes: logical names of the three dimensions.
      dtype: of activations, and of the weights where they are not quantised.
    """

    def __init__(self, shape: tuple[int, int, int], axes: tuple[str | None, ...], scheme: Scheme, dtype: Any):
        self.scheme, self.dtype = scheme, dtype
        stored = scheme.stored(shape, axes, dtype)
        self.names = tuple(stored)
        for name, array in stored.items():
            setattr(self, name, weight(array.shape, array.dtype, array.axes))

    def gathered(self, x: jax.Array, experts: jax.Array) -> jax.Array:
        """Each row through one expert of its own: x [n, in], experts int32 [n] → float32 [n, out]."""
        return self.scheme.multiply(self._arrays(), x.astype(jnp.float32), experts, self.dtype)

    def dense(self, experts: jax.Array) -> jax.Array:
        """The weights of `experts`, int32 [n], dequantised: [n, out, in]."""
        return self.scheme.dense(self._arrays(), experts, self.dtype)

    def _arrays(self) -> dict[str, jax.Array]:
        return {name: getattr(self, name)[...] for name in self.names}


class Experts(nnx.Module):
    """SwiGLU experts, each split over the mesh or whole on one device, as the layout says."""

    def __init__(self, config: ExpertsConfig, layout: Layout, dtype: Any):
        self.owners_split = layout.splits("experts")
        self.split = self.owners_split or layout.splits("expert_mlp")
        self.config, self.dtype, self.inner_shares = config, dtype, layout.shares("expert_mlp")
        count, hidden, inner = config.n_routed_experts, config.hidden_size, config.moe_intermediate_size
        self.local = count // layout.shares("experts")
        inwards, outwards = ("experts", "expert_mlp", None), ("experts", None, "expert_mlp")
        self.gate_proj = ExpertLinear((count, inner, hidden), inwards, config.scheme, dtype)
        self.up_proj = ExpertLinear((count, inner, hidden), inwards, config.scheme, dtype)
        self.down_proj = ExpertLinear((count, hidden, inner), outwards, config.scheme, dtype)

    def __call__(self, x: jax.Array, chosen: jax.Array, weights: jax.Array) -> jax.Array:
        """Each row's experts, weighted and added: what this device's experts, or parts of them, contribute.

        The one entry to routed experts; it picks the way by platform and by the number of assignments.

        Args:
          x: [rows, hidden].
          chosen: int32 [rows, k], experts of all devices.
          weights: float32 [rows, k].
        Returns:
          [rows, hidden] in the dtype of `x`, to be added over the devices where `split`.
        """
        experts = (chosen - device_index(self.owners_split) * self.local).reshape(-1)  # [rows * k]
        here = (experts >= 0) & (experts < self.local)
        few = experts.size <= self.costs.gathered_per_expert * self.local
        outputs = self.gathered(x, experts, here) if few else self.grouped(x, experts, here)  # [rows * k, hidden]
        weights = jnp.where(here.reshape(weights.shape), weights, 0)
        return (outputs.reshape(*weights.shape, -1) * weights[..., None]).sum(1).astype(x.dtype)

    def gathered(self, x: jax.Array, experts: jax.Array, here: jax.Array) -> jax.Array:
        """[rows * k, hidden] float32, one assignment at a time; those of other devices give any finite value."""
        mine = jnp.where(here, experts, 0)
        if len(x) == 1:
            return self._through(jnp.broadcast_to(x, (mine.size, x.shape[1])), mine)
        # Equal experts stand together, so that the second finds the first one's weights in the device's cache.
        order = jnp.argsort(mine)
        return self._through(x[order // (mine.size // len(x))], mine[order])[jnp.argsort(order)]

    def _through(self, x: jax.Array, experts: jax.Array) -> jax.Array:
        """Each row through its one expert, x [n, hidden] → the same shape, float32."""
        gate, up = (layer.gathered(x, experts).astype(self.dtype) for layer in (self.gate_proj, self.up_proj))
        return self.down_proj.gathered(jax.nn.silu(gate) * up, experts)

    def grouped(self, x: jax.Array, experts: jax.Array, here: jax.Array) -> jax.Array:
        """[rows * k, hidden], blocks of tiles one after the other; assignments of other devices give 0."""
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
        """The costs on the platform in use."""
        return COSTS["cpu" if jax.default_backend() == "cpu" else "gpu"]

    def _tiles_in_block(self, assignments: int) -> int:
        """As many tiles as keep the dequantised weights within `block_bytes`."""
        config, shares = self.config, self.inner_shares
        weights = 3 * config.hidden_size * config.moe_intermediate_size // shares
        most = max(1, self.costs.block_bytes // (weights * jnp.dtype(self.dtype).itemsize))
        return min(most, assignments)


def make_tiles(experts: jax.Array, count: int, block: int) -> tuple[jax.Array, jax.Array]:
    """Sorts assignments by expert into tiles of rows, none of which holds those of two experts.

    Args:
      experts: int32 [n], each assignment's expert; `count` where it is on another device, which gets no place.
      count: how many experts there are.
      block: tiles processed at a time.
    Returns:
      slots int32 [blocks, block, tile rows], the assignment at each place, or a number of its own from n on where there
      is none; owners int32 [blocks, block], each tile's expert. Their number covers every choice of experts.
    """
    assignments = experts.size
    rows = MOST_TILE_ROWS
    while rows > 8 and rows * count >= 2 * assignments:
        rows //= 2
    tiles = min(assignments, assignments // rows + count)
    tiles += -tiles % block
    order = jnp.argsort(experts)  # stable
    owner = experts[order]
    sizes = jnp.zeros(count, jnp.int32).at[experts].add(1, mode="drop")
    needed = cdiv(sizes, rows)  # tiles
    ends = jnp.cumsum(needed)
    first_tile, first = ends - needed, jnp.cumsum(sizes) - sizes
    place = first_tile[owner] * rows + jnp.arange(assignments) - first[owner]
    place = jnp.where(owner < count, place, tiles * rows)
    slots = assignments + jnp.arange(tiles * rows, dtype=jnp.int32)
    slots = slots.at[place].set(order.astype(jnp.int32), mode="drop")
    owners = jnp.searchsorted(ends, jnp.arange(tiles), side="right").astype(jnp.int32)
    return slots.reshape(-1, block, rows), jnp.minimum(owners, count - 1).reshape(-1, block)
