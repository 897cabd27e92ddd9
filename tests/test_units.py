"""Readable quantities."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.errors import InputError
from planner.units import format_bytes, format_rate, format_seconds, parse_bytes


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("80GiB", 80 * 2**30),
        ("80 gib", 80 * 2**30),
        ("80G", 80 * 2**30),
        ("512MB", 512_000_000),
        ("1.5k", 1536),
        ("1e9", 10**9),
        ("7", 7),
        ("7B", 7),
        ("2TiB", 2**41),
    ],
)
def test_amounts_of_memory_are_read(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1 apple", "1.2.3", "nan", "inf", "1e999", "0x10"])
def test_what_is_no_amount_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="is no amount of memory"):
        parse_bytes(text)


@given(st.integers(0, 2**60))
def test_what_is_shown_is_near_what_is(count: int) -> None:
    shown = parse_bytes(format_bytes(count).replace(" ", ""))
    assert shown == pytest.approx(count, rel=0.006)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (1e-9, "1 ns"), (0.0123, "12.3 ms"), (1.5, "1.50 s"), (150, "2 min 30 s"), (-0.002, "-2 ms")],
)
def test_seconds_are_shown(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("per_second", "text"),
    [(0.4534, "0.453"), (18.6, "18.6"), (999.6, "1,000"), (1864.2, "1,864"), (1.86e6, "1,860,000")],
)
def test_rates_are_written_out(per_second: float, text: str) -> None:
    assert format_rate(per_second) == text
