"""Random graphs of stages under random schedules, with what passes between the stages."""

from __future__ import annotations

from typing import NamedTuple

from hypothesis import strategies as st

from planner.runtime.messages import Routes, routes
from planner.schedules import Placement, Schedule, ScheduleName, build, ranks_of


class Boundary(NamedTuple):
    name: str
    producer: int
    readers: tuple[int, ...]
    grad_readers: tuple[int, ...]


class Case(NamedTuple):
    schedule: Schedule
    routes: Routes
    boundaries: tuple[tuple[Boundary, ...], ...]
    num_microbatches: int


SHAPES = [
    (ScheduleName.GPIPE, 1, Placement.LOOP),
    (ScheduleName.ONE_F_ONE_B, 1, Placement.LOOP),
    (ScheduleName.ZB_H1, 1, Placement.LOOP),
    (ScheduleName.INTERLEAVED, 2, Placement.LOOP),
    (ScheduleName.ZB_H1, 2, Placement.LOOP),
    (ScheduleName.ZB_V, 2, Placement.V),
    (ScheduleName.DUALPIPE_V, 2, Placement.V),
]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A random DAG of stages under a random schedule; some parameters are used by several stages."""
    name, virtual, placement = draw(st.sampled_from(SHAPES))
    num_ranks = draw(st.integers(1, 4))
    num_microbatches = draw(st.integers(2 * num_ranks if name is ScheduleName.DUALPIPE_V else 1, 9))
    ranks = ranks_of(num_ranks, virtual, placement)
    num_stages = len(ranks)
    rows: list[tuple[Boundary, ...]] = []
    for stage in range(num_stages):
        later = list(range(stage + 1, num_stages))
        row = []
        for number in range(draw(st.integers(0, 3)) if later else 0):
            readers = sorted(draw(st.sets(st.sampled_from(later), min_size=1)))
            grad = [reader for reader in readers if draw(st.booleans())]
            row.append(Boundary(f"x{stage}.{number}", stage, tuple(readers), tuple(grad)))
        if later:  # the chain that every model has
            row.append(Boundary(f"h{stage}", stage, (stage + 1,), (stage + 1,)))
        rows.append(tuple(row))
    parameters = [sorted(draw(st.sets(st.sampled_from("abc")))) for _ in range(num_stages)]
    found = routes(rows, ranks, parameters=parameters, trainable=lambda parameter: parameter != "c")
    schedule = build(name, num_ranks=num_ranks, virtual=virtual, num_microbatches=num_microbatches, placement=placement)
    return Case(schedule, found, tuple(rows), num_microbatches)
