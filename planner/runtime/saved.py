"""Checkpoints as they lie on disk: found, checked, made valid by one rename, and old ones removed (no torch here).

    DIR/
      step-00000020/                    one checkpoint, whole as soon as it has this name
        checkpoint.json                 step, seed, batch, model, the optimizer's small state, every file's sha256
        shard-00001-model-00001-of-00001.safetensors      what process 0 wrote: weights, buffers, optimizer state
        shard-00002-...
      step-00000030/
      latest -> step-00000030           a link for people and scripts
      .step-00000040.3f2a.tmp/          being written

All processes write their files into the folder being written, and sync them to disk; then the first one adds
checkpoint.json and gives the folder its name. A process that dies at any moment leaves either the folder under its
temporary name, which nothing reads, or the whole checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from annotated_types import MinLen

from planner.errors import InputError
from planner.files import as_record, json_text, plain, read_json
from planner.record import Bytes, Count, Index, record

FORMAT: Final = "pipeplan-checkpoint/1"
KEPT = 3
"""So many of the newest checkpoints stay."""

MANIFEST = "checkpoint.json"
LATEST = "latest"
_NAME = re.compile(r"step-(\d{8,})")
_UNFINISHED = re.compile(r"\.step-\d{8,}\..*\.tmp")


@record
class SavedFile:
    """One file of a checkpoint."""

    bytes: Bytes
    sha256: Annotated[str, MinLen(64)]


@record
class SavedModel:
    """Which model it is: ``fingerprint`` as the plan has it."""

    name: str
    fingerprint: str


@record
class SavedBatch:
    """How the samples of a step were laid out: G = b · M · D."""

    global_batch: Count
    microbatch: Count
    data: Count


@record
class Saved:
    """What ``checkpoint.json`` says: all of a checkpoint that is no tensor.

    ``step`` is that of the next optimizer step to be done, and so the number of items that data() has given.
    ``optimizer``: by parameter name, see planner.runtime.optimizer; ``scaler``: of losses in float16.
    """

    format: Literal["pipeplan-checkpoint/1"] = FORMAT
    step: Index
    seed: Index
    model: SavedModel
    batch: SavedBatch
    optimizer: dict[str, Any]
    scaler: dict[str, Any] | None = None
    files: dict[str, SavedFile]


# --- finding ----------------------------------------------------------------------------------------------------------


def newest(folder: Path) -> Path | None:
    """The folder of the newest whole checkpoint."""
    return max(_whole(folder), key=step_of, default=None)


def _whole(folder: Path) -> list[Path]:
    """All whole checkpoints of a folder."""
    if not folder.is_dir():
        return []
    return [path for path in folder.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]


def step_of(path: Path) -> int:
    """The step that a checkpoint's folder is named after."""
    found = _NAME.fullmatch(path.name)
    assert found is not None
    return int(found[1])


def read_saved(path: Path) -> Saved:
    """What a checkpoint's folder says of itself. Raises InputError where it is damaged, or a file is missing."""
    try:
        saved = as_record(Saved, read_json(path / MANIFEST), path=path / MANIFEST)
        if saved.step != step_of(path):
            raise InputError(f"{MANIFEST} speaks of step {saved.step}")
        for name, file in saved.files.items():
            _check_size(path / name, file)
    except InputError as fault:
        raise damaged(path, fault.message) from None
    return saved


def _check_size(path: Path, file: SavedFile) -> None:
    try:
        size = path.stat().st_size
    except OSError as error:
        raise InputError(f"{path.name}: {error.strerror}") from None
    if size != file.bytes:
        raise InputError(f"{path.name} has {size} bytes, not {file.bytes}")


def check_files(path: Path, saved: Saved, *, share: int = 0, shares: int = 1) -> None:
    """Compare the files with their sha256; of every ``shares`` of them the one numbered ``share``."""
    for name in sorted(saved.files)[share::shares]:
        try:
            found = file_sha256(path / name)
        except OSError as error:
            raise damaged(path, f"{name}: {error.strerror}") from None
        if found != saved.files[name].sha256:
            raise damaged(path, f"{name} is not what was written (sha256 {found[:12]})")


def damaged(path: Path, fact: str) -> InputError:
    """The error of a checkpoint that is not whole."""
    return InputError(
        f"{path}: the checkpoint is damaged: {fact}", hint="remove that folder to go on from the one before it"
    )


# --- writing ----------------------------------------------------------------------------------------------------------


def unfinished(folder: Path, step: int, run: str) -> Path:
    """Where the checkpoint of a step is written until it is whole; ``run``: a name that no other run has."""
    return folder / f".step-{step:08d}.{run}.tmp"


def describe(path: Path) -> SavedFile:
    """Size and sha256 of a file."""
    return SavedFile(bytes=path.stat().st_size, sha256=file_sha256(path))


def file_sha256(path: Path) -> str:
    """Of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_synced(path: Path, data: Any) -> None:
    """Write JSON, down to the disk."""
    with path.open("w", encoding="utf-8") as file:
        file.write(json_text(data))
        file.flush()
        os.fsync(file.fileno())


def part_of(folder: Path, process: int) -> Path:
    """What a process tells the first one, in the folder being written."""
    return folder / f"part-{process:05d}.json"


def read_part(folder: Path, process: int) -> dict[str, Any]:
    """The part of another process. Raises InputError where it is not there, though that process wrote it."""
    try:
        part: dict[str, Any] = json.loads(part_of(folder, process).read_text(encoding="utf-8"))
    except OSError:
        raise InputError(
            f"{folder.parent}: what process {process} wrote of the checkpoint is not seen here",
            hint="--checkpoint must name a folder that all machines share",
        ) from None
    return part


def finish(written: Path, saved: Saved, *, num_parts: int) -> Path:
    """Make a checkpoint whole: its description, its name, ``latest``; then remove those that are too old."""
    folder = written.parent
    write_synced(written / MANIFEST, plain(saved))
    for process in range(num_parts):
        part_of(written, process).unlink()
    sync_folder(written)
    path = folder / f"step-{saved.step:08d}"
    if path.exists():  # of a run that was killed before it came to know of it, and is done again
        _remove(path)
    written.replace(path)
    _link_latest(folder, path.name)
    sync_folder(folder)
    for old in sorted(_whole(folder), key=step_of)[:-KEPT]:
        _remove(old)
    return path


def _remove(path: Path) -> None:
    """Take a checkpoint's name from it before its files, so that no half of it is ever found."""
    doomed = path.with_name(f".{path.name}.removed.tmp")
    shutil.rmtree(doomed, ignore_errors=True)
    path.replace(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def _link_latest(folder: Path, name: str) -> None:
    made = folder / f".{LATEST}.tmp"
    with suppress(OSError):  # a file system without links: the names tell as much
        made.unlink(missing_ok=True)
        made.symlink_to(name)
        made.replace(folder / LATEST)


def sync_folder(folder: Path) -> None:
    """Bring a folder's list of names down to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove_unfinished(folder: Path) -> None:
    """Remove what runs that were killed left half written."""
    for path in folder.iterdir():
        if _UNFINISHED.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)
