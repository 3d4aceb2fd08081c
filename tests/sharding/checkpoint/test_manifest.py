"""Parts of bounded size, and the manifest that lists them."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxspec.sharding.checkpoint.manifest import MANIFEST, Tensor, partition, read_manifest, seal
from tests.support.checkpoints import COLUMNS, EIGHTH, GROUPS, PACKED, ROWS, SMALL, write

tensors = st.tuples(st.integers(0, 3), st.lists(st.integers(1, 40), min_size=1, max_size=3))


@given(st.lists(tensors, min_size=1, max_size=8), st.integers(200, 4000))
def test_parts_hold_every_row_once_and_stay_within_their_size(drawn, limit):
    groups: dict[str, list[Tensor]] = {}
    for number, (group, shape) in enumerate(drawn):
        groups.setdefault(f"g{group}", []).append(Tensor(f"t{number}", tuple(shape), "float32"))
    parts = partition(groups, max_part_bytes=limit)
    assert len({part.name for part in parts}) == len(parts)
    covered: dict[str, list[int]] = {}
    for part in parts:
        assert len({slab.tensor.name for slab in part.slabs}) == len(part.slabs)
        one_row = len(part.slabs) == 1 and part.slabs[0].stop - part.slabs[0].start == 1
        assert part.nbytes <= limit or one_row
        for slab in part.slabs:
            assert slab.nbytes == int(np.prod(slab.shape)) * 4
            covered.setdefault(slab.tensor.name, []).extend(range(slab.start, slab.stop))
    for group in groups.values():
        for tensor in group:
            assert covered[tensor.name] == list(range(tensor.shape[0]))


def test_a_group_that_fits_is_one_part():
    parts = partition(GROUPS)
    assert [(part.name, [slab.tensor for slab in part.slabs]) for part in parts] == [
        ("a", [ROWS, COLUMNS, PACKED, EIGHTH]),
        ("norm", [SMALL]),
    ]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda text: text[: len(text) // 2], "damaged or of another version"),
        (lambda text: "[]", "damaged or of another version: found list, expected an object"),
        (lambda text: text.replace('"format": 3', '"format": 9'), "format: found 9, expected 3; convert it again"),
        (lambda text: text.replace('"format": 3', '"format": 2'), "format: found 2, expected 3; convert it again"),
        (lambda text: text.replace('"kind": "target"', '"kind": "drafter"'), "sha256: its content has changed"),
        (lambda text: "[" * 100_000, "damaged or of another version"),
        (lambda text: text.replace('"float32"', '"floaty"'), "damaged or of another version"),
    ],
)
def test_a_damaged_manifest_is_one_line(checkpoint, edit, message):
    path = checkpoint / MANIFEST
    path.write_text(edit(path.read_text()))
    with pytest.raises(ValueError, match=message) as caught:
        read_manifest(checkpoint)
    assert "\n" not in str(caught.value)


def rows_of(table: dict[str, Any]) -> dict[str, Any]:
    return {row["name"]: row for row in table["tensors"]}


def edit_row(**changes: Any) -> Callable[[dict[str, Any]], object]:
    return lambda table: rows_of(table)["a.rows"].update(changes)


def edit_slab(index: int = 0, **changes: Any) -> Callable[[dict[str, Any]], object]:
    return lambda table: rows_of(table)["a.rows"]["slabs"][index].update(changes)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (edit_row(name=5), "tensor: found the name 5"),
        (edit_row(name=["a"]), "unhashable"),
        (edit_row(name="norm"), "listed twice"),
        (edit_row(shape=48), "shape: found 48, expected a list of sizes"),
        (edit_row(shape=[48, -6]), r"shape: found \[48, -6\]"),
        (edit_row(shape=[48, True]), r"shape: found \[48, True\]"),
        (edit_row(shape=[49, 6]), "tensor a.rows: found slabs up to 48, expected 49"),
        (edit_row(shape=[47, 6]), r"slab: found \d+ to 48, expected one from"),
        (edit_row(dtype="int8"), "dtype: found 'int8', expected one of float32, bfloat16, float16, int32"),
        (edit_row(dtype=["float32"]), "dtype: found"),
        (edit_row(slabs=[]), "tensor a.rows: found slabs up to 0, expected 48"),
        (edit_row(slabs=5), "not iterable"),
        (edit_slab(stop=10), "slab: found"),
        (edit_slab(1, start=0), "slab: found 0"),
        (edit_slab(start="0"), "slab: found '0'"),
        (edit_slab(stop=0), "slab: found 0 to 0"),
        (edit_slab(part="../../etc"), r"part: found '../../etc', expected a folder's name"),
        (edit_slab(part=".."), "part: found '..'"),
        (edit_slab(part=""), "part: found ''"),
        (edit_slab(part=3), "part: found 3"),
        (edit_slab(1, part="a-0"), "part: found a-0 twice"),
        (edit_slab(sha256="0"), "sha256: found '0', expected 64"),
        (lambda table: table.update(tensors={"a": 1}), "damaged"),
        (lambda table: table.update(tensors=5), "damaged"),
        (lambda table: table.pop("tensors"), "tensors"),
        (lambda table: table["tensors"].append("x"), "damaged"),
    ],
)
def test_a_sealed_manifest_that_describes_no_checkpoint_is_one_line(checkpoint, edit, message):
    path = checkpoint / MANIFEST
    table = json.loads(path.read_text())
    edit(table)
    path.write_text(json.dumps(table | {"sha256": seal(table)}))
    with pytest.raises(ValueError, match=message) as caught:
        read_manifest(checkpoint)
    assert str(caught.value).startswith(f"{path}: damaged or of another version: ")
    assert "\n" not in str(caught.value)


def test_a_folder_without_its_marker_is_refused(tmp_path, arrays):
    with pytest.raises(ValueError, match=r"no jaxspec.json, so not a converted checkpoint; convert it"):
        read_manifest(tmp_path / "model")
    write(tmp_path / "model", arrays, partition(GROUPS))
    assert not (tmp_path / "model").exists()
    with pytest.raises(ValueError, match="unfinished .*, continue it with --resume"):
        read_manifest(tmp_path / "model")


def test_the_manifest_lists_every_tensor(checkpoint):
    table = json.loads((checkpoint / MANIFEST).read_text())
    assert table["format"] == 3
    assert table["kind"] == "target"
    rows = {row["name"]: row for row in table["tensors"]}
    assert {name: (row["shape"], row["dtype"]) for name, row in rows.items()} == {
        t.name: (list(t.shape), t.dtype) for group in GROUPS.values() for t in group
    }
    assert len(rows["a.rows"]["slabs"]) > 1
    assert all(len(slab["sha256"]) == 64 for row in rows.values() for slab in row["slabs"])
