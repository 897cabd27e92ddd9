"""What a search hands back: the best plan found, what is proven of it, and what it was compared with."""

from __future__ import annotations

from dataclasses import dataclass

from planner.graph import LayerGraph, Stage
from planner.schedules import ScheduleName
from planner.search.space import Asked, Configuration
from planner.simulate import Job, Timeline

_EQUAL = 1e-9
SIMPLEST = (
    ScheduleName.ONE_F_ONE_B,
    ScheduleName.GPIPE,
    ScheduleName.INTERLEAVED,
    ScheduleName.LOOPED_BFS,
    ScheduleName.ZB_H1,
    ScheduleName.ZB_H2,
    ScheduleName.ZB_V,
    ScheduleName.DUALPIPE_V,
    ScheduleName.V_HALF,
    ScheduleName.V_MIN,
    ScheduleName.SYNTHESISED,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One whole answer: a configuration, its cut, its schedule, and what the time model says of it."""

    configuration: Configuration
    job: Job
    schedule: ScheduleName
    warmup: tuple[int, ...] | None
    timeline: Timeline

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The cut's stages."""
        return self.job.stages

    @property
    def iteration_s(self) -> float:
        """The time of one iteration."""
        return self.timeline.iteration_s

    @property
    def unevenness(self) -> float:
        """The largest over the mean load of the ranks: 1 is even."""
        busy = [use.busy_s for use in self.timeline.ranks]
        mean = sum(busy) / len(busy)
        return max(busy) / mean if mean else 1.0

    @property
    def peak_memory_bytes(self) -> int:
        """The largest peak of a rank."""
        return max(use.peak_memory_bytes for use in self.timeline.ranks)

    def better_than(self, other: Candidate | None) -> bool:
        """Faster; among equals (within 1e-9) more even, then fewer GPUs, fewer micro-batches, fewer stages.

        Then what holds less, and at last the simpler schedule.
        """
        if other is None or self.iteration_s < other.iteration_s * (1 - _EQUAL):
            return True
        if self.iteration_s > other.iteration_s * (1 + _EQUAL):
            return False
        if abs(self.unevenness - other.unevenness) > _EQUAL:
            return self.unevenness < other.unevenness
        return self._rank() < other._rank()

    def _rank(self) -> tuple[int, ...]:
        """What decides among plans that are as fast and as even."""
        shape = self.configuration
        return (
            shape.gpus,
            shape.num_microbatches,
            len(self.stages),
            shape.tensor,
            self.peak_memory_bytes,
            SIMPLEST.index(self.schedule),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """What someone would do by hand, under the same time model; ``candidate`` None: it cannot be made."""

    name: str
    candidate: Candidate | None
    fits: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The answer. ``bound_s``: no order of any asked configuration is faster; ``proven``: see choose.

    ``solved``: configurations of which every cut that could be faster was timed; ``pruned``: those that their bound
    rules out; ``left``: the others. ``alternatives``: the best plan found of each configuration, ``by_schedule``: under
    each schedule.
    """

    asked: Asked
    graph: LayerGraph
    best: Candidate
    bound_s: float
    proven: bool
    configurations: int
    solved: int
    pruned: int
    seconds: float
    alternatives: tuple[Candidate, ...]
    by_schedule: tuple[Candidate, ...]
    baselines: tuple[Baseline, ...]
    interrupted: bool = False

    @property
    def left(self) -> int:
        """The configurations that are neither solved nor ruled out."""
        return self.configurations - self.solved - self.pruned

    @property
    def gap(self) -> float:
        """How far the best is above the bound, relative."""
        return self.best.iteration_s / self.bound_s - 1 if self.bound_s else 0.0
