"""Lossless speculative decoding for large language models in JAX.

    from jaxspec import Engine, EngineConfig, SamplingParams, SpeculationConfig

Names are imported when they are first used, so that `import jaxspec` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxspec.config import EngineConfig, Grammar, SamplingParams, SpeculationConfig
    from jaxspec.engine.engine import Engine
    from jaxspec.engine.request import Completion, RequestOutput, RequestStatistics

__version__ = "0.1.0"

# Name → the module that holds it.
_HOMES = {
    "Completion": "jaxspec.engine.request",
    "Engine": "jaxspec.engine.engine",
    "EngineConfig": "jaxspec.config",
    "Grammar": "jaxspec.config",
    "RequestOutput": "jaxspec.engine.request",
    "RequestStatistics": "jaxspec.engine.request",
    "SamplingParams": "jaxspec.config",
    "SpeculationConfig": "jaxspec.config",
}

__all__ = [
    "Completion",
    "Engine",
    "EngineConfig",
    "Grammar",
    "RequestOutput",
    "RequestStatistics",
    "SamplingParams",
    "SpeculationConfig",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'jaxspec' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
