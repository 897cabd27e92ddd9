"""Checkpoints of a run: every process writes what it owns, reads what it needs, through torch.distributed.checkpoint.

Tensors lie in safetensors files, all else in JSON: nothing is pickled. Their names are those of the model's parameters
and buffers, so that another plan, with other ranks, stages and replicas, finds what it needs; and so that plain torch
reads them too (``torch.distributed.checkpoint.HuggingFaceStorageReader``). Optimizer tensors stand under
``optimizer/PARAMETER/KEY``; the buffers that training changed, of replicas after the first, under ``replicaN/BUFFER``.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

from planner.errors import PipeplanError, RunError
from planner.files import plain
from planner.runtime.board import State, Writer
from planner.runtime.groups import Group
from planner.runtime.optimizer import NamedOptimizer, tensors_in
from planner.runtime.parts import TensorParts
from planner.runtime.saved import (
    Saved,
    SavedBatch,
    SavedFile,
    SavedModel,
    check_files,
    damaged,
    describe,
    finish,
    newest,
    part_of,
    read_part,
    sync_folder,
    unfinished,
    write_synced,
)
from planner.runtime.scaling import LossScaling

FILE_BYTES = 1 << 30
"""A process begins another file when one holds so much: only one file's tensors are copied to the host at a time."""


class Part(Protocol):
    """What a checkpoint is put into; planner.runtime.trainer.Trainer is one."""

    @property
    def parameters(self) -> Mapping[str, Tensor]:
        """By name."""

    @property
    def buffers(self) -> Mapping[str, Tensor]:
        """By name."""

    @property
    def optimizer(self) -> NamedOptimizer | None:
        """None where nothing is trained."""

    @property
    def scaling(self) -> LossScaling | None:
        """Where losses are in float16."""


class TrainedPart(Part, Protocol):
    """What a checkpoint is made of."""

    @property
    def changed_buffers(self) -> frozenset[str]:
        """Names of the buffers that training changes."""


@dataclass(frozen=True, kw_only=True)
class WholeModel:
    """All of a model, outside a run's own trainers."""

    parameters: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    optimizer: NamedOptimizer | None
    scaling: LossScaling | None


@dataclass(kw_only=True)
class Content:
    """What one process writes: tensors by name, and what the optimizer keeps beside them by parameter."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    scaler: dict[str, Any] | None = None


def content_of(
    trained: TrainedPart,
    *,
    rank_writes: Collection[str],
    replica: int,
    replicas: int,
    state: tuple[Mapping[str, Any], Mapping[str, Tensor]] | None = None,
) -> Content:
    """What a process writes of its part of the model.

    ``state``: what the optimizer keeps, where it is not this process's alone.

    ``rank_writes``: the parameters, with their optimizer state, and buffers that its pipeline rank writes. Replicas,
    which hold the same, take turns; but a buffer that training changes is another one in each, and written by each.
    """
    mine = set(sorted(rank_writes)[replica::replicas])
    content = Content()
    content.tensors = {name: value.detach() for name, value in trained.parameters.items() if name in mine}
    for name, buffer in trained.buffers.items():
        if name in (rank_writes if name in trained.changed_buffers else mine):
            content.tensors[_of_replica(replica, name) if name in trained.changed_buffers else name] = buffer
    if trained.scaling is not None:
        content.scaler = trained.scaling.kept()
    if trained.optimizer is not None:
        entries, tensors = trained.optimizer.kept() if state is None else state
        content.optimizer = {name: entry for name, entry in entries.items() if name in mine}
        names = {name for entry in content.optimizer.values() for name in tensors_in(entry)}
        content.tensors |= {name: tensor for name, tensor in tensors.items() if name in names}
    return content


def _of_replica(replica: int, name: str) -> str:
    return f"replica{replica}/{name}" if replica else name


# --- writing ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """Writes the checkpoints of a run; every process has one, and all call ``save`` together.

    ``run``: a name that no other run has, the same on all processes.
    """

    folder: Path
    run: str
    process: int
    num_processes: int
    control: Group
    board: Writer
    seed: int
    model: SavedModel
    batch: SavedBatch

    def save(self, step: int, content: Content) -> None:
        """Write the state before step ``step``. When it returns the checkpoint is whole, on every process.

        Raises RunError where the disk does not take it; those before it stay.
        """
        try:
            self._save(step, content)
        except OSError as error:
            kept = newest(self.folder)
            raise RunError(
                f"{self.folder}: the checkpoint of step {step} cannot be written ({error.strerror or error})",
                hint="make room there, or mend its rights" + (f"; --resume goes on from {kept.name}" if kept else ""),
            ) from None

    def _save(self, step: int, content: Content) -> None:
        written = unfinished(self.folder, step, self.run)
        self.board.at(State.CHECKPOINT)
        written.mkdir(parents=True, exist_ok=True)
        _write(written, content.tensors, shard=self.process + 1, board=self.board)
        files = {}
        for path in sorted(written.glob(f"shard-{self.process + 1:05d}-*")):
            self.board.at(State.CHECKPOINT)
            files[path.name] = plain(describe(path))
        write_synced(part_of(written, self.process), {"files": files, "optimizer": content.optimizer})
        sync_folder(written)
        self._wait()
        if self.process == 0:
            self._finish(written, step, content.scaler)
        self._wait()

    def _wait(self) -> None:
        self.board.at(State.WAITING)
        self.control.barrier()
        self.board.at(State.CHECKPOINT)

    def _finish(self, written: Path, step: int, scaler: dict[str, Any] | None) -> None:
        parts = [read_part(written, process) for process in range(self.num_processes)]
        saved = Saved(
            step=step,
            seed=self.seed,
            model=self.model,
            batch=self.batch,
            optimizer={name: entry for part in parts for name, entry in part["optimizer"].items()},
            scaler=scaler,
            files={name: SavedFile(**file) for part in parts for name, file in part["files"].items()},
        )
        self.board.at(State.CHECKPOINT)
        finish(written, saved, num_parts=self.num_processes)


class _Planner(DefaultSavePlanner):
    """Takes each tensor as it lies, when its turn comes, and says that there is progress."""

    def __init__(self, board: Writer) -> None:
        super().__init__(flatten_state_dict=False)
        self._board = board

    def resolve_data(self, write_item: WriteItem) -> Any:
        """The tensor as it is written."""
        self._board.at(State.CHECKPOINT)
        tensor: Tensor = self.lookup_object(write_item.index)
        return tensor.contiguous()


class _Storage(HuggingFaceStorageWriter):
    """Files of one process, whose names no other uses."""

    def __init__(self, path: Path, *, shard: int, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(str(path), fqn_to_index_mapping=_files(tensors), save_distributed=True)
        self._shard = shard

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """As if this process were one of many: the plans of the others are not known here."""
        made: list[SavePlan] = super().prepare_global_plan(plans)
        return [replace(plan, storage_data=plan.storage_data | {"shard_index": self._shard}) for plan in made]


def _files(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """The number of each tensor's file, from 1."""
    numbers: dict[str, int] = {}
    number, size = 1, 0
    for name, tensor in tensors.items():
        if size and size + tensor.nbytes > FILE_BYTES:
            number, size = number + 1, 0
        numbers[name] = number
        size += tensor.nbytes
    return numbers


def _write(folder: Path, tensors: Mapping[str, Tensor], *, shard: int, board: Writer) -> None:
    if tensors:
        with _plainly():
            storage = _Storage(folder, shard=shard, tensors=tensors)
            save_tensors(dict(tensors), storage_writer=storage, planner=_Planner(board), no_dist=True)


@contextmanager
def _plainly() -> Iterator[None]:
    """No warning that no process group is used, and the error itself in place of what it is wrapped in."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            yield
        except CheckpointException as error:
            cause, _ = next(iter(error.failures.values()))
            raise cause from None


# --- reading ----------------------------------------------------------------------------------------------------------


def check(path: Path, saved: Saved, *, process: int, num_processes: int, board: Writer) -> None:
    """Check this process's share of a checkpoint's files; together all processes check them all."""
    board.at(State.CHECKPOINT)
    check_files(path, saved, share=process, shares=num_processes)


def load(
    path: Path, saved: Saved, part: Part, *, replica: int, board: Writer, parts: TensorParts | None = None
) -> None:
    """Put a checkpoint into a part of the model. Raises InputError where it does not hold all of it.

    ``parts``: which parameters tensor ranks hold in parts.
    """
    board.at(State.CHECKPOINT)
    try:
        _load(path, saved, part, replica, parts)
    except PipeplanError:
        raise
    except (KeyError, ValueError, TypeError, RuntimeError, AssertionError) as error:
        words = str(error).strip().splitlines()
        raise damaged(path, f"{type(error).__name__}: {words[0] if words else ''}") from None
    board.at(State.CHECKPOINT)


def _load(path: Path, saved: Saved, part: Part, replica: int, parts: TensorParts | None) -> None:
    found = HuggingFaceStorageReader(str(path)).read_metadata().state_dict_metadata
    targets: dict[str, Tensor] = {name: value.detach() for name, value in part.parameters.items()}
    split = [] if parts is None else [name for name in parts.splits if name in targets]
    targets |= {name: _empty(found[name]) for name in split}
    for name, buffer in part.buffers.items():
        own = _of_replica(replica, name)
        targets[own if replica and own in found else name] = buffer
    stepped = () if part.optimizer is None else part.optimizer.parameters
    entries = {name: entry for name, entry in saved.optimizer.items() if name in stepped}
    kept = [name for entry in entries.values() for name in tensors_in(entry)]
    targets |= {name: _empty(found[name]) for name in kept}
    with _plainly():
        load_tensors(targets, storage_reader=HuggingFaceStorageReader(str(path)), no_dist=True)
    if parts is not None:
        targets |= {name: parts.part(name, targets[name]) for name in (*split, *kept)}
        for name in split:
            part.parameters[name].detach().copy_(targets[name])
    if part.optimizer is not None:
        part.optimizer.restore(entries, targets)
    if part.scaling is not None and saved.scaler is not None:
        part.scaling.restore(saved.scaler)


def _empty(metadata: Any) -> Tensor:
    assert isinstance(metadata, TensorStorageMetadata)
    return torch.empty(metadata.size, dtype=metadata.properties.dtype)
