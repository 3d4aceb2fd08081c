"""Runs that are killed, continued and refused leave a whole checkpoint or none."""

import shutil
import subprocess
import sys

import pytest

from jaxspec.sharding.checkpoint.manifest import MANIFEST, partition, read_manifest
from jaxspec.sharding.checkpoint.parts import PARAMS
from jaxspec.sharding.checkpoint.reader import verify
from jaxspec.sharding.checkpoint.writer import JOURNAL, LOCK, CheckpointWriter
from tests.support.checkpoints import GROUPS, IDENTITY, write


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
