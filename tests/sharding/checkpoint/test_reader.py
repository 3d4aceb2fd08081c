"""Every device gets its slice, and damage is found."""

import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxspec.sharding.checkpoint.manifest import Manifest, Tensor, partition, read_manifest
from jaxspec.sharding.checkpoint.parts import PARAMS
from jaxspec.sharding.checkpoint.reader import load_arrays, verify
from jaxspec.sharding.mesh import TENSOR_AXIS, make_mesh
from tests.support.checkpoints import COLUMNS, EIGHTH, GROUPS, PACKED, ROWS, SMALL, write


def data_files(folder: Path, part: str) -> list[Path]:
    """The files that hold a part's numbers, the largest first."""
    files = [path for path in (folder / PARAMS / part).rglob("*") if path.is_file() and path.parent.name == "d"]
    return sorted(files, key=lambda path: -path.stat().st_size)


def placed(devices: int, axes: dict[str, int], dtype: Any = None) -> dict[str, jax.ShapeDtypeStruct]:
    """All tensors, split along the axes named (others replicated), floats as `dtype`."""
    mesh = make_mesh(devices)
    wanted = {}
    for tensor in (ROWS, COLUMNS, PACKED, EIGHTH, SMALL):
        spec = [None] * axes[tensor.name] + [TENSOR_AXIS] if tensor.name in axes else []
        kept = dtype if tensor.dtype == "float32" and dtype else tensor.dtype
        wanted[tensor.name] = jax.ShapeDtypeStruct(
            tensor.shape, kept, sharding=NamedSharding(mesh, PartitionSpec(*spec))
        )
    return wanted


def load(folder: Path) -> dict[str, jax.Array]:
    return load_arrays(folder, read_manifest(folder), placed(1, {}))


@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("limit", [700, 10**6], ids=["slabs", "whole"])
@pytest.mark.parametrize("experts", [0, 1], ids=["split by expert", "split within experts"])
def test_each_device_gets_its_slice(tmp_path, arrays, devices, limit, experts):
    parts = partition(GROUPS, max_part_bytes=limit)
    assert any(slab.shape != slab.tensor.shape for part in parts for slab in part.slabs) == (limit == 700)
    write(tmp_path / "model", arrays, parts).finish({}, parts)
    wanted = placed(devices, {"a.rows": 0, "a.columns": 1, "a.packed": 2 * experts, "a.eighth": experts})
    loaded = load_arrays(tmp_path / "model", read_manifest(tmp_path / "model"), wanted)
    assert set(loaded) == set(arrays)
    for name, array in loaded.items():
        assert array.dtype == wanted[name].dtype
        assert array.sharding.is_equivalent_to(wanted[name].sharding, array.ndim)
        assert len(array.addressable_shards) == devices
        for shard in array.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), arrays[name][shard.index])
        if name != "norm":
            assert array.addressable_shards[0].data.nbytes * devices == array.nbytes


def test_a_part_is_read_once_whatever_the_number_of_devices(tmp_path):
    table = Tensor("table", (512, 1024), "float32")
    parts = partition({"part": [table]}, max_part_bytes=2**19)
    values = {"table": np.random.default_rng(0).standard_normal(table.shape).astype(np.float32)}
    write(tmp_path / "model", values, parts).finish({}, parts)
    for spec in (PartitionSpec(), PartitionSpec(TENSOR_AXIS), PartitionSpec(None, TENSOR_AXIS)):
        wanted = jax.ShapeDtypeStruct(table.shape, "float32", sharding=NamedSharding(make_mesh(8), spec))
        before = bytes_read()
        loaded = load_arrays(tmp_path / "model", read_manifest(tmp_path / "model"), {"table": wanted})
        assert table.nbytes <= bytes_read() - before < 1.2 * table.nbytes
        np.testing.assert_array_equal(loaded["table"], values["table"])


def bytes_read() -> int:
    """By all read calls of this process so far."""
    return int(Path("/proc/self/io").read_text().split()[1])


def test_weights_are_cast_while_they_are_read(checkpoint, arrays):
    loaded = load_arrays(checkpoint, read_manifest(checkpoint), placed(2, {}, jnp.bfloat16))
    for name, array in loaded.items():
        kept = jnp.bfloat16 if arrays[name].dtype == np.float32 else arrays[name].dtype
        assert array.dtype == kept
        np.testing.assert_array_equal(np.asarray(array), arrays[name].astype(kept))


def test_verify_finds_one_changed_byte(tmp_path):
    large = {
        "large": np.random.default_rng(1).standard_normal((400, 100)).astype(np.float32)
    }  # Not kept in an index node.
    parts = partition({"part": [Tensor("large", (400, 100), "float32")]})
    manifest = write(tmp_path / "model", large, parts).finish({}, parts)
    verify(tmp_path / "model", manifest)
    row = large["large"][7].tobytes()
    (victim,) = [path for path in data_files(tmp_path / "model", "part") if row in path.read_bytes()]
    raw = bytearray(victim.read_bytes())
    raw[raw.index(row) + 100] ^= 1
    victim.write_bytes(raw)
    with pytest.raises(ValueError, match=r"params/part: large differs from its digest"):
        verify(tmp_path / "model", manifest)


def test_digests_are_of_the_right_tensor(checkpoint):
    manifest = read_manifest(checkpoint)
    wrong = {part: dict.fromkeys(digests, "0" * 64) for part, digests in manifest.digests.items()}
    with pytest.raises(ValueError, match="differs from its digest"):
        verify(checkpoint, Manifest(manifest.about, manifest.parts, wrong))


@pytest.mark.parametrize("damage", ["truncated", "missing", "emptied"])
def test_a_damaged_part_is_one_line(checkpoint, damage):
    if damage == "missing":
        shutil.rmtree(checkpoint / PARAMS / "norm")
    for file in data_files(checkpoint, "norm") if damage != "missing" else ():
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2] if damage == "truncated" else b"")
    for read in (load, lambda folder: verify(folder, read_manifest(folder))):
        with pytest.raises(ValueError, match=r"params/norm: cannot be read, convert it again") as caught:
            read(checkpoint)
        assert "\n" not in str(caught.value)


def test_parts_in_any_order_make_the_same_arrays(checkpoint, arrays):
    manifest = read_manifest(checkpoint)
    backwards = Manifest(manifest.about, manifest.parts[::-1], manifest.digests)
    loaded = load_arrays(checkpoint, backwards, placed(1, {}))
    assert set(loaded) == set(arrays)
    for name, array in loaded.items():
        np.testing.assert_array_equal(np.asarray(array), arrays[name])
