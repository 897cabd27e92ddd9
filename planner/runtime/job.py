"""What every process of a run is told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from planner.plan.plan import Plan
from planner.schedules import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class RunJob:
    """One run of a plan."""

    plan: Plan
    schedule: Schedule
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

    def place_of(self, global_rank: int) -> tuple[int, int]:
        """Pipeline rank and replica of a process: T innermost, then D."""
        sizes = self.plan.parallel
        rank, rest = divmod(global_rank, sizes.data * sizes.tensor)
        return rank, rest // sizes.tensor
