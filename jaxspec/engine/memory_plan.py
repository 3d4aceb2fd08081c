"""The plan: what a target and its drafter take on each device, what a pass reads, and how fast that can be at most.

Every size is taken from the model's own declaration of its weights and cache rows, of which only shapes are made. A
pass does more than read weights and cache (communication, launches, products), so the times that follow from the bytes
are bounds.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

from jaxspec.config import EngineConfig
from jaxspec.engine.expert_routing import busiest_experts, distinct_experts
from jaxspec.engine.memory import cache_bytes_per_token, pages_beside
from jaxspec.model.checkpoint.description import Description
from jaxspec.model.families.config import check_drafter
from jaxspec.model.layers.parameters import WeightSpec, declared
from jaxspec.sharding.arithmetic import cdiv
from jaxspec.sharding.layout import Layout, Placement

# The name of a part → what, in a weight's name, puts it there; the first that fits.
_PARTS: tuple[tuple[str, Callable[[list[str]], bool]], ...] = (
    ("norms", lambda words: "norm" in words[-2]),
    ("routed experts", lambda words: "experts" in words),
    ("shared experts", lambda words: "shared_experts" in words),
    ("routers", lambda words: "gate" in words),
    ("attention", lambda words: "self_attn" in words),
    ("MLP", lambda words: "mlp" in words),
    ("embedding", lambda words: words[0] == "embed_tokens"),
    ("output head", lambda words: words[0] == "lm_head"),
    ("feature projection", lambda words: True),
)


@dataclass(frozen=True)
class Part:
    """Weights of one kind.

    Attributes:
      name: of the kind.
      whole: every device holds all of them, on a mesh of several.
      device_bytes: on one device.
      total_bytes: each weight counted once.
      experts, chosen: of a routed part, how many experts there are and how many a row takes; else 0.
      looked_up: only one row of it is read for each token.
    """

    name: str
    whole: bool
    device_bytes: int
    total_bytes: int
    experts: int = 0
    chosen: int = 0
    looked_up: bool = False


@dataclass(frozen=True)
class ModelPlan:
    """One model's weights, and what a token of context takes in its cache on one device."""

    parts: tuple[Part, ...]
    cache_bytes_per_token: int

    @property
    def device_bytes(self) -> int:
        """Bytes of weights on one device."""
        return sum(part.device_bytes for part in self.parts)


@dataclass(frozen=True)
class Plan:
    """Target and drafter on a mesh.

    Attributes:
      drafter: None for plain decoding.
      devices: size of the mesh.
      expert_layout: how routed experts are placed, as in `EngineConfig`.
      page_size: tokens of a cache page.
      max_context: the longest context that the models were made for.
    """

    target: ModelPlan
    drafter: ModelPlan | None
    devices: int
    expert_layout: str
    page_size: int
    max_context: int

    @property
    def weight_bytes(self) -> int:
        """Bytes of both models' weights on one device."""
        return self.target.device_bytes + (self.drafter.device_bytes if self.drafter else 0)

    @property
    def cache_bytes_per_token(self) -> int:
        """Bytes that a token of context takes on one device, in both caches."""
        return self.target.cache_bytes_per_token + (self.drafter.cache_bytes_per_token if self.drafter else 0)

    def cache_tokens(self, room: int) -> int:
        """Tokens that the caches hold in whole pages, where weights and caches have `room` bytes of each device."""
        page_bytes = self.page_size * self.cache_bytes_per_token
        return pages_beside(room, self.weight_bytes, page_bytes) * self.page_size

    def shortfall(self, room: int, tokens: int) -> str | None:
        """Says, with the numbers, why weights and a cache of `tokens` do not fit into `room` bytes; None if they do."""
        cache = cdiv(tokens, self.page_size) * self.page_size * self.cache_bytes_per_token
        needed = self.weight_bytes + cache
        if needed <= room:
            return None
        drafter = f", the drafter's {_gb(self.drafter.device_bytes)}" if self.drafter else ""
        return (
            f"memory: the target's weights of {_gb(self.target.device_bytes)} a device{drafter} and a cache of "
            f"{tokens:,} tokens ({_gb(cache)}) need {_gb(needed)}, found {_gb(room)}, in which "
            f"{self.cache_tokens(room):,} tokens fit; use more devices, a smaller max_context or cache_tokens, or "
            "shard_cache"
        )

    def read_bytes(self, rows: int) -> int:
        """Bytes of weights that a target pass over `rows` rows reads on one device, on the busiest one that is."""
        return round(sum(self._read(part, rows) for part in self.target.parts))

    def draft_bytes(self) -> int:
        """Bytes of weights that a drafter pass reads on one device, the target's output head included."""
        if self.drafter is None:
            return 0
        head = [part for part in self.target.parts if part.name in ("output head", "embedding") and not part.looked_up]
        return self.drafter.device_bytes + sum(part.device_bytes for part in head)

    def touched_experts(self, rows: int) -> float:
        """Different experts of a layer that `rows` rows touch, on all devices; 0 for a model without."""
        return next((distinct_experts(p.experts, p.chosen, rows) for p in self.target.parts if p.experts), 0.0)

    def _read(self, part: Part, rows: int) -> float:
        if part.looked_up:
            return 0
        if not part.experts:
            return part.device_bytes
        if part.whole or self.expert_layout == "tensor" or self.devices == 1:
            return part.device_bytes * distinct_experts(part.experts, part.chosen, rows) / part.experts
        touched = busiest_experts(part.experts, part.chosen, rows, self.devices)
        return part.device_bytes * touched / (part.experts / self.devices)


def plan_models(target: Description, drafter: Description | None, config: EngineConfig) -> Plan:
    """Plans for `config`'s devices, layouts and page size.

    Raises:
      ValueError: naming the setting, where the mesh cannot split what it is to split.
    """
    if drafter is not None:
        check_drafter(target.config, drafter.config)
    placement = placement_of(config)
    module, specs = _declared(target, config.devices, placement)
    row = cache_bytes_per_token(module, None)
    plan = Plan(
        ModelPlan(_parts(specs, module.layout, target.config), row),
        None,
        config.devices,
        config.expert_layout,
        config.page_size,
        target.config.max_position_embeddings,
    )
    if drafter is None:
        return plan
    beside, specs = _declared(drafter, config.devices, placement)
    return replace(
        plan,
        drafter=ModelPlan(_parts(specs, beside.layout, drafter.config), cache_bytes_per_token(module, beside) - row),
        max_context=min(plan.max_context, drafter.config.max_position_embeddings),
    )


def placement_of(config: EngineConfig) -> Placement:
    """The settings that concern the target's layout."""
    return Placement(config.expert_layout, config.page_size if config.shard_cache == "sequence" else 0)


def _declared(model: Description, devices: int, placement: Placement) -> tuple[Any, tuple[WeightSpec, ...]]:
    return declared(model.family.build(model.config, devices, jnp.dtype(model.dtype), placement))


def _parts(specs: Sequence[WeightSpec], layout: Layout, config: Any) -> tuple[Part, ...]:
    tied = not any(spec.name.startswith("lm_head.") for spec in specs)
    sizes: dict[tuple[str, bool], list[WeightSpec]] = {}
    for spec in specs:
        name = next(name for name, belongs in _PARTS if belongs(spec.name.split(".")))
        sizes.setdefault((name, layout.devices > 1 and _shares(spec, layout) == 1), []).append(spec)
    parts = []
    for (name, whole), members in sizes.items():
        routed = name == "routed experts"
        parts.append(
            Part(
                name,
                whole,
                device_bytes=sum(_bytes(spec) // _shares(spec, layout) for spec in members),
                total_bytes=sum(_bytes(spec) for spec in members),
                experts=members[0].shape[0] if routed else 0,
                chosen=config.num_experts_per_tok if routed else 0,
                looked_up=name == "embedding" and not tied,
            )
        )
    order = [name for name, _ in _PARTS]
    return tuple(sorted(parts, key=lambda part: (order.index(part.name), part.whole)))


def _bytes(spec: WeightSpec) -> int:
    return math.prod(spec.shape) * jnp.dtype(spec.dtype).itemsize


def _shares(spec: WeightSpec, layout: Layout) -> int:
    return math.prod(layout.shares(axis) for axis in spec.axes if axis)


def _gb(count: int) -> str:
    return f"{count / 1e9:,.2f} GB"
