"""A schedule by its name: which shapes it is made for, its warm-up, its actions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from planner.errors import InputError
from planner.schedules import interleaved, one_f_one_b
from planner.schedules.action import Schedule
from planner.schedules.dualpipe_v import dualpipe_v
from planner.schedules.gpipe import gpipe
from planner.schedules.looped_bfs import looped_bfs
from planner.schedules.names import Placement, ScheduleName
from planner.schedules.v_memory import v_half, v_min
from planner.schedules.zb_v import zb_v
from planner.schedules.zero_bubble import zb_h1, zb_h1_depths, zb_h2

MOST_FORWARDS: Final = 2**20
"""Stages times micro-batches of a plan: more take many gigabytes, and minutes for each order that is simulated."""

_WITH_WARMUP = (ScheduleName.ONE_F_ONE_B, ScheduleName.INTERLEAVED, ScheduleName.ZB_H1)
_ONE_STAGE_A_RANK = (ScheduleName.GPIPE, ScheduleName.ONE_F_ONE_B, ScheduleName.ZB_H2)
_IN_A_V = (ScheduleName.ZB_V, ScheduleName.DUALPIPE_V, ScheduleName.V_HALF, ScheduleName.V_MIN)


def build(
    name: ScheduleName,
    *,
    num_ranks: int,
    virtual: int,
    num_microbatches: int,
    placement: Placement,
    warmup: Sequence[int] | None = None,
) -> Schedule:
    """Every rank's actions under a named schedule; ``warmup`` None: its default.

    Raises InputError where the schedule is not made for this shape, or has no such warm-up.
    """
    shape = {"num_ranks": num_ranks, "virtual": virtual, "num_microbatches": num_microbatches}
    check_shape(name, **shape, placement=placement, warmup=warmup)
    depths = default_warmup(name, **shape) if warmup is None else tuple(warmup)
    match name:
        case ScheduleName.GPIPE:
            return gpipe(num_ranks, num_microbatches)
        case ScheduleName.LOOPED_BFS:
            return looped_bfs(num_ranks, virtual, num_microbatches)
        case ScheduleName.ZB_H2:
            return zb_h2(num_ranks, num_microbatches)
        case ScheduleName.ZB_V:
            return zb_v(num_ranks, num_microbatches)
        case ScheduleName.DUALPIPE_V:
            return dualpipe_v(num_ranks, num_microbatches)
        case ScheduleName.V_HALF:
            return v_half(num_ranks, num_microbatches)
        case ScheduleName.V_MIN:
            return v_min(num_ranks, num_microbatches)
        case ScheduleName.ZB_H1:
            return zb_h1(num_ranks, virtual, num_microbatches, depths or ())
        case ScheduleName.INTERLEAVED:
            return interleaved.interleaved_1f1b(num_ranks, virtual, num_microbatches, depths or ())
        case _:
            return one_f_one_b.one_f_one_b(num_ranks, num_microbatches, depths or ())


def check_shape(
    name: ScheduleName,
    *,
    num_ranks: int,
    virtual: int,
    num_microbatches: int,
    placement: Placement,
    warmup: Sequence[int] | None = None,
) -> None:
    """Raises InputError where ``build`` cannot make the schedule, without making it."""
    fault = shape_fault(name, virtual=virtual, placement=placement)
    if fault:
        raise InputError(fault[0], hint=fault[1])
    if warmup is not None:
        depths = default_warmup(name, num_ranks=num_ranks, virtual=virtual, num_microbatches=num_microbatches)
        _check_warmup(name, warmup, depths, num_ranks, virtual * num_microbatches)


def shape_fault(name: ScheduleName, *, virtual: int, placement: Placement) -> tuple[str, str] | None:
    """Why a schedule cannot be made with v stages a rank in this placement, and the mend; None: it can."""
    if name is ScheduleName.SYNTHESISED:
        return "a synthesised schedule has no rule", "its actions stand in the plan"
    if name in _IN_A_V:
        if (virtual, placement) != (2, Placement.V):
            return f"schedule {name} needs placement v and virtual 2, not {placement} and {virtual}", "set both"
        return None
    if placement is not Placement.LOOP:
        others = ", ".join(_IN_A_V)
        return f"schedule {name} needs placement loop, not {placement}", f"in placement v there are {others}"
    if name in _ONE_STAGE_A_RANK and virtual != 1:
        others = f"{ScheduleName.INTERLEAVED}, {ScheduleName.LOOPED_BFS} and {ScheduleName.ZB_H1}"
        return f"schedule {name} has one stage a rank, not {virtual}", f"with more there are {others}"
    return None


def default_warmup(
    name: ScheduleName, *, num_ranks: int, virtual: int, num_microbatches: int
) -> tuple[int, ...] | None:
    """Forwards before each rank's first B or I where the plan does not say; None: the schedule has no warm-up depth."""
    if name is ScheduleName.ZB_H1:
        return zb_h1_depths(num_ranks, virtual, num_microbatches)
    if name is ScheduleName.INTERLEAVED:
        return interleaved.default_depths(num_ranks, virtual, num_microbatches)
    if name is ScheduleName.ONE_F_ONE_B:
        return one_f_one_b.default_depths(num_ranks, num_microbatches)
    return None


def _check_warmup(
    name: ScheduleName, warmup: Sequence[int], default: Sequence[int] | None, num_ranks: int, most: int
) -> None:
    if default is None:
        with_one = ", ".join(_WITH_WARMUP)
        raise InputError(f"schedule {name} has no warm-up depth", hint=f"leave warmup out; {with_one} have it")
    if len(warmup) != num_ranks:
        raise InputError(
            f"warmup has {len(warmup)} depths for {num_ranks} ranks", hint=f"the default is {list(default)}"
        )
    for rank, depth in enumerate(warmup):
        if not 1 <= depth <= most:
            raise InputError(
                f"warmup[{rank}] is {depth}, but the rank runs {most} forwards, at least one before its first backward",
                hint=f"the default is {list(default)}",
            )
