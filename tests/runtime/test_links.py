"""The link between two processes: the line through the points, and the measuring itself."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.runtime.links import SIZES, fit, measure_links


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


def test_two_processes_on_this_machine() -> None:
    links = measure_links("cpu")
    assert links is not None
    assert links.latency_s > 0
    # over a loopback a message of 10 MB is moved, not waited for
    assert 10_000_000 / links.bandwidth_bytes_per_s > 3 * links.latency_s
