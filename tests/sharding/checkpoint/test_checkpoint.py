"""The converted layout on disk: parts, digests, the journal, sharded reading."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from jaxspec.sharding.checkpoint.manifest import MANIFEST, Manifest, Part, Tensor, partition, read_manifest, seal
from jaxspec.sharding.checkpoint.reader import PARAMS, load_arrays, verify
from jaxspec.sharding.checkpoint.writer import JOURNAL, LOCK, CheckpointWriter
from jaxspec.sharding.mesh import TENSOR_AXIS, make_mesh

IDENTITY = {"source": "abc", "dtype": "float32"}
ROWS = Tensor("a.rows", (48, 6), "float32")
COLUMNS = Tensor("a.columns", (5, 80), "float32")
PACKED = Tensor("a.packed", (16, 3, 8), "int32")
EIGHTH = Tensor("a.eighth", (16, 24, 5), "float8_e4m3fn")
SMALL = Tensor("norm", (7,), "float32")
GROUPS = {"a": [ROWS, COLUMNS, PACKED, EIGHTH], "norm": [SMALL]}


def cut(array: np.ndarray, slab) -> np.ndarray:
    return array[slab.start : slab.stop]


def write(folder: Path, arrays: dict[str, np.ndarray], parts: tuple[Part, ...], **options: bool) -> CheckpointWriter:
    """Writes all parts that are not finished yet and leaves the finishing to the caller."""
    writer = CheckpointWriter(folder, IDENTITY, **({"resume": False, "overwrite": False} | options))
    for part in parts:
        if part.name not in writer.finished:
            writer.add(part, {s.tensor.name: cut(arrays[s.tensor.name], s) for s in part.slabs})
    return writer


@pytest.fixture(scope="module")
def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {t.name: (9 * rng.standard_normal(t.shape)).astype(t.dtype) for group in GROUPS.values() for t in group}


@pytest.fixture(scope="module")
def written(tmp_path_factory, arrays) -> Path:
    parts = partition(GROUPS, max_part_bytes=700)
    folder = tmp_path_factory.mktemp("written") / "model"
    write(folder, arrays, parts).finish({"kind": "target"}, parts)
    return folder


@pytest.fixture
def checkpoint(tmp_path: Path, written: Path) -> Path:
    """A checkpoint whose larger tensors are each cut into several slabs."""
    return Path(shutil.copytree(written, tmp_path / "model"))


def data_files(folder: Path, part: str) -> list[Path]:
    """The files that hold a part's numbers, the largest first."""
    files = [path for path in (folder / PARAMS / part).rglob("*") if path.is_file() and path.parent.name == "d"]
    return sorted(files, key=lambda path: -path.stat().st_size)


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


def load(folder: Path) -> dict[str, jax.Array]:
    return load_arrays(folder, read_manifest(folder), placed(1, {}))


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


def test_parts_in_any_order_make_the_same_arrays(checkpoint, arrays):
    manifest = read_manifest(checkpoint)
    backwards = Manifest(manifest.about, manifest.parts[::-1], manifest.digests)
    loaded = load_arrays(checkpoint, backwards, placed(1, {}))
    assert set(loaded) == set(arrays)
    for name, array in loaded.items():
        np.testing.assert_array_equal(np.asarray(array), arrays[name])


def test_parts_are_written_in_any_order(tmp_path, arrays):
    parts = partition(GROUPS, max_part_bytes=700)[::-1]
    write(tmp_path / "model", arrays, parts).finish({}, parts)
    manifest = read_manifest(tmp_path / "model")
    assert {part.name: part for part in manifest.parts} == {part.name: part for part in parts}
    verify(tmp_path / "model", manifest)


def test_a_part_that_is_noted_but_gone_is_written_again(tmp_path, arrays):
    parts = partition(GROUPS, max_part_bytes=700)
    writer = write(tmp_path / "model", arrays, parts[:3])
    shutil.rmtree(writer.partial / PARAMS / parts[1].name)
    resumed = write(tmp_path / "model", arrays, parts, resume=True)
    verify(tmp_path / "model", resumed.finish({}, parts))


@pytest.mark.parametrize("line", ["[]", "5", '{"part": 1, "digests": {}}', '{"part": "a-0"}', '{"digests": {}}'])
def test_a_damaged_journal_is_one_line(tmp_path, arrays, line):
    writer = write(tmp_path / "model", arrays, partition(GROUPS)[:1])
    with (writer.partial / JOURNAL).open("a") as journal:
        journal.write(f"{line}\n")
    with pytest.raises(ValueError, match=r"journal\.jsonl line 3: damaged; start again with --overwrite"):
        write(tmp_path / "model", arrays, partition(GROUPS), resume=True)


def test_a_folder_without_its_marker_is_refused(tmp_path, arrays):
    with pytest.raises(ValueError, match=r"no jaxspec.json, so not a converted checkpoint; convert it"):
        read_manifest(tmp_path / "model")
    write(tmp_path / "model", arrays, partition(GROUPS))
    assert not (tmp_path / "model").exists()
    with pytest.raises(ValueError, match="unfinished .*, continue it with --resume"):
        read_manifest(tmp_path / "model")


def test_a_run_continues_where_its_journal_ends(tmp_path, arrays, checkpoint):
    parts = partition(GROUPS, max_part_bytes=700)
    folder = tmp_path / "resumed"
    writer = write(folder, arrays, parts[:2])
    # As after a kill: half a journal line, a part that was written but not noted, and one that Orbax had begun.
    with (writer.partial / JOURNAL).open("a") as journal:
        journal.write('{"part": "a-2", "dig')
    for name in (parts[2].name, f"{parts[3].name}.orbax-checkpoint-tmp"):
        (writer.partial / PARAMS / name).mkdir()
    kept = {p: p.stat().st_mtime_ns for p in (writer.partial / PARAMS).rglob("*") if parts[0].name in p.parts}
    assert kept

    resumed = CheckpointWriter(folder, IDENTITY, resume=True, overwrite=False)
    assert list(resumed.finished) == [part.name for part in parts[:2]]
    resumed = write(folder, arrays, parts, resume=True)
    assert {p: p.stat().st_mtime_ns for p in kept} == kept
    resumed.finish({"kind": "target"}, parts)
    assert (folder / MANIFEST).read_text() == (checkpoint / MANIFEST).read_text()
    assert sorted(p.name for p in folder.iterdir()) == sorted(p.name for p in checkpoint.iterdir())
    verify(folder, read_manifest(folder))


def test_a_run_killed_before_its_first_journal_line_starts_again(tmp_path, arrays):
    partial = tmp_path / "model.partial"
    (partial / PARAMS).mkdir(parents=True)
    (partial / JOURNAL).write_text('{"sour')
    parts = partition(GROUPS)
    write(tmp_path / "model", arrays, parts, resume=True).finish({}, parts)
    verify(tmp_path / "model", read_manifest(tmp_path / "model"))


@pytest.mark.parametrize("option", ["resume", "overwrite"])
def test_a_run_that_still_goes_on_is_not_taken_over(tmp_path, arrays, option):
    partial = tmp_path / "model.partial"
    partial.mkdir()
    holds = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.lockf(f, fcntl.LOCK_EX); print(flush=True); input()"
    command = [sys.executable, "-c", holds, str(partial / LOCK)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline()
        with pytest.raises(ValueError, match="partial: another process is writing it; wait until it has ended"):
            write(tmp_path / "model", arrays, partition(GROUPS), **{option: True})
        assert partial.is_dir()
        other.communicate("\n")
    write(tmp_path / "model", arrays, partition(GROUPS), **{option: True}).finish({}, partition(GROUPS))


def test_another_source_does_not_resume(tmp_path, arrays):
    write(tmp_path / "model", arrays, partition(GROUPS))
    with pytest.raises(ValueError, match="source has changed since that run began; start again with --overwrite"):
        CheckpointWriter(tmp_path / "model", IDENTITY | {"source": "other"}, resume=True, overwrite=False)


def test_what_is_in_the_way_is_named(checkpoint, arrays):
    parts = partition(GROUPS)
    with pytest.raises(ValueError, match="model: already exists; choose another output or use --overwrite"):
        write(checkpoint, arrays, parts)
    write(checkpoint, arrays, parts, overwrite=True)
    assert [part.name for part in read_manifest(checkpoint).parts] != [
        part.name for part in parts
    ]  # Still the old one.
    shutil.rmtree(checkpoint)
    with pytest.raises(ValueError, match="left by an unfinished run"):
        write(checkpoint, arrays, parts)
    write(checkpoint, arrays, parts, overwrite=True).finish({}, parts)
    write(checkpoint, arrays, parts, overwrite=True).finish({}, parts)
    assert [part.name for part in read_manifest(checkpoint).parts] == [part.name for part in parts]


def test_only_a_converted_checkpoint_is_overwritten(tmp_path, arrays):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match="is not a converted checkpoint, so it is not overwritten"):
        write(tmp_path / "model", arrays, partition(GROUPS), overwrite=True)
    assert (tmp_path / "model" / "thesis.tex").exists()


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
