"""How a published checkpoint's weights are quantised, read from its `quantization_config`.

Two schemes are implemented: pack-quantized INT4 of compressed-tensors (groups of 32 inputs, symmetric) and FP8 in
blocks of 128 × 128. Any other is refused by name.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from jaxspec.model.fields import Fields

GROUP_SIZE = 32  # Inputs that share a scale in INT4.
PACKED = 8  # INT4 values in an int32.
BLOCK_SIZE = 128  # Rows and columns of a block that shares a scale in FP8.
WRAPPER = "language_model."


@dataclass(frozen=True)
class QuantizationConfig:
    """A scheme and the Linear modules that it leaves alone.

    Attributes:
      scheme: "int4" (weight_packed, weight_scale, weight_shape) or "fp8" (weight, weight_scale_inv).
      ignore: names, or regular expressions (behind "re:"), of modules that are not quantised.
    """

    scheme: Literal["int4", "fp8"]
    ignore: tuple[str, ...] = ()

    def quantizes(self, module: str) -> bool:
        """Whether the Linear called `module` (no wrapper's prefix, no ".weight") is quantised."""
        return not any(_matches(pattern, name) for pattern in self.ignore for name in (module, WRAPPER + module))


def read_quantization(*tables: Mapping[str, Any]) -> QuantizationConfig | None:
    """The `quantization_config` of the first of `tables` (a `config.json`'s root, its text_config) that has one.

    Raises:
      ValueError: naming the field, for a scheme that is not implemented.
    """
    for table in tables:
        if section := Fields(table).section("quantization_config"):
            fields = Fields(section, "config.json quantization_config")
            match section.get("quant_method"):
                case "compressed-tensors":
                    return _read_compressed(fields)
                case "fp8":
                    return _read_fp8(fields)
                case _:
                    raise fields.wrong("quant_method", "'compressed-tensors' (pack-quantized INT4) or 'fp8'")
    return None


def _read_compressed(fields: Fields) -> QuantizationConfig:
    if fields.table.get("format") != "pack-quantized":
        raise fields.wrong("format", "'pack-quantized'")
    fields.only({"quantization_status": "compressed"})
    for key in ("kv_cache_scheme", "sparsity_config", "transform_config"):
        if fields.table.get(key):
            raise fields.wrong(key, "none")
    groups = fields.section("config_groups")
    if len(groups) != 1:
        raise fields.wrong("config_groups", "one group")
    (name,) = groups
    group = Fields(groups, f"{fields.where} config_groups").section(name)
    where = f"{fields.where} {name}"
    inner = Fields(group, where)
    if group.get("targets") != ["Linear"]:
        raise inner.wrong("targets", "['Linear']")
    inner.only({"format": "pack-quantized"})
    for key in ("input_activations", "output_activations"):
        if group.get(key):
            raise inner.wrong(key, "none: weights alone are quantised")
    weights = Fields(inner.section("weights"), f"{where} weights")
    required = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP_SIZE}
    for key, value in required.items():
        if weights.table.get(key) != value:
            raise weights.wrong(key, repr(value))
    weights.only({"dynamic": False, "block_structure": None, "zp_dtype": None, "scale_dtype": None})
    if weights.table.get("actorder"):
        raise weights.wrong("actorder", "none")
    return QuantizationConfig("int4", _read_names(fields, "ignore"))


def _read_fp8(fields: Fields) -> QuantizationConfig:
    fields.only({"fmt": "e4m3", "activation_scheme": "dynamic", "scale_fmt": None})
    if fields.table.get("weight_block_size") != [BLOCK_SIZE, BLOCK_SIZE]:
        raise fields.wrong("weight_block_size", f"[{BLOCK_SIZE}, {BLOCK_SIZE}]")
    names = [name for key in ("modules_to_not_convert", "ignored_layers") for name in _read_names(fields, key)]
    return QuantizationConfig("fp8", ("lm_head", *names))


def _read_names(fields: Fields, key: str) -> tuple[str, ...]:
    """A list of names or patterns; absent, none."""
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


def _matches(pattern: str, name: str) -> bool:
    """A regular expression matches from the start; a name stands for itself and all inside it, wherever it lies."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], name) is not None
    return f".{pattern}." in f".{name}."
