"""The table of axis rules, and which logical axes a given model splits on a given mesh.

Every weight and every cache names its axes logically ("heads", "vocab", …). `AXIS_RULES` says which mesh axis
a logical axis goes to; `Layout` says whether it may, counting in units that must not be cut (a head, not a column).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from jax.sharding import PartitionSpec

from jaxspec.sharding.mesh import TENSOR_AXIS

AXIS_RULES: Mapping[str, str] = {
    "heads": TENSOR_AXIS,
    "kv_heads": TENSOR_AXIS,
    "mlp": TENSOR_AXIS,
    "vocab": TENSOR_AXIS,
    "features": TENSOR_AXIS,
    "shared_mlp": TENSOR_AXIS,
    "experts": TENSOR_AXIS,
    "expert_mlp": TENSOR_AXIS,
    "page_rows": TENSOR_AXIS,
}


@dataclass(frozen=True)
class Placement:
    """What a user may choose of a model's layout.

    Attributes:
      experts: "tensor" splits every routed expert over the mesh, "expert" gives each device whole experts.
      page_rows: rows of a cache page, to be split over the mesh; 0 where every device holds whole pages.
    """

    experts: Literal["tensor", "expert"] = "tensor"
    page_rows: int = 0


DEFAULT_PLACEMENT = Placement()


@dataclass(frozen=True)
class Layout:
    """Where one model's arrays live on a mesh of `devices` devices.

    Attributes:
      devices: size of the mesh axis.
      units: for each logical axis that may be split, how many indivisible units it has (9 heads, 49152 vocabulary
        rows, …).
    """

    devices: int
    units: tuple[tuple[str, int], ...]

    def splits(self, axis: str) -> bool:
        """Whether `axis` is split over the mesh; otherwise every device holds all of it."""
        units = dict(self.units)
        return self.devices > 1 and axis in AXIS_RULES and axis in units and units[axis] % self.devices == 0

    def shares(self, axis: str) -> int:
        """Devices that `axis` is split over; 1 where each holds all of it."""
        return self.devices if self.splits(axis) else 1

    def spec(self, axes: tuple[str | None, ...]) -> PartitionSpec:
        """The partition of an array whose dimensions carry the logical names `axes`."""
        return PartitionSpec(*(AXIS_RULES[a] if a and self.splits(a) else None for a in axes))

    def replicated(self) -> tuple[str, ...]:
        """The rule-bound axes that this mesh does not divide, for the start-up banner."""
        return tuple(a for a, _ in self.units if self.devices > 1 and not self.splits(a))
