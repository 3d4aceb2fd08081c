"""Conversion of a published checkpoint: a plan that accounts for every tensor, then parts written one by one.

Nothing is written before the plan stands and the tokenizer is read. Memory holds the part that is written, the next
one, which is read meanwhile, and a block of rows, whatever the checkpoint's size.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import jax.numpy as jnp
import numpy as np

from jaxspec.model.checkpoint.assembly import Recipe, plan_recipes, read_slab
from jaxspec.model.checkpoint.source import Source
from jaxspec.model.families.registry import FAMILIES, Kind, family_of
from jaxspec.model.layers.parameters import weight_specs
from jaxspec.model.quantization.scheme import Scheme
from jaxspec.model.text.tokenizer import Tokenizer
from jaxspec.sharding.checkpoint.manifest import (
    FLOAT_DTYPES,
    MANIFEST,
    MAX_PART_BYTES,
    Part,
    Slab,
    Tensor,
    partition,
    read_manifest,
)
from jaxspec.sharding.checkpoint.writer import CheckpointWriter


@dataclass(frozen=True)
class ConversionPlan:
    """What a conversion will write.

    Attributes:
      kind, family: of the model.
      dtype: of every weight written that is not quantised.
      parts: what each Orbax checkpoint will hold, under our names, in the order in which the source holds it.
      recipes: our name of each weight → what it is made of.
      notes: tensors of the source that are left out on purpose, with the reason.
    """

    kind: Kind
    family: str
    dtype: str
    parts: tuple[Part, ...]
    recipes: Mapping[str, Recipe]
    notes: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of weights to be written."""
        return sum(part.nbytes for part in self.parts)


def plan_conversion(
    source: Source, *, kind: Kind | None = None, dtype: str | None = None, max_part_bytes: int = MAX_PART_BYTES
) -> ConversionPlan:
    """Matches the source's tensors with the weights of the model that its config describes.

    Args:
      kind: refuse a source of another kind; None takes what the config says.
      dtype: of the weights written; None keeps the source's own (of most of its bytes).
    Raises:
      ValueError: in one line, for a config that is not supported, or naming the tensors that are missing, unknown, of
        another shape or of a dtype that cannot be read; or for a tokenizer that is not supported.
    """
    name = family_of(source.config)
    family = FAMILIES[name]
    if kind is not None and kind != family.kind:
        raise ValueError(f"{source.path}: found a {family.kind} ({name}), expected a {kind}")
    config = family.read_config(source.config)
    dtype = dtype or _own_dtype(source, family.scheme(config))
    if dtype not in FLOAT_DTYPES:
        raise ValueError(f"dtype: found {dtype!r}, expected one of {', '.join(FLOAT_DTYPES)}")
    specs = weight_specs(family.build(config, 1, jnp.dtype(dtype)))
    recipes, notes = plan_recipes(source, family, config, specs)
    _check_tokenizer(source, family.kind)
    groups: dict[str, list[Tensor]] = {}
    for spec in specs:
        groups.setdefault(_group(spec.name), []).append(Tensor(spec.name, spec.shape, str(spec.dtype)))
    parts = [
        Part(part.name, tuple(sorted(part.slabs, key=lambda slab: _place(slab, recipes))))
        for part in partition(groups, max_part_bytes)
    ]
    parts.sort(key=lambda part: _place(part.slabs[0], recipes))
    return ConversionPlan(family.kind, name, dtype, tuple(parts), recipes, notes)


def convert(
    source: Source,
    plan: ConversionPlan,
    output: Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    progress: Callable[[Part], None] = lambda part: None,
) -> None:
    """Writes the converted checkpoint; `progress` is called after each part, those of an earlier run included.

    Raises:
      ValueError: in one line, if the output is in the way, or a run to be resumed was of another source or dtype.
    """
    origin, output = source.path.resolve(), output.resolve()
    if output == origin or output in origin.parents:
        raise ValueError(f"{output}: holds the source {source.path}; choose another output")
    identity = {
        "source": source.fingerprint,
        "dtype": plan.dtype,
        "parts": [[part.name, part.nbytes] for part in plan.parts],
    }
    writer = CheckpointWriter(output, identity, resume=resume, overwrite=overwrite)
    tokenizer = writer.partial / "tokenizer"
    tokenizer.mkdir(exist_ok=True)
    source.write_tokenizer(tokenizer)
    for part in plan.parts:
        if part.name in writer.finished:
            progress(part)
    missing = [part for part in plan.parts if part.name not in writer.finished]
    for part, arrays in _read_ahead(source, plan, missing):
        writer.add(part, arrays)
        progress(part)
    about = {
        "kind": plan.kind,
        "family": plan.family,
        "dtype": plan.dtype,
        "config": dict(source.config),
        "source": {"name": source.path.name, "fingerprint": source.fingerprint},
    }
    writer.finish(about, plan.parts)


def is_converted(output: Path, source: Source, plan: ConversionPlan) -> bool:
    """Whether `output` is already the finished conversion of this very source in the plan's dtype."""
    if not (output / MANIFEST).is_file():
        return False
    match read_manifest(output).about:
        case {"source": {"fingerprint": fingerprint}, "dtype": dtype}:
            return (fingerprint, dtype) == (source.fingerprint, plan.dtype)
    return False


def _read_ahead(
    source: Source, plan: ConversionPlan, parts: Sequence[Part]
) -> Iterator[tuple[Part, dict[str, np.ndarray]]]:
    """Each part and its arrays; the next part is read while the caller writes this one."""

    def read(part: Part) -> dict[str, np.ndarray]:
        return {slab.tensor.name: read_slab(source, plan.recipes[slab.tensor.name], slab) for slab in part.slabs}

    with ThreadPoolExecutor(1) as reader:
        begun: tuple[Part, Future[dict[str, np.ndarray]]] | None = None
        for part in parts:
            following = part, reader.submit(read, part)
            if begun:
                yield begun[0], begun[1].result()
            begun = following
        if begun:
            yield begun[0], begun[1].result()


def _check_tokenizer(source: Source, kind: Kind) -> None:
    """Raises ValueError if a target's tokenizer cannot be read; one that comes without any is let through."""
    with TemporaryDirectory() as folder:
        source.write_tokenizer(Path(folder))
        if kind == "target" and (Path(folder) / "tokenizer.json").is_file():
            try:
                Tokenizer.from_checkpoint(Path(folder))
            except ValueError as error:
                raise ValueError(f"{source.path}: {str(error).removeprefix(f'{folder}/')}") from error


def _own_dtype(source: Source, scheme: Scheme) -> str:
    """The dtype that most bytes of the source are kept in, quantised weights and their scales not counted."""
    sizes: Counter[str] = Counter()
    for name, tensor in source.tensors.items():
        if tensor.dtype in FLOAT_DTYPES and not (scheme.scales and name.endswith(f".{scheme.scales}")):
            sizes[tensor.dtype] += tensor.nbytes
    return sizes.most_common(1)[0][0] if sizes else "float32"


def _place(slab: Slab, recipes: Mapping[str, Recipe]) -> tuple[int, int]:
    """Where in the source a slab begins."""
    recipe = recipes[slab.tensor.name]
    return min(recipe.places[slab.start : slab.stop] if recipe.stacked else recipe.places), slab.start


def _group(name: str) -> str:
    """The part that a weight belongs to: its layer's, or its own outside the layers."""
    parts = name.split(".")
    return ".".join(parts[:2] if parts[0] == "layers" else parts[:1])
