"""Rotary position embedding, as a `config.json` describes it."""

from typing import Any

from jaxspec.model.fields import Fields
from jaxspec.model.layers.rope import RopeConfig

MAX_POSITIONS = 2**30  # Far beyond any published model's.
_KINDS = ("default", "llama3", "yarn")


def read_rope(fields: Fields, head_dim: int) -> RopeConfig:
    """Reads `rope_theta` + `rope_scaling` (older files) or `rope_parameters` (newer ones).

    Args:
      head_dim: rotated values of a head.
    Raises:
      ValueError: naming the field, for a kind that is not implemented or a value that does not fit.
    """
    table: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        if any(isinstance(value, dict) for value in fields.section(key).values()):
            raise fields.wrong(key, "one set of parameters for all layers")
        table |= fields.section(key)
    Fields({**fields.table, **table}).only({"partial_rotary_factor": 1.0})
    rope = Fields(table, f"{fields.where} rope_scaling")
    theta = (rope if "rope_theta" in table else fields).real("rope_theta")
    explicit: tuple[float, ...] = ()
    if "inv_freq" in table:
        explicit = rope.reals("inv_freq")
        if len(explicit) != head_dim // 2:
            raise rope.wrong("inv_freq", f"{head_dim // 2} numbers, one for each rotated pair")
    kind = table.get("rope_type", table.get("type", "default"))
    if kind not in _KINDS:
        raise ValueError(f"config.json rope_scaling: found type {kind!r}, only {', '.join(_KINDS)} are supported")
    if kind == "default":
        return RopeConfig(theta, inv_freq=explicit)
    factor = rope.real("factor")
    trained = rope.integer("original_max_position_embeddings", 1, MAX_POSITIONS)
    if kind == "llama3":
        low, high = rope.real("low_freq_factor"), rope.real("high_freq_factor")
        if low >= high:
            raise rope.wrong("high_freq_factor", f"more than low_freq_factor ({low:g})")
        return RopeConfig(theta, kind, factor, low, high, trained, inv_freq=explicit)
    if theta <= 1:
        raise (rope if "rope_theta" in table else fields).wrong("rope_theta", "more than 1")
    fast, slow = rope.real("beta_fast", default=32.0), rope.real("beta_slow", default=1.0)
    if fast < slow:
        raise rope.wrong("beta_fast", f"at least beta_slow ({slow:g})")
    return RopeConfig(
        theta,
        kind,
        factor,
        original_max_position_embeddings=trained,
        beta_fast=fast,
        beta_slow=slow,
        mscale=rope.real("mscale", default=0.0),
        mscale_all_dim=rope.real("mscale_all_dim", default=0.0),
        truncate=rope.flag("truncate", True),
        attention_factor=rope.real("attention_factor") if "attention_factor" in table else None,
        inv_freq=explicit,
    )
