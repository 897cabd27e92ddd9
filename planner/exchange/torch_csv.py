"""Schedules as CSV, as torch.distributed.pipelining reads and writes them.

    0F0,0F1,,0B0,,0B1        row = rank, cell = <stage><letter><micro-batch>, blank = idle
    ,1F0,1B0,1F1,1B1

``(0F3;3B1)OVERLAP_F_B`` is a forward beside a backward: here one after the other. Sends, receives, unsharding,
resharding and gradient reduction are dropped: ours follow from the actions.
"""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from planner.errors import InputError, NothingFitsError
from planner.files import read_text
from planner.plan import Plan, PlannedSchedule, read_plan
from planner.plan.check import check_plan, profile_of
from planner.plan.job import schedule_of
from planner.schedules import (
    Letter,
    Placement,
    Schedule,
    ScheduleName,
    Wiring,
    check_schedule,
    format_order,
    parse_action,
    ranks_of,
)

_DERIVED = re.compile(r"\d+(?:(?:SEND|RECV)_[FB]\d+|(?:UNSHARD|RESHARD|REDUCE_GRAD)\d*)")
_OVERLAPPED = re.compile(r"\(([^()]*)\)(?:OVERLAP_F_B)?")
_ACTION = re.compile(r"(\d{1,9})(F|I|W|BW|B)(\d{1,9})", re.ASCII)


def schedule_csv(schedule: Schedule) -> str:
    """A schedule as CSV text, a row a rank."""
    return "".join(",".join(map(str, order)) + "\n" for order in schedule)


def plan_csv(path: Path, goal: Path | None = None) -> str:
    """The schedule of the plan in a file as CSV text; its profile is not needed, nor where the text will lie."""
    plan = read_plan(path)
    try:
        schedule = schedule_of(plan)
    except InputError as error:
        raise InputError(f"{path}: {error.message}", hint=error.hint) from error
    found = check_schedule(schedule, num_microbatches=plan.batch.microbatches, wiring=Wiring.of(plan.stages))
    if found.errors:
        raise InputError(f"{path}: {found.errors[0]}", hint="correct its actions or its schedule")
    return schedule_csv(schedule)


def read_schedule(path: Path) -> tuple[Schedule, tuple[str, ...]]:
    """The schedule in a CSV file, and remarks on how it was read.

    Raises InputError with file, row and cell where it is none.
    """
    try:
        rows = list(csv.reader(read_text(path).splitlines()))
    except csv.Error as error:  # a cell without end, say
        raise InputError(f"{path}: is no CSV ({error})", hint="a row a rank, e.g. 0F0,0F1,0B0,0B1") from None
    while rows and not any(cell.strip() for cell in rows[-1]):
        rows.pop()
    if not rows:
        raise InputError(f"{path}: has no rows", hint="a row a rank, e.g. 0F0,0F1,0B0,0B1")
    words = [
        [word for column, cell in enumerate(row) for word in _words(cell, f"{path}: row {rank} cell {column}")]
        for rank, row in enumerate(rows)
    ]
    remarks: tuple[str, ...] = ()
    if _has_old_letters(words):
        words = [[_translated(word) for word in row] for row in words]
        remarks = ("the file uses the letters of old versions, B, W and BW: read as I, W and B",)
    return tuple(tuple(map(parse_action, row)) for row in words), remarks


def ranks_in(schedule: Schedule, *, num_stages: int, path: Path) -> tuple[int, ...]:
    """The rank of every stage, from the row that it stands in. Raises InputError where that is not one row."""
    found: dict[int, int] = {}
    for rank, order in enumerate(schedule):
        for position, action in enumerate(order):
            place = f"{path}: row {rank} action {position}: {action}"
            if action.stage >= num_stages:
                raise InputError(f"{place}: the plan has stages 0..{num_stages - 1}", hint="take the plan it is for")
            if found.setdefault(action.stage, rank) != rank:
                raise InputError(
                    f"{place}: stage {action.stage} stands in row {found[action.stage]} too",
                    hint="a stage has one rank",
                )
    missing = sorted(set(range(num_stages)) - set(found))
    if missing:
        raise InputError(f"{path}: stage {missing[0]} stands in no row", hint="take the plan it is for")
    return tuple(found[stage] for stage in range(num_stages))


def _words(cell: str, place: str) -> Iterator[str]:
    """The actions of one cell, as they are spelt."""
    text = cell.strip()
    overlapped = _OVERLAPPED.fullmatch(text)
    for word in (part.strip() for part in overlapped[1].split(";")) if overlapped else (text,):
        if _ACTION.fullmatch(word):
            yield word
        elif word and not _DERIVED.fullmatch(word):
            raise InputError(f"{place}: {word[:40]!r} is no action", hint="stage, F, B, I or W, micro-batch, e.g. 3F0")


def _has_old_letters(rows: list[list[str]]) -> bool:
    """Whether B means the input's gradient: some BW, or both B and W for one stage and micro-batch."""
    seen = {_ACTION.fullmatch(word).groups() for row in rows for word in row}  # type: ignore[union-attr]
    return any(letter == "BW" or (letter == "W" and (stage, "B", m) in seen) for stage, letter, m in seen)


def _translated(word: str) -> str:
    stage, letter, m = _ACTION.fullmatch(word).groups()  # type: ignore[union-attr]
    new = {"B": Letter.BACKWARD_INPUT, "BW": Letter.BACKWARD}.get(letter, letter)
    return f"{stage}{new}{m}"


def import_torch_csv(path: Path, *, plan_path: Path, goal: Path) -> tuple[Plan, tuple[str, ...]]:
    """The plan at ``plan_path`` under the schedule in a CSV file, to be written to ``goal``; and remarks.

    Rows are ranks, and say which stages lie there; all that follows is derived anew. Raises InputError where the
    table is not for this plan or breaks a rule, NothingFitsError where a rank would not fit.
    """
    plan = read_plan(plan_path)
    profile = profile_of(plan, plan_path)
    schedule, remarks = read_schedule(path)
    num_ranks, virtual = plan.parallel.pipeline, plan.parallel.virtual
    if len(schedule) != num_ranks:
        raise InputError(f"{path}: has {len(schedule)} rows for {num_ranks} ranks", hint="take the plan it is for")
    ranks = ranks_in(schedule, num_stages=len(plan.stages), path=path)
    for rank in range(num_ranks):
        if ranks.count(rank) != virtual:
            raise InputError(
                f"{path}: row {rank} has {ranks.count(rank)} stages, not {virtual}",
                hint="each rank has `virtual` stages",
            )
    moved = replace(
        plan,
        model=replace(plan.model, source=_moved(plan.model.source, plan_path, goal)),
        profile=replace(plan.profile, path=_moved(plan.profile.path, plan_path, goal)),
        schedule=PlannedSchedule(name=ScheduleName.SYNTHESISED, placement=_placement(ranks, num_ranks, virtual)),
        stages=tuple(replace(stage, rank=ranks[stage.stage]) for stage in plan.stages),
        actions=tuple(map(format_order, schedule)),
    )
    found = check_plan(moved, profile)
    if found.errors:
        more = f" (and {len(found.errors) - 1} more)" if len(found.errors) > 1 else ""
        raise InputError(f"{path}: {found.errors[0]}{more}", hint="correct the table")
    if found.overflows:
        raise NothingFitsError(f"{path}: {found.overflows[0]}", hint="hold fewer micro-batches, or recompute a stage")
    return found.fresh, (*remarks, *found.remarks)


def _placement(ranks: tuple[int, ...], num_ranks: int, virtual: int) -> Placement:
    for placement in (Placement.LOOP, Placement.V):
        if (placement is Placement.LOOP or virtual == 2) and ranks == ranks_of(num_ranks, virtual, placement):
            return placement
    return Placement.FREE


def _moved(relative: str, holder: Path, goal: Path) -> str:
    """A path that counts from the folder of one file, as it counts from that of another."""
    if Path(relative).is_absolute() or holder.parent.resolve() == goal.parent.resolve():
        return relative
    return Path(os.path.relpath(holder.parent.resolve() / relative, goal.parent.resolve())).as_posix()
