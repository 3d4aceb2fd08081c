"""What a quantisation scheme is: how weights are kept, multiplied, published, and described by a `config.json`.

A scheme is the only place that knows its layout; layers, families, conversion and benchmarks ask it. Another scheme is
a file beside this one and a line in `jaxspec.model.quantization.config.SCHEMES`.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.model.fields import Fields
from jaxspec.sharding.checkpoint.manifest import FLOAT_DTYPES

Array = TypeVar("Array", np.ndarray, jax.Array)


@dataclass(frozen=True)
class StoredArray:
    """One of the arrays that a weight is kept as: shape, dtype and the logical name of each dimension."""

    shape: tuple[int, ...]
    dtype: Any
    axes: tuple[str | None, ...]


@dataclass(frozen=True)
class PublishedTensor:
    """What a tensor of a published checkpoint has to be.

    Attributes:
      dtypes: any of these.
      values: what it must hold, where it describes another tensor; None for all others.
    """

    shape: tuple[int, ...]
    dtypes: tuple[str, ...]
    values: tuple[int, ...] | None = None


class Scheme(ABC):
    """A way to keep the weights of a Linear layer, or of all experts' stacked.

    Weights are [..., out, in]. A scheme names the arrays that stand for them ("weight_packed", …): the attributes of a
    module, and the last part of a published tensor's name. Subclasses are frozen dataclasses, so that modules which
    hold one compare and hash by value.

    Attributes:
      name: in `SCHEMES`, and for people.
      unit: inputs or outputs that share a scale and must not be parted; a mesh splits weights between units.
      whole_units: whether sizes must be multiples of `unit`; otherwise the last unit may be partial.
      outputs_per_scale: outputs that share a scale.
      scales: the name of the array of scales; "" for a scheme without.
      section: the `quantization_config` of a file in this scheme; empty for a scheme without.
      described: the `quant_method` that announces it, for people.
    """

    name: ClassVar[str]
    unit: ClassVar[int] = 1
    whole_units: ClassVar[bool] = False
    outputs_per_scale: ClassVar[int] = 1
    scales: ClassVar[str] = ""
    section: ClassVar[Mapping[str, Any]] = {}
    described: ClassVar[str] = ""

    @abstractmethod
    def stored(self, shape: tuple[int, ...], axes: tuple[str | None, ...], dtype: Any) -> dict[str, StoredArray]:
        """The arrays, by name, that weights of `shape` [..., out, in] are kept as; `dtype` where not quantised."""

    @abstractmethod
    def quantise(self, weights: np.ndarray) -> dict[str, np.ndarray]:
        """The tensors, by name, that a published file holds for weights [out, in]."""

    @abstractmethod
    def dequantise(self, arrays: Mapping[str, Array], dtype: Any) -> Array:
        """The arrays' weights [..., out, in] in `dtype`, NumPy's or JAX's as the arrays are."""

    def dense(self, arrays: Mapping[str, jax.Array], experts: jax.Array, dtype: Any) -> jax.Array:
        """The weights of `experts`, int32 [n], in `dtype`: arrays [experts, …] → [n, out, in]."""
        return self.dequantise({name: array[experts] for name, array in arrays.items()}, dtype)

    def multiply(self, arrays: Mapping[str, jax.Array], x: jax.Array, experts: jax.Array, dtype: Any) -> jax.Array:
        """Each row of `x` through one expert of its own, whose weights alone are read.

        Args:
          arrays: [experts, …].
          x: float32 [n, in].
          experts: int32 [n].
          dtype: of the model's activations, which says how exact a weight has to be.
        Returns:
          float32 [n, out].
        """
        return (self.dense(arrays, experts, jnp.float32) * x[:, None]).sum(-1)

    def reads(self, section: Mapping[str, Any]) -> bool:
        """Whether a `quantization_config` is of this scheme."""
        return False

    def read_ignored(self, fields: Fields) -> tuple[str, ...]:
        """Checks a `quantization_config` of this scheme; returns the names or patterns of modules left unquantised.

        Raises:
          ValueError: naming the field, for a setting that is not implemented.
        """
        return ()

    def published(self, name: str, shape: tuple[int, ...], dtype: str) -> dict[str, PublishedTensor]:
        """The published tensor `name`, kept by us as `shape` and `dtype`, and the tensors that must lie beside it."""
        return {name: PublishedTensor(shape, FLOAT_DTYPES if dtype in FLOAT_DTYPES else (dtype,))}

    def linear_scales(self, name: str, dtype: str) -> str:
        """The published scales of the Linear weight `name`, found in `dtype`, which is dequantised when it is read.

        "" where the weight is read as it is.
        """
        return ""

    def refusal(self, name: str) -> str | None:
        """Why the published tensor `name`, which is no weight of the model, shows another scheme; None if unknown."""
        return "zero points, where weights are symmetric" if name.endswith("zero_point") else None

    def random_scale(self, deviation: float) -> float:
        """The mean scale at which random stored values give weights of this standard deviation.

        Random values are uniform bits in an array of integers, and normal with deviation 1 in one of small floats.
        """
        return deviation


@dataclass(frozen=True)
class Unquantised(Scheme):
    """Weights in the model's own dtype."""

    name: ClassVar[str] = "unquantised"

    def stored(self, shape: tuple[int, ...], axes: tuple[str | None, ...], dtype: Any) -> dict[str, StoredArray]:
        """See `Scheme.stored`."""
        return {"weight": StoredArray(shape, dtype, axes)}

    def quantise(self, weights: np.ndarray) -> dict[str, np.ndarray]:
        """See `Scheme.quantise`."""
        return {"weight": weights}

    def dequantise(self, arrays: Mapping[str, Array], dtype: Any) -> Array:
        """See `Scheme.dequantise`."""
        return arrays["weight"].astype(dtype)


UNQUANTISED = Unquantised()


def read_names(fields: Fields, key: str) -> tuple[str, ...]:
    """A list of module names or, behind "re:", regular expressions; none where it is absent.

    Raises:
      ValueError: naming the field, for anything else.
    """
    names = fields.table.get(key)
    if names is None:
        return ()
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise fields.wrong(key, "a list of module names")
    for name in names:
        try:
            re.compile(name.removeprefix("re:"))
        except re.error:
            raise fields.wrong(key, f"names or regular expressions ({name!r} is neither)") from None
    return tuple(names)
