"""The registry of model families: how each reads its config, which module runs it and what its tensors are called.

Qwen3's dense models have no file of their own: they are Llama with q/k norms, which their config switches on.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from flax import nnx

from jaxspec.model.families import dflash, kimi, llama
from jaxspec.model.families.config import TARGET_FAMILIES, architecture, read_dflash_config, read_model_config
from jaxspec.model.families.kimi_config import KIMI_ARCHITECTURES, read_kimi_config
from jaxspec.model.quantization.scheme import UNQUANTISED, Scheme
from jaxspec.sharding.layout import DEFAULT_PLACEMENT, Layout, Placement

Kind = Literal["target", "drafter"]


@dataclass(frozen=True)
class Family:
    """What conversion and loading need to know of a family.

    Attributes:
      kind: "target" or "drafter".
      read_config: a `config.json` → the family's config; refuses what is not supported.
      module: the module class, called with (config, layout, dtype).
      layout_of: (config, devices, for targets also a placement) → what the mesh may split.
      source_names: our name of a weight → the names that published checkpoints give it; "{}" in a name stands for the
        number of an expert, of which ours stacks all.
      scheme: config → how the published weights are quantised.
      left_out: (config, published name) → why a tensor is not a weight of the model; None if nothing says so.
    """

    kind: Kind
    read_config: Callable[[Mapping[str, Any]], Any]
    module: Callable[[Any, Layout, Any], nnx.Module]
    layout_of: Callable[..., Layout]
    source_names: Callable[[str], tuple[str, ...]]
    scheme: Callable[[Any], Scheme] = lambda config: UNQUANTISED
    left_out: Callable[[Any, str], str | None] = lambda config, name: None

    def build(
        self, config: Any, devices: int, dtype: Any, placement: Placement = DEFAULT_PLACEMENT
    ) -> Callable[[], nnx.Module]:
        """What makes the module, for `weight_specs` and `fill`."""
        layout = self.placed(config, devices, placement)
        return lambda: self.module(config, layout, dtype)

    def placed(self, config: Any, devices: int, placement: Placement) -> Layout:
        """The layout under a user's choices; those concern the target alone."""
        return self.layout_of(config, devices, *([placement] if self.kind == "target" else []))


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
    "kimi": Family(
        kind="target",
        read_config=read_kimi_config,
        module=kimi.KimiForCausalLM,
        layout_of=kimi.layout_of,
        source_names=kimi.tensor_names,
        scheme=lambda config: config.quantization.scheme,
        left_out=kimi.left_out,
    ),
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
    if name in KIMI_ARCHITECTURES:
        return "kimi"
    if name not in TARGET_FAMILIES:
        known = [*sorted([*TARGET_FAMILIES, *KIMI_ARCHITECTURES]), "DFlashDraftModel"]
        raise ValueError(f"config.json architectures: found {name!r}, expected one of {', '.join(known)}")
    return TARGET_FAMILIES[name]
