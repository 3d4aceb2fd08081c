"""How each weight is put together from the tensors of a published checkpoint, and the checks of what is there.

A weight is a tensor as it lies there, a dequantised one, or the stack of all experts' tensors, which stay quantised;
the scheme of the checkpoint says which. Every tensor of the source is accounted for before any weight is read.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxspec.model.checkpoint.source import Source
from jaxspec.model.families.registry import Family
from jaxspec.model.layers.parameters import WeightSpec
from jaxspec.model.quantization.scheme import PublishedTensor, Scheme
from jaxspec.sharding.arithmetic import cdiv
from jaxspec.sharding.checkpoint.manifest import FLOAT_DTYPES, Slab

BLOCK_BYTES = 32 * 2**20  # Rows are read and cast in blocks of about this size.
_DERIVED = re.compile(r"rotary_emb\.inv_freq$")  # Buffers that follow from the config.


@dataclass(frozen=True)
class Recipe:
    """What a weight is made of.

    Attributes:
      names: the source's tensors: one, or all experts' if the weight is a stack of them.
      places: of each of them in the source's order.
      stacked: whether it is one.
      scheme: of the checkpoint.
      scales: those of a tensor that is dequantised; empty for all others.
    """

    names: tuple[str, ...]
    places: tuple[int, ...]
    stacked: bool
    scheme: Scheme
    scales: str = ""

    @property
    def label(self) -> str:
        """What the source calls it, for people."""
        return f"{self.names[0]} to {self.names[-1]}" if self.stacked else self.names[0]


def plan_recipes(
    source: Source, family: Family, config: Any, specs: Sequence[WeightSpec]
) -> tuple[dict[str, Recipe], tuple[str, ...]]:
    """The recipe of every weight, by our name, and notes on the tensors that are left out on purpose.

    Raises:
      ValueError: in one line, naming the tensors that are missing, unknown, of another shape or dtype than they must
        be, or that contradict the quantisation.
    """
    scheme = family.scheme(config)
    places = {name: place for place, name in enumerate(source.tensors)}
    recipes: dict[str, Recipe] = {}
    needs: dict[str, PublishedTensor] = {}
    for spec, pattern in zip(specs, _patterns(source, family, specs), strict=True):
        stacked, dtype, scales = "{}" in pattern, str(spec.dtype), ""
        names = tuple(pattern.format(i) for i in range(spec.shape[0])) if stacked else (pattern,)
        shape = spec.shape[1:] if stacked else spec.shape
        if pattern in places and dtype in FLOAT_DTYPES and len(shape) == 2:
            found = source.tensors[pattern].dtype
            scales = scheme.linear_scales(pattern, found)
            dtype = found if scales else dtype
        for name in names:
            needs |= scheme.published(name, shape, dtype)
        recipes[spec.name] = Recipe(names, tuple(places.get(name, 0) for name in names), stacked, scheme, scales)
    problems = _mismatches(source, needs) or _misdescribed(source, needs)
    unmapped: list[str] = []
    refused: dict[str, list[str]] = {}
    notes: list[str] = []
    reasons: dict[str, list[str]] = {}
    for name in sorted(places.keys() - needs.keys()):
        if _DERIVED.search(name):
            notes.append(f"{name}: left out, it follows from the config")
        elif getattr(config, "tie_word_embeddings", False) and name.endswith("lm_head.weight"):
            notes.append(f"{name}: left out, tied to the embedding")
        elif (reason := family.left_out(config, name)) is not None:
            reasons.setdefault(reason, []).append(name)
        elif (why := scheme.refusal(name)) is not None:
            refused.setdefault(why, []).append(name)
        else:
            unmapped.append(name)
    if unmapped:
        problems.append(f"unmapped {_listed(unmapped)}")
    problems += [f"{why}: {_listed(names)}" for why, names in refused.items()]
    if problems:
        raise ValueError(f"{source.path}: tensors do not match its config: {'; '.join(problems)}")
    notes += [f"{len(names)} tensors from {names[0]} on: left out, {why}" for why, names in reasons.items()]
    return recipes, tuple(notes)


def read_slab(source: Source, recipe: Recipe, slab: Slab) -> np.ndarray:
    """Reads one slab of a weight, cast to the slab's dtype.

    Raises:
      ValueError: naming the tensor, if it holds NaN or infinity, or values that the dtype cannot hold.
    """
    out = np.empty(slab.shape, jnp.dtype(slab.tensor.dtype))
    if recipe.stacked:
        for expert in sorted(range(slab.start, slab.stop), key=lambda expert: recipe.places[expert]):
            _put(source, recipe.names[expert], source.read(recipe.names[expert]), out[expert - slab.start])
        return out
    name, unit = recipe.names[0], recipe.scheme.outputs_per_scale if recipe.scales else 1
    scales = source.read(recipe.scales) if recipe.scales else None
    step = cdiv(max(1, BLOCK_BYTES // max(1, 4 * int(np.prod(slab.shape[1:])))), unit) * unit
    for start in range(slab.start, slab.stop, step):
        stop = min(start + step, slab.stop)
        first = start - start % unit  # Rows that share scales are dequantised together.
        rows = source.read(name, first, stop)
        if scales is not None:
            arrays = {_last(name): rows, _last(recipe.scales): scales[first // unit : cdiv(stop, unit)]}
            rows = recipe.scheme.dequantise(arrays, np.float32)[start - first :]
        _put(source, name, rows, out[start - slab.start : stop - slab.start])
    return out


def _last(name: str) -> str:
    return name.rsplit(".", 1)[1]


def _put(source: Source, name: str, read: np.ndarray, out: np.ndarray) -> None:
    with np.errstate(over="ignore", invalid="ignore"):
        out[...] = read
        if not _is_finite(out):
            if not _is_finite(read):
                raise ValueError(f"{source.path}: {name} has NaN or infinite values, so the checkpoint is damaged")
            raise ValueError(f"{source.path}: {name} has values beyond {out.dtype}'s range; use --dtype float32")


def _is_finite(array: np.ndarray) -> bool:
    return array.dtype.kind in "iu" or bool(np.isfinite(array).all())


def _patterns(source: Source, family: Family, specs: Sequence[WeightSpec]) -> list[str]:
    """What the source calls each weight: of the ways that its family has, the one that most of its weights go by."""
    ways = list(zip(*(family.source_names(spec.name) for spec in specs), strict=True))
    return list(max(ways, key=lambda names: sum(name.format(0) in source.tensors for name in names)))


def _mismatches(source: Source, needs: Mapping[str, PublishedTensor]) -> list[str]:
    """What is missing, of another shape or of another dtype."""
    missing, misshapen, unreadable = [], [], []
    for name, need in needs.items():
        tensor = source.tensors.get(name)
        if tensor is None:
            missing.append(name)
            continue
        if tensor.shape != need.shape:
            misshapen.append(f"{name} (found {list(tensor.shape)}, expected {list(need.shape)})")
        if tensor.dtype not in need.dtypes:
            unreadable.append(f"{name} (found {tensor.dtype}, expected {' or '.join(need.dtypes)})")
    kinds = {"missing": missing, "misshapen": misshapen, "unsupported dtype": unreadable}
    return [f"{kind} {_listed(names)}" for kind, names in kinds.items() if names]


def _misdescribed(source: Source, needs: Mapping[str, PublishedTensor]) -> list[str]:
    """Which tensors that describe others say something else than what lies there."""
    wrong = []
    for name, need in needs.items():
        if need.values is not None and (found := source.read(name).tolist()) != list(need.values):
            wrong.append(f"{name} (found {found}, expected {list(need.values)})")
    return [f"wrong {_listed(wrong)}"] if wrong else []


def _listed(names: list[str], most: int = 12) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
