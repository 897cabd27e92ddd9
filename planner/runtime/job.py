"""What every process of a run is told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from planner.plan.plan import Plan
from planner.schedules import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Pipeline rank r, replica d and tensor rank t of process (r · D + d) · T + t, its rank in the whole run."""

    process: int
    rank: int
    replica: int
    tensor_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunJob:
    """One run of a plan."""

    plan: Plan
    schedule: Schedule
    plan_path: Path
    model_path: Path
    steps: int
    seed: int
    start: int
    """The step that it goes on from: 0, or that of the checkpoint."""
    verify_steps: int
    """How many of the steps are also trained in one process; 0: none."""
    checkpoints: Path | None
    """The folder of the checkpoints."""
    checkpoint_every: int | None
    """Steps between checkpoints; None: only after the last step."""
    resume: Path | None
    """The checkpoint that it goes on from."""
    initial: Path | None
    """Where the weights are that it starts with, if they are not those of model()."""
    in_parts: bool
    """Whether each process makes its own stages' weights alone: the whole does not fit this machine's memory."""
    record: bool
    """Whether it tells when each action of the last steps ran."""
    device: str
    folder: Path
    """Of this machine's board and stacks."""
    one_node: bool
    digest: str
    """Of all that must be the same on every machine."""

    @property
    def num_processes(self) -> int:
        """Processes in all: P · D · T."""
        sizes = self.plan.parallel
        return sizes.pipeline * sizes.data * sizes.tensor

    @property
    def ranks(self) -> tuple[int, ...]:
        """The pipeline rank of each stage."""
        return tuple(stage.rank for stage in self.plan.stages)

    def first_process(self, rank: int) -> int:
        """The process of a pipeline rank in the first replica, the first of its tensor ranks."""
        sizes = self.plan.parallel
        return rank * sizes.data * sizes.tensor

    def place_of(self, process: int) -> Place:
        """Where a process stands."""
        sizes = self.plan.parallel
        rank, rest = divmod(process, sizes.data * sizes.tensor)
        replica, tensor_rank = divmod(rest, sizes.tensor)
        return Place(process=process, rank=rank, replica=replica, tensor_rank=tensor_rank)
