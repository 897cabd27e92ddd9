"""What a simulation returns: when everything happened, and what each rank held."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

from planner.schedules.action import Action, Schedule

_ROUNDING: Final = 1e-9


class Span(NamedTuple):
    """One action on its rank."""

    rank: int
    action: Action
    start_s: float
    end_s: float


class Passage(NamedTuple):
    """One message between ranks: handed over when ``action`` ended, off the sender at ``left_s``, there at
    ``arrived_s``, taken in by the action of ``to_stage`` that starts at ``taken_s``."""

    action: Action
    to_stage: int
    from_rank: int
    to_rank: int
    bytes: int
    handed_s: float
    left_s: float
    arrived_s: float
    taken_s: float


class ClosingKind(StrEnum):
    """What follows a rank's backwards: its replicas' sum, the sum of tied parameters, the optimizer's step.

    Where the optimizer is sharded the sum is a reduce-scatter, and the stepped parameters are gathered last.
    """

    ALL_REDUCE = "all-reduce"
    TIED = "tied"
    OPTIMIZER = "optimizer"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_GATHER = "all-gather"


class Closing(NamedTuple):
    """Work of a rank beside and after its actions; ``what``: the stage, the tied parameter, or nothing."""

    rank: int
    kind: ClosingKind
    what: str
    start_s: float
    end_s: float


class RankUse(NamedTuple):
    """How one rank is used. ``peak_memory_bytes`` is 0 where memory was not asked for."""

    rank: int
    busy_s: float
    peak_memory_bytes: int


class Level(NamedTuple):
    """From ``time_s`` on a rank holds ``bytes``."""

    time_s: float
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """One iteration as the time model has it.

    ``starts_s[r][i]`` and ``ends_s[r][i]`` are those of ``schedule[r][i]``; ``makespan_s`` is the end of the last
    action, ``iteration_s`` that of everything. ``memory`` per rank: what it holds over time, empty where not asked for.
    """

    schedule: Schedule
    starts_s: list[list[float]]
    ends_s: list[list[float]]
    makespan_s: float
    iteration_s: float
    bubble_fraction: float
    ranks: tuple[RankUse, ...]
    closings: tuple[Closing, ...]
    messages: tuple[Passage, ...]
    memory: tuple[tuple[Level, ...], ...]

    def spans(self) -> Iterator[Span]:
        """Every action, rank by rank, in order."""
        for rank, order in enumerate(self.schedule):
            for action, start, end in zip(order, self.starts_s[rank], self.ends_s[rank], strict=True):
                yield Span(rank, action, start, end)

    def first_over(self, rank: int, limit_bytes: int) -> int | None:
        """The position of the action that runs, or ran last, when a rank first holds more than a limit; None: never."""
        time_s = next((level.time_s for level in self.memory[rank] if level.bytes > limit_bytes), None)
        if time_s is None:
            return None
        return max(0, bisect_right(self.starts_s[rank], time_s + _ROUNDING * self.iteration_s) - 1)
