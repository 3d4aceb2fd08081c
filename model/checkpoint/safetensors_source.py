"""A Hugging Face folder as a source: `config.json` and safetensors files."""

import json
import re
import reprlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxspec.model.checkpoint.source import SourceTensor, fingerprint
from jaxspec.model.text import tiktoken_tokenizer

CONFIG = "config.json"
SINGLE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)
OTHER_TOKENIZERS = ("tokenizer.model", "vocab.json")  # Of SentencePiece and of slow tokenizers.
DTYPES = {
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "I32": "int32",
    "I64": "int64",
}


class SafetensorsSource:
    """One folder, its tensors in one file, or in several with an index."""

    def __init__(self, path: Path):
        self.path = path
        self.config: Mapping[str, Any] = _read_json(path / CONFIG)
        index = _read_index(path / INDEX) if (path / INDEX).exists() else {}
        names = sorted(set(index.values())) or [SINGLE_FILE]
        tensors: dict[str, SourceTensor] = {}
        self.tensors: Mapping[str, SourceTensor] = tensors
        self._places: dict[str, tuple[Path, int]] = {}  # A tensor's file and its first byte there.
        shards: dict[str, str] = dict(index)
        if absent := [name for name in names if not (path / name).is_file()]:
            raise ValueError(f"{path / absent[0]}: missing; weights are read from safetensors files only")
        for name in names:
            held = self._open(path / name)
            if strays := sorted(tensor for tensor in held if shards.setdefault(tensor, name) != name):
                raise ValueError(f"{path / name}: holds {strays[0]}, which belongs in {shards[strays[0]]}")
            tensors |= held
        if missing := sorted(set(index) - set(tensors)):
            raise ValueError(f"{path / INDEX}: lists {missing[0]}, which {index[missing[0]]} does not hold")
        if unlisted := sorted(set(tensors) - set(index)) if index else []:
            raise ValueError(f"{path / INDEX}: does not list {unlisted[0]}, which {shards[unlisted[0]]} holds")
        used = [path / name for name in (CONFIG, INDEX, *names, *TOKENIZER_FILES, tiktoken_tokenizer.RANKS)]
        self.fingerprint = fingerprint([file for file in used if file.exists()])

    def read(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """See `Source.read`."""
        tensor = self.tensors[name]
        shape = (len(range(*slice(start, stop).indices(tensor.shape[0]))), *tensor.shape[1:])
        size = SourceTensor(shape, tensor.dtype).nbytes
        path, begin = self._places[name]
        # Read into memory of its own: a mapped file would be fetched by page faults, in whatever order.
        raw = np.fromfile(path, np.uint8, size, offset=begin + start * (tensor.nbytes // tensor.shape[0]))
        if len(raw) < size:
            raise ValueError(f"{path}: ends within {name}; it has been cut short since it was opened")
        return raw.view(jnp.dtype(tensor.dtype)).reshape(shape)

    def write_tokenizer(self, folder: Path) -> None:
        """See `Source.write_tokenizer`."""
        settings = self.path / tiktoken_tokenizer.CONFIG
        config = _read_json(settings) if settings.is_file() else {}
        from_ranks = tiktoken_tokenizer.read_from_ranks(self.path, config)
        others = [name for name in OTHER_TOKENIZERS if (self.path / name).is_file()]
        if others and not from_ranks and not (self.path / "tokenizer.json").is_file():
            raise ValueError(f"{self.path}: found {others[0]}, expected a tokenizer.json: no other tokenizer is read")
        for name in TOKENIZER_FILES:
            if (self.path / name).is_file():
                shutil.copyfile(self.path / name, folder / name)
        if from_ranks:
            tiktoken_tokenizer.read_tokenizer(self.path, config).save(str(folder / "tokenizer.json"), pretty=False)

    def _open(self, path: Path) -> dict[str, SourceTensor]:
        try:
            safe_open(path, framework="numpy")  # Checks that the header's tensors fill the file.
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path}: truncated or not a safetensors file: {error}") from error
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        tensors = {}
        for name in sorted(header, key=lambda name: header[name]["data_offsets"]):
            entry = header[name]
            # A dtype that is not read matters only if the tensor turns out to be a weight.
            tensors[name] = SourceTensor(tuple(entry["shape"]), DTYPES.get(entry["dtype"], entry["dtype"]))
            self._places[name] = path, 8 + length + entry["data_offsets"][0]
        return tensors


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"{path}: missing")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # The latter from brackets nested a thousand deep.
        raise ValueError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: found {type(value).__name__}, expected a JSON object")
    return value


def _read_index(path: Path) -> dict[str, str]:
    """Each tensor's shard, a file beside the index."""
    shards = _read_json(path).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise ValueError(f"{path} weight_map: found {reprlib.repr(shards)}, expected an object of tensors and files")
    for tensor, file in shards.items():
        if not isinstance(file, str) or not re.fullmatch(r"[^/\\\0]+\.safetensors", file):
            raise ValueError(
                f"{path} weight_map {tensor}: found {reprlib.repr(file)}, expected a safetensors file's name"
            )
    return shards
