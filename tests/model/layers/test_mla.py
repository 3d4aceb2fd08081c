"""The forms of latent attention give one result: naive, absorbed, and absorbed over a context spread over devices."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from jaxspec.model.families import kimi
from jaxspec.model.families.kimi_config import KimiConfig, read_kimi_config
from jaxspec.model.layers.attention import rotary_tables
from jaxspec.model.layers.mla import LatentAttention
from jaxspec.model.layers.paged_attention import NewRows, PagedContext
from jaxspec.model.layers.parameters import fill
from jaxspec.sharding.collectives import device_index, gather_over_devices
from jaxspec.sharding.layout import Placement
from jaxspec.sharding.mesh import make_mesh
from tests.support.builders import on_mesh
from tests.support.kimi_models import SIZES, random_weight

BATCH, ROWS, PAGES, PAGE = 3, 5, 4, 8
LENGTHS = np.array([0, 13, PAGES * PAGE], np.int32)  # no context, part of a page, all


def attention(config: KimiConfig, devices: int, placement: Placement) -> LatentAttention:
    layout, mesh = kimi.layout_of(config, devices, placement), make_mesh(devices)
    return fill(
        lambda: LatentAttention(kimi.attention_config(config), layout, jnp.float32),
        lambda spec: jax.device_put(
            random_weight(spec.name, spec.shape, spec.dtype).astype(np.float32),
            NamedSharding(mesh, layout.spec(spec.axes)),
        ),
    )


def run(form: str, config: KimiConfig, devices: int = 1, placement: Placement = Placement()) -> np.ndarray:  # noqa: B008
    """[batch, rows, heads, value] of random queries over a context that the devices hold as `placement` says."""
    rng = np.random.default_rng(3)
    x = rng.standard_normal((BATCH, ROWS, config.hidden_size), np.float32)
    positions = LENGTHS[:, None] + np.arange(ROWS, dtype=np.int32)
    pages = rng.standard_normal((BATCH, PAGES, PAGE, kimi.attention_config(config).latent_row), np.float32)
    visibility = np.tril(np.ones((ROWS, ROWS), bool))[None]

    def body(module: LatentAttention, x: jax.Array, pages: jax.Array) -> Any:
        shares = devices if placement.page_rows else 1
        local = PAGE // shares
        mine = jax.lax.dynamic_slice_in_dim(pages, device_index(shares > 1) * local, local, axis=2)
        pool = mine.reshape(BATCH * PAGES, local, -1)
        table = jnp.arange(BATCH * PAGES, dtype=jnp.int32).reshape(BATCH, PAGES)
        tables = rotary_tables(jnp.asarray(positions), config.rope, config.qk_rope_head_dim)
        mixed = getattr(module, form)(
            module.queries(x, tables),
            PagedContext((pool,), table, jnp.asarray(LENGTHS), shares=shares),
            NewRows((module.latent_rows(x, tables),), jnp.asarray(positions), jnp.asarray(visibility)),
        )
        return gather_over_devices(mixed, 2, module.split)

    return np.asarray(on_mesh(devices, attention(config, devices, placement), body)(x, pages))


@pytest.mark.parametrize(
    ("form", "devices", "heads"), [("absorbed", 1, 8), ("absorbed", 8, 8), ("naive", 8, 8), ("absorbed", 2, 5)]
)
def test_every_form_gives_the_naive_result(form: str, devices: int, heads: int) -> None:
    """On several devices the context is spread; five heads can't be split."""
    config = read_kimi_config(SIZES | {"num_attention_heads": heads, "num_key_value_heads": heads})
    expected = run("naive", config)
    assert np.abs(expected).max() > 0.5
    found = run(form, config, devices, Placement(page_rows=PAGE) if devices > 1 else Placement())
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)


def test_few_rows_are_absorbed_and_many_expand() -> None:
    sizes = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    layer = attention(read_kimi_config(SIZES | sizes), 1, Placement())
    assert [layer.absorbs(rows) for rows in (1, 65, 157, 158, 512)] == [True, True, True, False, False]
    # Where a latent is no wider than what it expands to, absorbing is always cheaper.
    small = attention(read_kimi_config(SIZES | {"kv_lora_rank": 4}), 1, Placement())
    assert small.absorbs(10**6)
