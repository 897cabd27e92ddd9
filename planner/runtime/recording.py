"""One training step as a run measured it: when every action ran, on every rank.

Times are medians over the steps after the first, each counted from that step's first action. A median keeps order (what
ends before another begins in every step does so in the medians), so they are a timeline as any one step's is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, Final, Literal

from planner.errors import InputError
from planner.plan import Plan
from planner.record import Bytes, Count, Index, Seconds, record
from planner.schedules import Schedule, format_order

FORMAT: Final = "pipeplan-recording/1"


@record
class RecordedRank:
    """One pipeline rank, as its first replica and tensor rank measured it, but for the peak, the largest of them all.

    ``actions`` in a plan's notation; ``ended_s``: after its optimizer's step.
    """

    rank: Index
    actions: str
    starts_s: tuple[Seconds, ...]
    ends_s: tuple[Seconds, ...]
    ended_s: Seconds
    peak_memory_bytes: Bytes


@record
class Recording:
    """What a run measured of one step of a plan; ``steps``: of how many steps these are the medians."""

    format: Literal["pipeplan-recording/1"] = FORMAT
    fingerprint: str
    steps: Count
    iteration_s: Seconds
    bubble_fraction: float
    ranks: tuple[RecordedRank, ...]


def recording_of(
    plan: Plan, schedule: Schedule, told: Sequence[Mapping[str, Any]], *, iteration_s: float, bubble_fraction: float
) -> Recording:
    """What all processes told, put together.

    Each tells ``starts`` and ``stops``, a row a step of seconds since all began, an entry for each of its rank's
    actions; ``ends``, the end of every step; ``rank`` and ``peak_memory_bytes``; ``clock_s``, when it began by a clock
    that all share, or None where they share none: then they began together, as nearly as they can tell. Rows may be of
    the last steps only.
    """
    first = {rank: next(one for one in told if one["rank"] == rank) for rank in range(plan.parallel.pipeline)}
    clocks = {rank: one.get("clock_s") or 0.0 for rank, one in first.items()}
    late = {rank: clock - min(clocks.values()) for rank, clock in clocks.items()}
    rows = min(len(one["starts"]) for one in first.values())
    warming = rows > 1 and rows == len(first[0]["ends"])  # the first step, which is slower, is among them
    chosen = range(warming - rows, 0)
    origins = [min(one["starts"][row][0] + late[rank] for rank, one in first.items()) for row in chosen]

    ranks = []
    for rank, one in first.items():
        shifts = [late[rank] - origin for origin in origins]
        starts = zip(*(one["starts"][row] for row in chosen), strict=True)
        stops = zip(*(one["stops"][row] for row in chosen), strict=True)
        ranks.append(
            RecordedRank(
                rank=rank,
                actions=format_order(schedule[rank]),
                starts_s=tuple(_typical(times, shifts) for times in starts),
                ends_s=tuple(_typical(times, shifts) for times in stops),
                ended_s=_typical([one["ends"][row] for row in chosen], shifts),
                peak_memory_bytes=max(other["peak_memory_bytes"] for other in told if other["rank"] == rank),
            )
        )
    return Recording(
        fingerprint=plan.model.fingerprint,
        steps=len(chosen),
        iteration_s=iteration_s,
        bubble_fraction=bubble_fraction,
        ranks=tuple(ranks),
    )


def _typical(times: Sequence[float], shifts: Sequence[float]) -> float:
    """A moment, from what it was in each step."""
    return max(0.0, float(median(time + shift for time, shift in zip(times, shifts, strict=True))))


def check_recording(recording: Recording, plan: Plan, schedule: Schedule) -> None:
    """Raises InputError where a recording is of another model or schedule than a plan's."""
    mend = "take the plan that was run, or run this one"
    if recording.fingerprint != plan.model.fingerprint:
        raise InputError("was measured on another model than the plan's (other fingerprint)", hint=mend)
    if [rank.rank for rank in recording.ranks] != list(range(len(schedule))):
        raise InputError(
            f"has ranks {[rank.rank for rank in recording.ranks]}, the plan 0..{len(schedule) - 1}", hint=mend
        )
    for rank, order in zip(recording.ranks, schedule, strict=True):
        if rank.actions != format_order(order):
            raise InputError(f"rank {rank.rank} ran other actions than the plan's", hint=mend)
        if not len(rank.starts_s) == len(rank.ends_s) == len(order):
            raise InputError(f"rank {rank.rank} does not time all of its {len(order)} actions", hint=mend)
        for action, start, end in zip(order, rank.starts_s, rank.ends_s, strict=True):
            if end < start:
                raise InputError(f"rank {rank.rank}: {action} ends before it starts", hint=mend)
