"""DeepSeek-V3's mixture of experts: a router, the experts that it chooses, and a shared one."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec.model.layers.basic import GatedMLP
from jaxspec.model.layers.experts import Experts, ExpertsConfig
from jaxspec.model.layers.parameters import weight
from jaxspec.sharding.collectives import sum_over_devices
from jaxspec.sharding.layout import Layout


@dataclass(frozen=True)
class RouterConfig:
    """How a row chooses its experts. Field names are those of transformers.

    Attributes:
      n_group, topk_group: experts are chosen within the best `topk_group` of `n_group` groups.
      norm_topk_prob: whether the weights of a row's experts are made to add up to 1, before `routed_scaling_factor`.
    """

    n_routed_experts: int
    hidden_size: int
    num_experts_per_tok: int
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float


class Router(nnx.Module):
    """Scores every expert by a sigmoid; a correction bias takes part in choosing, not in weighting (noaux_tc).

    arXiv 2412.19437, section 2.1.2. Scores are float32 throughout.
    """

    def __init__(self, config: RouterConfig, dtype: Any):
        self.config = config
        self.weight = weight((config.n_routed_experts, config.hidden_size), dtype, (None, None))
        self.e_score_correction_bias = weight((config.n_routed_experts,), jnp.float32, (None,))

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """x [rows, hidden] → the chosen experts int32 [rows, k] and their weights float32 [rows, k]."""
        config = self.config
        logits = jnp.einsum(
            "ri,ei->re",
            x.astype(jnp.float32),
            self.weight[...].astype(jnp.float32),
            precision=jax.lax.Precision.HIGHEST,
        )
        scores = jax.nn.sigmoid(logits)
        _, chosen = jax.lax.top_k(self._limited(scores + self.e_score_correction_bias[...]), config.num_experts_per_tok)
        weights = jnp.take_along_axis(scores, chosen, axis=-1)
        if config.norm_topk_prob:
            weights /= weights.sum(-1, keepdims=True) + 1e-20
        return chosen, weights * config.routed_scaling_factor

    def _limited(self, scores: jax.Array) -> jax.Array:
        """Scores [rows, experts], -inf outside the best groups; a group counts by its two best experts."""
        config = self.config
        if config.n_group == 1:
            return scores
        grouped = scores.reshape(len(scores), config.n_group, -1)
        _, best = jax.lax.top_k(jax.lax.top_k(grouped, 2)[0].sum(-1), config.topk_group)
        kept = (best[..., None] == jnp.arange(config.n_group)).any(1)  # [rows, groups]
        return jnp.where(kept[..., None], grouped, -jnp.inf).reshape(scores.shape)


class MixtureOfExperts(nnx.Module):
    """Routed experts and the shared one, whose partial sums travel together.

    Args:
      shared: inner units of the shared expert.
    """

    def __init__(self, router: RouterConfig, experts: ExpertsConfig, shared: int, layout: Layout, dtype: Any):
        self.gate = Router(router, dtype)
        self.experts = Experts(experts, layout, dtype)
        self.shared_experts = GatedMLP(experts.hidden_size, shared, layout, dtype, axis="shared_mlp")

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """[batch, rows, hidden] → the same shape, equal on every device, and the chosen experts [batch, rows, k]."""
        flat = x.reshape(-1, x.shape[-1])
        chosen, weights = self.gate(flat)
        routed = self.experts(flat, chosen, weights)
        shared = self.shared_experts.partial(flat)
        split = self.experts.split
        if self.shared_experts.split == split:
            both = sum_over_devices(routed + shared, split)
        else:
            both = sum_over_devices(routed, split) + sum_over_devices(shared, self.shared_experts.split)
        return both.reshape(x.shape), chosen.reshape(*x.shape[:-1], -1)
