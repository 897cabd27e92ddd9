"""The check of any table of actions: complete, placed, in order, free of deadlock.

Free of deadlock is meant with receives posted ahead and sends that do not wait for their receivers, as the runtime
does it (planner.schedules.communication): a table then runs to its end exactly if the ranks' orders and the stages'
dependencies have no cycle together.
"""

from __future__ import annotations

from collections.abc import Iterator

from planner.record import record
from planner.schedules.action import Action, Letter, Schedule
from planner.schedules.communication import blocks_under_rendezvous
from planner.schedules.wiring import Wiring


@record
class ScheduleCheck:
    """``errors``: why the table cannot run, or trains something else; ``remarks``: what is worth knowing anyway."""

    errors: tuple[str, ...]
    remarks: tuple[str, ...]


def check_schedule(schedule: Schedule, *, num_microbatches: int, wiring: Wiring) -> ScheduleCheck:
    """Check a table against the stages' wiring; each error names rank, position (from 0) and action."""
    errors = list(_table_faults(schedule, num_microbatches, wiring))
    if not errors:
        errors = list(_deadlock(schedule, wiring))
    if errors:
        return ScheduleCheck(errors=tuple(errors), remarks=())
    return ScheduleCheck(errors=(), remarks=tuple(_remarks(schedule, wiring)))


def _table_faults(schedule: Schedule, num_microbatches: int, wiring: Wiring) -> Iterator[str]:
    num_ranks, num_stages = max(wiring.ranks) + 1, len(wiring.ranks)
    if len(schedule) != num_ranks:
        yield f"the table has {len(schedule)} rows for {num_ranks} ranks"
        return
    seen: dict[Action, str] = {}
    for rank, order in enumerate(schedule):
        for position, action in enumerate(order):
            place = f"rank {rank} position {position}: {action}"
            stage, _, m = action
            if stage >= num_stages:
                yield f"{place}: there are only stages 0..{num_stages - 1}"
            elif wiring.ranks[stage] != rank:
                yield f"{place}: stage {stage} lies on rank {wiring.ranks[stage]}"
            elif m >= num_microbatches:
                yield f"{place}: there are only micro-batches 0..{num_microbatches - 1}"
            elif action in seen:
                yield f"{place}: stands already at {seen[action]}"
            else:
                yield from _before(place, action, seen)
                seen[action] = f"position {position}"
    yield from _missing(seen, num_microbatches, wiring)


def _before(place: str, action: Action, seen: dict[Action, str]) -> Iterator[str]:
    """Whether what the action needs of its own stage stands before it, and B does not stand beside I or W."""
    stage, letter, m = action
    needs = {Letter.BACKWARD: "F", Letter.BACKWARD_INPUT: "F", Letter.BACKWARD_WEIGHT: "I"}.get(letter)
    clashes = {Letter.BACKWARD: "IW", Letter.BACKWARD_INPUT: "B", Letter.BACKWARD_WEIGHT: "B"}.get(letter, "")
    for other in map(Letter, clashes):
        if Action(stage, other, m) in seen:
            yield f"{place}: {stage}{other}{m} has done that already (B is I and W in one)"
            return
    if needs and Action(stage, Letter(needs), m) not in seen:
        yield f"{place}: must come after {stage}{needs}{m}, which does not stand before it"


def _missing(seen: dict[Action, str], num_microbatches: int, wiring: Wiring) -> Iterator[str]:
    for stage, rank in enumerate(wiring.ranks):
        for m in range(num_microbatches):
            has = {letter for letter in Letter if Action(stage, letter, m) in seen}
            split = bool(has & {Letter.BACKWARD_INPUT, Letter.BACKWARD_WEIGHT})
            wanted = [Letter.FORWARD]
            wanted += [Letter.BACKWARD_INPUT, Letter.BACKWARD_WEIGHT] if split else [Letter.BACKWARD]
            for letter in wanted:
                if letter not in has:
                    also = f" (or {stage}I{m} and {stage}W{m})" if letter is Letter.BACKWARD else ""
                    yield f"rank {rank}: {stage}{letter}{m} is missing{also}"


def _deadlock(schedule: Schedule, wiring: Wiring) -> Iterator[str]:
    """Walk the table as far as it runs; where it stops short, the ranks that wait for each other in a ring."""
    senders, returners, ranks = wiring.senders, wiring.returners, wiring.ranks
    at = [0] * len(schedule)
    forward_done, backward_done = set[tuple[int, int]](), set[tuple[int, int]]()

    def awaited(action: Action) -> int | None:
        stage, letter, m = action
        if letter is Letter.BACKWARD_WEIGHT:
            return None
        sources, done = (senders, forward_done) if letter is Letter.FORWARD else (returners, backward_done)
        return next((source for source in sources[stage] if (source, m) not in done), None)

    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(schedule):
            while at[rank] < len(order) and awaited(order[at[rank]]) is None:
                stage, letter, m = order[at[rank]]
                if letter is Letter.FORWARD:
                    forward_done.add((stage, m))
                elif letter is not Letter.BACKWARD_WEIGHT:
                    backward_done.add((stage, m))
                at[rank] += 1
                moved = True
    here = next((rank for rank, order in enumerate(schedule) if at[rank] < len(order)), None)
    if here is None:
        return
    path: list[int] = []
    while here not in path:
        path.append(here)
        waiting_for = awaited(schedule[here][at[here]])
        assert waiting_for is not None, "only a rank that waits for a stage stops"
        here = ranks[waiting_for]
    waits = []
    for stuck in path[path.index(here) :]:
        action = schedule[stuck][at[stuck]]
        letters = "F" if action.letter is Letter.FORWARD else "B or I"
        waits.append(
            f"rank {stuck} position {at[stuck]}: {action} waits for {letters} of micro-batch {action.microbatch} "
            f"of stage {awaited(action)}"
        )
    yield "deadlock: " + ", ".join(waits)


def out_of_order(schedule: Schedule) -> tuple[str, ...]:
    """For each rank the first B or W of a stage that stands after one of a later micro-batch, in words.

    One process adds gradients in the order of micro-batches; in another the sum is the same only to rounding.
    """
    return tuple(_out_of_order(schedule))


def _out_of_order(schedule: Schedule) -> Iterator[str]:
    for rank, order in enumerate(schedule):
        last: dict[int, int] = {}
        for position, (stage, letter, m) in enumerate(order):
            if letter not in (Letter.BACKWARD, Letter.BACKWARD_WEIGHT):
                continue
            if m < last.get(stage, -1):
                yield (
                    f"rank {rank} position {position}: {stage}{letter}{m} adds gradients after micro-batch "
                    f"{last[stage]}: equal to one process only to rounding"
                )
                break
            last[stage] = m


def _remarks(schedule: Schedule, wiring: Wiring) -> Iterator[str]:
    yield from out_of_order(schedule)
    blocked = blocks_under_rendezvous(schedule, wiring)
    if blocked:
        rank, action = blocked
        yield (
            f"rank {rank} position {schedule[rank].index(action)}: {action} would block if sends waited for their "
            "receivers (here they do not)"
        )
