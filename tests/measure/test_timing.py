"""Where rows of layers are cut to be timed, and what becomes of the figures."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.measure.passes import SPLIT_FORWARD
from planner.measure.timing import LEAST_SPLIT, even_bounds, layer_seconds
from planner.schedules import Letter

seconds = st.floats(0.01, 10)
rows = st.tuples(seconds, seconds, seconds, seconds, seconds)
"""F, B, F before I, I, W of a layer."""


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


@given(st.lists(rows, min_size=1, max_size=12))
def test_halves_make_up_the_whole_and_what_splitting_costs_stands_apart(layers: list[tuple[float, ...]]) -> None:
    names = (Letter.FORWARD, Letter.BACKWARD, SPLIT_FORWARD, Letter.BACKWARD_INPUT, Letter.BACKWARD_WEIGHT)

    def figures(*letters: str) -> tuple[float, ...]:
        return tuple(sum(row[names.index(letter)] for letter in letters) for row in layers)

    made = layer_seconds(figures, [0.0] * len(layers))
    whole = split = 0.0
    for one, (forward, backward, before, by_input, by_weight) in zip(made, layers, strict=True):
        assert one.backward_input + one.backward_weight == pytest.approx(backward)
        assert one.backward_input * by_weight == pytest.approx(one.backward_weight * by_input)
        assert one.split >= 0
        assert not one.split or before + by_input + by_weight > forward + backward
        whole += forward + backward
        split += before + by_input + by_weight
    more = split - whole
    assert sum(one.split for one in made) == pytest.approx(more if more > LEAST_SPLIT * whole else 0.0)
