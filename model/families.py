"""The registry of model families: how each reads its config, which module runs it and what its tensors are called.

Qwen3's dense models have no file of their own: they are Llama with q/k norms, which their config switches on.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from flax import nnx

from model import dflash, llama
from model.config import TARGET_FAMILIES, architecture, read_dflash_config, read_model_config
from sharding.layout import Layout

Kind = Literal["target", "drafter"]


@dataclass(frozen=True)
class Family:
    """What conversion and loading need to know of a family.

    Attributes:
      kind: "target" or "drafter".
      read_config: a `config.json` → the family's config; refuses what is not supported.
      module: the module class, called with (config, layout, dtype).
      layout_of: (config, devices) → what the mesh may split.
      source_names: our name of a weight → the names that published checkpoints give it; "{}" in a name stands for the
        number of an expert, of which ours stacks all.
      left_out: (config, published name) → why a tensor is not a weight of the model; None if nothing says so.
    """

    kind: Kind
    read_config: Callable[[Mapping[str, Any]], Any]
    module: Callable[[Any, Layout, Any], nnx.Module]
    layout_of: Callable[[Any, int], Layout]
    source_names: Callable[[str], tuple[str, ...]]
    left_out: Callable[[Any, str], str | None] = lambda config, name: None

    def build(self, config: Any, devices: int, dtype: Any) -> Callable[[], nnx.Module]:
        """What makes the module, for `weight_specs` and `fill`."""
        layout = self.layout_of(config, devices)
        return lambda: self.module(config, layout, dtype)


_LLAMA = Family(
    kind="target",
    read_config=read_model_config,
    module=llama.LlamaForCausalLM,
    layout_of=llama.layout_of,
    source_names=lambda name: (llama.tensor_names(name),),
)

FAMILIES: Mapping[str, Family] = {
    "llama": _LLAMA,
    "qwen3": _LLAMA,
    "dflash": Family(
        kind="drafter",
        read_config=read_dflash_config,
        module=dflash.DFlashDrafter,
        layout_of=dflash.layout_of,
        source_names=lambda name: (name, f"model.{name}"),
    ),
}


def family_of(raw: Mapping[str, Any]) -> str:
    """The family of a `config.json`, by its architecture.

    Raises:
      ValueError: naming the architectures that are known, if it has another.
    """
    name = architecture(raw)
    if name.startswith("DFlash"):  # DFlash 2 too, which `read_dflash_config` refuses by name.
        return "dflash"
    if name not in TARGET_FAMILIES:
        known = [*sorted(TARGET_FAMILIES), "DFlashDraftModel"]
        raise ValueError(f"config.json architectures: found {name!r}, expected one of {', '.join(known)}")
    return TARGET_FAMILIES[name]
