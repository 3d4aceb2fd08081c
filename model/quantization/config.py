"""Which scheme a published checkpoint's weights are in, read from its `quantization_config`.

The schemes that are implemented stand in one table; any other is refused by name.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxspec.model.fields import Fields
from jaxspec.model.quantization.fp8 import FP8
from jaxspec.model.quantization.int4 import INT4
from jaxspec.model.quantization.scheme import UNQUANTISED, Scheme

SCHEMES: dict[str, Scheme] = {scheme.name: scheme for scheme in (INT4, FP8)}


@dataclass(frozen=True)
class QuantizationConfig:
    """A scheme and the Linear modules that it leaves alone.

    Attributes:
      ignore: names, or regular expressions (behind "re:"), of modules that are not quantised.
    """

    scheme: Scheme = UNQUANTISED
    ignore: tuple[str, ...] = ()

    def quantizes(self, *names: str) -> bool:
        """Whether the Linear that goes by any of `names` (without ".weight") is quantised."""
        return self.scheme != UNQUANTISED and not any(_matches(rule, name) for rule in self.ignore for name in names)


NOT_QUANTISED = QuantizationConfig()


def read_quantization(*tables: Mapping[str, Any]) -> QuantizationConfig:
    """The `quantization_config` of the first of `tables` (a `config.json`'s root, its text_config) that has one.

    Raises:
      ValueError: naming the field, for a scheme that is not implemented.
    """
    for table in tables:
        if section := Fields(table).section("quantization_config"):
            fields = Fields(section, "config.json quantization_config")
            for scheme in SCHEMES.values():
                if scheme.reads(section):
                    return QuantizationConfig(scheme, scheme.read_ignored(fields))
            raise fields.wrong("quant_method", " or ".join(scheme.described for scheme in SCHEMES.values()))
    return NOT_QUANTISED


def _matches(rule: str, name: str) -> bool:
    """A regular expression matches from the start; a name stands for itself and all inside it, wherever it lies."""
    if rule.startswith("re:"):
        return re.match(rule[3:], name) is not None
    return f".{rule}." in f".{name}."
