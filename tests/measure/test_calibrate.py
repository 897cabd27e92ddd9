"""Layers add up to the runs that were timed, whatever entering a stage costs."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.measure.calibrate import Run, calibrate, entry_seconds, errors

COSTS = st.lists(st.floats(1e-4, 1e-1), min_size=4, max_size=40)


def _runs(costs: list[float], entry: float, pieces: int) -> list[Run]:
    bounds = sorted({round(piece * len(costs) / pieces) for piece in range(pieces + 1)})
    return [Run(first, last, sum(costs[first:last]) + entry) for first, last in pairwise(bounds)]


@given(COSTS, st.floats(0, 1e-3), st.floats(0, 1e-6))
def test_the_entry_cost_is_found(costs: list[float], entry: float, rest: float) -> None:
    alone = [cost + entry for cost in costs]
    runs = [run for pieces in (1, 2) for run in _runs(costs, entry, pieces)]
    assert entry_seconds(alone, runs) == pytest.approx(entry, abs=1e-9)


@given(COSTS, st.floats(0, 1e-3))
def test_layers_add_up_to_the_whole(costs: list[float], entry: float) -> None:
    alone = [cost + entry for cost in costs]
    runs = [run for pieces in (1, 2, 4) for run in _runs(costs, 0.0, pieces)]
    figures = calibrate(alone, runs)
    assert max(map(abs, errors(figures, runs))) < 0.02
    assert min(figures) > 0


@given(COSTS, st.floats(0.5, 2.0))
def test_where_nothing_but_scale_differs_scale_is_found(costs: list[float], scale: float) -> None:
    runs = [Run(0, len(costs), scale * sum(costs))]
    figures = calibrate(costs, runs)
    assert sum(figures) == pytest.approx(scale * sum(costs), rel=1e-6)


def test_of_all_figures_that_add_up_the_nearest_are_taken() -> None:
    """Two layers of 1 s and 3 s whose run took 2 s: no entry cost can explain it, so half of each."""
    figures = calibrate([1.0, 3.0], [Run(0, 1, 0.5), Run(1, 2, 1.5), Run(0, 2, 2.0)])
    assert figures == pytest.approx((0.5, 1.5), rel=1e-3)


def test_an_action_that_takes_no_time_stays_so() -> None:
    assert calibrate([0.0, 0.0], [Run(0, 2, 0.0)]) == (0.0, 0.0)
    assert errors([0.0, 0.0], [Run(0, 2, 0.0)]) == ()
