"""Writing a checkpoint so that a killed run can be continued and an unfinished one never looks finished.

Parts are written into a sibling folder, NAME.partial, beside a journal with one line for each finished part; at the
end the folder is renamed. The journal's first line says what is being written, so that a run is continued only with
the same source and settings.
"""

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from orbax.checkpoint import v1 as ocp

from jaxspec.sharding.checkpoint.manifest import MANIFEST, Digests, Manifest, Part, partial_folder, write_manifest
from jaxspec.sharding.checkpoint.parts import PARAMS, digest, orbax_context, part_path

JOURNAL = "journal.jsonl"
LOCK = "lock"  # Held by the process that writes; the system lets go of it when that process ends.


class CheckpointWriter:
    """An unfinished checkpoint.

    Args:
      folder: where the finished checkpoint will be.
      identity: what is being written (source, dtype, parts, …), as JSON values.
      resume: continue an unfinished run of the same identity.
      overwrite: start again where an unfinished run is left, and replace a finished checkpoint at the end.
    Raises:
      ValueError: if `folder` or an unfinished run is in the way, or still running, or `resume` finds another identity.
    """

    def __init__(self, folder: Path, identity: Mapping[str, Any], *, resume: bool, overwrite: bool):
        self.folder = folder
        self.partial = partial_folder(folder)
        self.finished: dict[str, Digests] = {}
        check_output(folder, overwrite)
        if self.partial.exists():
            if resume or overwrite:
                self._lock()
            if resume:
                self._continue(identity)
            elif overwrite:
                shutil.rmtree(self.partial)
            else:
                raise ValueError(
                    f"{self.partial}: left by an unfinished run; continue with --resume or use --overwrite"
                )
        if not self.partial.exists():
            (self.partial / PARAMS).mkdir(parents=True)
            self._lock()
            self._record(dict(identity))

    def add(self, part: Part, arrays: Mapping[str, np.ndarray]) -> None:
        """Writes a part and notes in the journal that it is finished."""
        digests = write_part(self.partial, part, arrays)
        self._record({"part": part.name, "digests": dict(digests)})
        self.finished[part.name] = digests

    def finish(self, about: Mapping[str, Any], parts: tuple[Part, ...]) -> Manifest:
        """Writes the manifest and gives the folder its final name."""
        manifest = Manifest(about, parts, self.finished)
        write_manifest(self.partial, manifest)
        if self.folder.exists():  # Allowed by `overwrite`.
            shutil.rmtree(self.folder)
        self.partial.rename(self.folder)
        (self.folder / JOURNAL).unlink()
        (self.folder / LOCK).unlink()
        os.close(self._locked)
        return manifest

    def _lock(self) -> None:
        """Makes sure that no other process writes this checkpoint, and keeps others from it."""
        self._locked = os.open(self.partial / LOCK, os.O_WRONLY | os.O_CREAT)
        try:
            fcntl.lockf(self._locked, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                os.close(self._locked)
                raise ValueError(f"{self.partial}: another process is writing it; wait until it has ended") from None
            # Anything else: a file system without locks, on which one must take care oneself.

    def _continue(self, identity: Mapping[str, Any]) -> None:
        journal = self.partial / JOURNAL
        records = _read_journal(journal)
        if not records:  # Killed before its first line was whole.
            shutil.rmtree(self.partial)
            return
        for key, value in json.loads(json.dumps(identity)).items():
            if records[0].get(key) != value:
                raise ValueError(
                    f"{self.partial}: {key} has changed since that run began; start again with --overwrite"
                )
        (self.partial / PARAMS).mkdir(exist_ok=True)
        written = {path.name: path for path in (self.partial / PARAMS).iterdir()}
        # A part whose folder is gone is written again.
        records = records[:1] + [record for record in records[1:] if record["part"] in written]
        self.finished = {record["part"]: record["digests"] for record in records[1:]}
        for name in set(written) - set(self.finished):
            shutil.rmtree(written[name])
        journal.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")

    def _record(self, record: Mapping[str, Any]) -> None:
        with (self.partial / JOURNAL).open("a", encoding="utf-8") as journal:
            journal.write(json.dumps(record) + "\n")
            journal.flush()
            os.fsync(journal.fileno())


def write_part(folder: Path, part: Part, arrays: Mapping[str, np.ndarray]) -> Digests:
    """Writes one part into `folder` (it appears whole or not at all) and returns its digests."""
    with ThreadPoolExecutor(1) as beside, orbax_context():
        digests = beside.submit(lambda: {name: digest(array) for name, array in arrays.items()})
        ocp.save(part_path(folder, part).absolute(), dict(arrays))
        return digests.result()


def check_output(folder: Path, overwrite: bool) -> None:
    """Raises ValueError if `folder` may not become a checkpoint's final place."""
    if not folder.exists():
        return
    if not overwrite:
        raise ValueError(f"{folder}: already exists; choose another output or use --overwrite")
    if not folder.is_dir() or (any(folder.iterdir()) and not (folder / MANIFEST).is_file()):
        raise ValueError(
            f"{folder}: exists and is not a converted checkpoint, so it is not overwritten; remove it yourself"
        )


def _read_journal(path: Path) -> list[dict[str, Any]]:
    """The journal's whole lines; the last one may have been cut short by the kill.

    Raises:
      ValueError: if a whole line is not what `CheckpointWriter` writes.
    """
    records: list[dict[str, Any]] = []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            break
        match record:
            case {"part": str(), "digests": {}} if records:
                records.append(record)
            case {} if not records:
                records.append(record)
            case _:
                raise ValueError(f"{path} line {len(records) + 1}: damaged; start again with --overwrite")
    return records
