"""The model as calls see it: its name, limits, tokenizer, and what a request gets where it leaves a field unset."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxspec.engine.engine import Engine
from jaxspec.model.text.tokenizer import Tokenizer
from jaxspec.serve.requests.prompts import PromptReader
from jaxspec.serve.requests.request_fields import SAMPLING_FIELDS, sampling_params
from jaxspec.serve.runtime.refusal import Refusal


@dataclass(frozen=True)
class ServedModel:
    """The model that is loaded, and its limits.

    Attributes:
      name: the one that clients know it by.
      max_context: tokens of prompt and answer together that one request can have here.
      default_sampling: arguments of SamplingParams, from the checkpoint's generation_config.
      depth: tokens drafted in one pass; 0 without a drafter.
    """

    name: str
    engine: Engine
    tokenizer: Tokenizer
    prompts: PromptReader
    max_context: int
    default_sampling: dict[str, Any]
    depth: int

    @classmethod
    def of(cls, engine: Engine, name: str, default_sampling: dict[str, Any]) -> "ServedModel":
        """Gathers what calls need to know of an engine."""
        assert engine.tokenizer is not None
        room = min(engine.max_context, engine.page_count * engine.config.page_size)
        return cls(
            name=name,
            engine=engine,
            tokenizer=engine.tokenizer,
            prompts=PromptReader(engine.tokenizer, room),
            max_context=room,
            default_sampling=default_sampling,
            depth=engine.depth,
        )


def default_sampling(folder: Path) -> dict[str, Any]:
    """Reads the sampling settings in a converted checkpoint's generation_config.json, where there is one.

    Raises:
      ValueError: naming file and field.
    """
    path = folder / "tokenizer" / "generation_config.json"
    if not path.is_file():
        return {}
    names = [name for field, name in SAMPLING_FIELDS.items() if field.startswith("sampling.") and name != "seed"]
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
        values = {name: given[name] for name in names if given.get(name) is not None}
        sampling_params(values)
    except (ValueError, AttributeError, Refusal) as error:
        raise ValueError(f"{path}: {error}") from error
    return values
