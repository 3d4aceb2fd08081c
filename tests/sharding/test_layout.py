"""What the mesh splits: counted in units that must not be cut, replicated where they do not divide."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxspec.model.families import llama
from jaxspec.model.layers.cache import empty_cache
from jaxspec.sharding.layout import AXIS_RULES, Layout
from jaxspec.sharding.mesh import TENSOR_AXIS, make_mesh
from tests.support.builders import GROUPED, UNEVEN, tiny_target


@pytest.mark.parametrize("devices", [1, 2, 4, 8])
@pytest.mark.parametrize("units", [1, 2, 3, 8, 9, 24])
def test_an_axis_is_split_where_whole_units_divide(devices: int, units: int) -> None:
    layout = Layout(devices, (("heads", units),))
    split = devices > 1 and units % devices == 0
    assert layout.splits("heads") == split
    assert layout.spec(("heads", None)) == PartitionSpec(TENSOR_AXIS if split else None, None)
    assert layout.replicated() == (() if split or devices == 1 else ("heads",))
    assert not layout.splits("an axis without a rule")


def test_every_rule_names_the_mesh_axis() -> None:
    assert set(AXIS_RULES.values()) == {TENSOR_AXIS}
    assert make_mesh(8).axis_names == (TENSOR_AXIS,)


def test_heads_are_counted_not_columns() -> None:
    # 9 heads of 4: 36 columns, which 2 and 4 devices would divide.
    assert llama.layout_of(UNEVEN, 2).replicated() == ("heads", "kv_heads")
    assert llama.layout_of(GROUPED, 8).replicated() == ("kv_heads",)
    assert llama.layout_of(GROUPED, 2).replicated() == ()


def test_weights_and_pools_lie_as_the_layout_says() -> None:
    target, mesh = tiny_target(GROUPED, 8), make_mesh(8)
    attention = target.layers[0].self_attn
    for weight, shape in (
        (attention.q_proj.weight, (4, 32)),  # one head of eight
        (attention.k_proj.weight, (8, 32)),  # both K/V heads, on every device
        (attention.o_proj.weight, (32, 4)),
        (target.layers[0].mlp.down_proj.weight, (32, 4)),
        (target.embed_tokens.weight, (8, 32)),
        (target.norm.weight, (32,)),
    ):
        shards = weight.get_value().addressable_shards
        assert [shard.data.shape for shard in shards] == [shape] * 8
    for devices, kv_heads in ((2, 1), (8, 2)):
        layout, mesh = llama.layout_of(GROUPED, devices), make_mesh(devices)
        pools = jax.tree.leaves(empty_cache(target.cache_rows, 3, 2, layout, mesh, np.float32))
        assert len(pools) == 4
        for pool in pools:
            assert pool.shape == (3, 2, 2, 4)
            assert {shard.data.shape for shard in pool.addressable_shards} == {(3, 2, kv_heads, 4)}


def test_a_mesh_of_more_devices_than_there_are_is_refused() -> None:
    with pytest.raises(ValueError, match=r"devices: found 99, expected 1 to 8"):
        make_mesh(99)
    with pytest.raises(ValueError, match=r"devices: found 0, expected 1 to 8"):
        make_mesh(0)
