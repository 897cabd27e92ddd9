"""Where rows of layers are cut to be timed."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from planner.measure.timing import even_bounds


@given(st.lists(st.floats(0, 10), min_size=1, max_size=60), st.integers(1, 8))
def test_every_layer_is_in_one_run(load: list[float], pieces: int) -> None:
    bounds = even_bounds(load, pieces)
    assert bounds[0] == 0
    assert bounds[-1] == len(load)
    assert all(first < last for first, last in pairwise(bounds))
    assert len(bounds) <= pieces + 1


@given(st.integers(1, 8), st.integers(1, 8))
def test_equal_layers_make_equal_runs(pieces: int, each: int) -> None:
    assert even_bounds([1.0] * (pieces * each), pieces) == [each * piece for piece in range(pieces + 1)]


@given(st.lists(st.floats(0.1, 10), min_size=8, max_size=60), st.integers(2, 5))
def test_no_run_is_over_its_share_by_more_than_a_layer(load: list[float], pieces: int) -> None:
    bounds = even_bounds(load, pieces)
    share = sum(load) / pieces
    assert all(sum(load[first:last]) <= share + max(load) + 1e-9 for first, last in pairwise(bounds))
