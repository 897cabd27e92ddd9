"""The link between two processes: the line through the points, and the measuring itself."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.runtime.links import SIZES, fit, measure_links
from planner.runtime.sums import fitted, measure_links_and_sums, measure_sums


@given(st.floats(1e-6, 1e-2), st.floats(1e7, 1e11))
def test_a_line_is_found_again(latency_s: float, bandwidth: float) -> None:
    found_latency, found_seconds = fit(list(SIZES), [latency_s + size / bandwidth for size in SIZES])
    assert found_latency == pytest.approx(latency_s, rel=1e-6)
    assert found_seconds == pytest.approx(1 / bandwidth, rel=1e-6)


@given(st.floats(1e7, 1e11))
def test_a_latency_is_never_negative(bandwidth: float) -> None:
    seconds = [size / bandwidth * (0.5 + 0.5 * size / max(SIZES)) for size in SIZES]
    latency, seconds_per_byte = fit(list(SIZES), seconds)
    assert latency >= 0
    assert seconds_per_byte > 0


@given(st.sampled_from([2, 4, 8]), st.floats(1e-6, 1e-2), st.floats(1e7, 1e11))
def test_sums_are_fitted_by_the_formula_of_a_ring(ranks: int, latency_s: float, bandwidth: float) -> None:
    found = fitted(ranks, [2 * (ranks - 1) * (latency_s + size / ranks / bandwidth) for size in SIZES])
    assert found.latency_s == pytest.approx(latency_s, rel=1e-6)
    assert found.bandwidth_bytes_per_s == pytest.approx(bandwidth, rel=1e-6)


@pytest.mark.slow
def test_sums_over_two_processes_on_this_machine() -> None:
    """Four ranks on few cores are counted as two: what they take there is the cores' doing."""
    assert measure_sums("cpu", (1,)) is None
    found = measure_sums("cpu", (1, 2))
    assert found is not None
    assert found.latency_s > 0
    assert 10_000_000 / found.bandwidth_bytes_per_s > 3 * found.latency_s
    links = measure_links_and_sums("cpu", tensor_sizes=(1,))
    assert links is not None
    assert links.sums is None


def test_two_processes_on_this_machine() -> None:
    links = measure_links("cpu")
    assert links is not None
    assert links.latency_s > 0
    # over a loopback a message of 10 MB is moved, not waited for
    assert 10_000_000 / links.bandwidth_bytes_per_s > 3 * links.latency_s
