"""Conversion of a published checkpoint: a plan that accounts for every tensor, then parts written one by one.

Nothing is written before the plan stands and the tokenizer is read. Memory holds one part and a block of rows, whatever
the checkpoint's size.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import jax.numpy as jnp
import numpy as np

from model.families import FAMILIES, Family, Kind, family_of
from model.parameters import WeightSpec, weight_specs
from model.sources import Source
from model.tokenizer import Tokenizer
from sharding.checkpoint import DTYPES, MANIFEST, MAX_PART_BYTES, Part, Slab, Tensor, partition, read_manifest
from sharding.journal import CheckpointWriter
from sharding.layout import AXIS_RULES

BLOCK_BYTES = 32 * 2**20  # Rows are read and cast in blocks of about this size.
_DERIVED = re.compile(r"rotary_emb\.inv_freq$")  # Buffers that follow from the config.


@dataclass(frozen=True)
class ConversionPlan:
    """What a conversion will write.

    Attributes:
      kind, family: of the model.
      dtype: of every weight written.
      parts: what each Orbax checkpoint will hold, under our names.
      mapping: our name of each weight → its name in the source.
      notes: tensors of the source that are left out on purpose, with the reason.
    """

    kind: Kind
    family: str
    dtype: str
    parts: tuple[Part, ...]
    mapping: Mapping[str, str]
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
    dtype = dtype or _own_dtype(source)
    if dtype not in DTYPES:
        raise ValueError(f"dtype: found {dtype!r}, expected one of {', '.join(DTYPES)}")
    specs = weight_specs(family.build(config, 1, jnp.dtype(dtype)))
    mapping = {
        spec.name: next((n for n in family.source_names(spec.name) if n in source.tensors), None) for spec in specs
    }
    notes = _check(source, family, specs, mapping, getattr(config, "tie_word_embeddings", False))
    _check_tokenizer(source, family.kind)
    groups: dict[str, list[Tensor]] = {}
    for spec in specs:
        split = [axis for axis, logical in enumerate(spec.axes) if logical in AXIS_RULES]
        tensor = Tensor(spec.name, spec.shape, dtype, split[0] if split else 0)
        groups.setdefault(_group(spec.name), []).append(tensor)
    found = {ours: theirs for ours, theirs in mapping.items() if theirs is not None}
    return ConversionPlan(family.kind, name, dtype, partition(groups, max_part_bytes), found, notes)


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
        if part.name not in writer.finished:
            writer.add(
                part,
                {s.tensor.name: read_slab(source, plan.mapping[s.tensor.name], s) for s in part.slabs},
            )
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


def read_slab(source: Source, name: str, slab: Slab) -> np.ndarray:
    """Reads one slab of the source's tensor `name`, cast to the slab's dtype.

    Raises:
      ValueError: naming the tensor, if it holds NaN or infinity, or values that the dtype cannot hold.
    """
    out = np.empty(slab.shape, jnp.dtype(slab.tensor.dtype))
    rows = slab.tensor.shape[0]
    first, last = (slab.start, slab.stop) if slab.tensor.axis == 0 else (0, rows)
    columns = (slice(None),) * slab.tensor.axis + (slice(slab.start, slab.stop),) if slab.tensor.axis else ()
    step = max(1, BLOCK_BYTES // max(1, 4 * int(np.prod(slab.tensor.shape[1:]))))
    for start in range(first, last, step):
        stop = min(start + step, last)
        block = source.read(name, start, stop)[columns]
        with np.errstate(over="ignore"):
            out[start - first : stop - first] = block
        if not np.isfinite(out[start - first : stop - first]).all():
            if not np.isfinite(block).all():
                raise ValueError(f"{source.path}: {name} has NaN or infinite values, so the checkpoint is damaged")
            raise ValueError(
                f"{source.path}: {name} has values beyond {slab.tensor.dtype}'s range; use --dtype float32"
            )
    return out


def _check(
    source: Source, family: Family, specs: tuple[WeightSpec, ...], mapping: Mapping[str, str | None], tied: bool
) -> tuple[str, ...]:
    """Raises ValueError unless source and weights match one to one; returns what is left out on purpose."""
    problems, notes = [], []
    missing = [family.source_names(ours)[0] for ours, theirs in mapping.items() if theirs is None]
    if missing:
        problems.append(f"missing {_listed(missing)}")
    unmapped = []
    for name in sorted(set(source.tensors) - set(mapping.values())):
        if _DERIVED.search(name):
            notes.append(f"{name}: left out, it follows from the config")
        elif tied and name == "lm_head.weight":
            notes.append(f"{name}: left out, tied to the embedding")
        else:
            unmapped.append(name)
    if unmapped:
        problems.append(f"unmapped {_listed(unmapped)}")
    misshapen, unreadable = [], []
    for spec in specs:
        theirs = mapping[spec.name]
        if theirs is None:
            continue
        tensor = source.tensors[theirs]
        if tensor.shape != spec.shape:
            misshapen.append(f"{theirs} (found {list(tensor.shape)}, expected {list(spec.shape)})")
        if tensor.dtype not in DTYPES:
            unreadable.append(f"{theirs} ({tensor.dtype})")
    if misshapen:
        problems.append(f"misshapen {_listed(misshapen)}")
    if unreadable:
        problems.append(f"unsupported dtype {_listed(unreadable)}")
    if problems:
        raise ValueError(f"{source.path}: tensors do not match its config: {'; '.join(problems)}")
    return tuple(notes)


def _check_tokenizer(source: Source, kind: Kind) -> None:
    """Raises ValueError if a target's tokenizer cannot be read; one that comes without any is let through."""
    with TemporaryDirectory() as folder:
        source.write_tokenizer(Path(folder))
        if kind == "target" and (Path(folder) / "tokenizer.json").is_file():
            try:
                Tokenizer.from_checkpoint(Path(folder))
            except ValueError as error:
                raise ValueError(f"{source.path}: {str(error).removeprefix(f'{folder}/')}") from error


def _own_dtype(source: Source) -> str:
    """The dtype that most bytes of the source are kept in."""
    sizes: Counter[str] = Counter()
    for tensor in source.tensors.values():
        sizes[tensor.dtype] += tensor.nbytes
    return sizes.most_common(1)[0][0] if sizes else "float32"


def _group(name: str) -> str:
    """The part that a weight belongs to: its layer's, or its own outside the layers."""
    parts = name.split(".")
    return ".".join(parts[:2] if parts[0] == "layers" else parts[:1])


def _listed(names: list[str], most: int = 12) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
