"""The router against an independent reading of it, and the one sum over devices that a mixture takes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from jaxspec.model.families import kimi
from jaxspec.model.families.kimi_config import read_kimi_config
from jaxspec.model.layers.moe import MixtureOfExperts, Router
from jaxspec.model.layers.parameters import fill
from jaxspec.sharding.layout import Placement
from jaxspec.sharding.mesh import make_mesh
from tests.support.builders import on_mesh
from tests.support.kimi_models import SIZES, random_weight


def reading(x: np.ndarray, weight: np.ndarray, bias: np.ndarray, config: Any) -> list[dict[int, float]]:
    """Expert → weight for each row, by loops over Python numbers (reference: arXiv 2412.19437, 2.1.2)."""
    answers = []
    for row in x.astype(np.float64):
        score = [1 / (1 + np.exp(-float(np.dot(row, w)))) for w in weight.astype(np.float64)]
        biased = [s + float(b) for s, b in zip(score, bias, strict=True)]
        size = len(score) // config.n_group
        groups = [range(g * size, (g + 1) * size) for g in range(config.n_group)]
        if config.n_group > 1:
            ranked = sorted(groups, key=lambda group: -sum(sorted((biased[e] for e in group), reverse=True)[:2]))
            groups = ranked[: config.topk_group]
        candidates = sorted((e for group in groups for e in group), key=lambda e: -biased[e])
        picked = candidates[: config.num_experts_per_tok]
        total = sum(score[e] for e in picked) + 1e-20 if config.norm_topk_prob else 1.0
        answers.append({e: score[e] / total * config.routed_scaling_factor for e in picked})
    return answers


@pytest.mark.parametrize(
    "changes", [{}, {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 5}, {"norm_topk_prob": False}]
)
def test_the_router_chooses_and_weighs_as_it_reads(changes: dict[str, Any]) -> None:
    config = read_kimi_config(SIZES | {"n_routed_experts": 16} | changes)
    router = fill(
        lambda: Router(kimi.router_config(config), jnp.float32),
        lambda spec: jnp.asarray(random_weight(spec.name, spec.shape, spec.dtype), spec.dtype),
    )
    x = np.random.default_rng(0).standard_normal((50, config.hidden_size)).astype(np.float32)
    weight, bias = np.asarray(router.weight[...]), np.asarray(router.e_score_correction_bias[...])
    chosen, weights = (np.asarray(array) for array in jax.jit(router)(x))
    assert weights.dtype == np.float32
    expected = reading(x, weight, bias, config)
    found = [dict(zip(c.tolist(), w.tolist(), strict=True)) for c, w in zip(chosen, weights, strict=True)]
    assert [set(one) for one in found] == [set(one) for one in expected]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    # The bias chooses, and does no more: without it some rows take other experts.
    assert [set(one) for one in expected] != [set(one) for one in reading(x, weight, np.zeros_like(bias), config)]


def test_the_router_is_float32_whatever_the_activations_are() -> None:
    """A bfloat16 product would lose the small differences between these scores."""
    config = read_kimi_config(SIZES)
    router = fill(
        lambda: Router(kimi.router_config(config), jnp.bfloat16),
        lambda spec: jnp.asarray(random_weight(spec.name, spec.shape, spec.dtype), spec.dtype),
    )
    x = jnp.asarray(np.random.default_rng(0).standard_normal((50, config.hidden_size)), jnp.bfloat16)
    weight, bias = np.asarray(router.weight[...], np.float32), np.asarray(router.e_score_correction_bias[...])
    chosen, weights = jax.jit(router)(x)
    expected = reading(np.asarray(x, np.float32), weight, bias, config)
    for picks, row, theirs in zip(np.asarray(chosen), np.asarray(weights), expected, strict=True):
        assert dict(zip(picks.tolist(), row.tolist(), strict=True)) == pytest.approx(theirs, rel=1e-5)


@pytest.mark.parametrize(
    ("placement", "inner"), [(Placement("tensor"), 16), (Placement("expert"), 16), (Placement("expert"), 15)]
)
def test_devices_add_up_to_one(placement: Placement, inner: int) -> None:
    """15 units of the shared expert can't be split: it is then added once, not once a device."""
    sizes = {"n_routed_experts": 8, "moe_intermediate_size": inner, "n_shared_experts": 1}
    config = read_kimi_config(SIZES | sizes)
    x = np.random.default_rng(1).standard_normal((2, 3, config.hidden_size)).astype(np.float32)
    results = []
    for devices in (1, 2):
        layout, mesh = kimi.layout_of(config, devices, placement), make_mesh(devices)
        module = fill(
            lambda layout=layout: MixtureOfExperts(
                kimi.router_config(config), kimi.experts_config(config), kimi.shared_units(config), layout, jnp.float32
            ),
            lambda spec, layout=layout, mesh=mesh: jax.device_put(
                random_weight(spec.name, spec.shape, spec.dtype).astype(spec.dtype),
                NamedSharding(mesh, layout.spec(spec.axes)),
            ),
        )
        results.append(np.asarray(on_mesh(devices, module, lambda module, x: module(x)[0])(x)))
    np.testing.assert_allclose(results[1], results[0], rtol=2e-5, atol=2e-5)
