"""Readable quantities: what people type and what they are shown. Files and code hold seconds and bytes alone."""

from __future__ import annotations

import re

from planner.errors import InputError

_BYTE_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGTP", start=1):
    _BYTE_UNITS[f"{_letter}iB"] = 1024**_power
    _BYTE_UNITS[f"{_letter}B"] = 1000**_power
    _BYTE_UNITS[_letter] = 1024**_power
_BYTE_UNITS_FOLDED = {name.lower(): factor for name, factor in _BYTE_UNITS.items()}
_QUANTITY = re.compile(r"\s*(\d+(?:\.\d*)?(?:e[+-]?\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """The number of bytes that e.g. ``80GiB``, ``512 MB`` or ``1e9`` says (a bare G counts as GiB).

    Raises InputError where it says none.
    """
    match = _QUANTITY.fullmatch(text)
    factor = _BYTE_UNITS_FOLDED.get(match.group(2).lower()) if match else None
    count = float(match.group(1)) * factor if match and factor else float("inf")
    if count >= 2**63:
        raise InputError(f"{text!r} is no amount of memory", hint="write e.g. 80GiB, 512MB or 1e9")
    return int(count)


def format_bytes(count: float) -> str:
    """E.g. ``1.5 GiB``; three significant digits."""
    sign = "-" if count < 0 else ""
    value = abs(float(count))
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1000 or unit == "TiB":
            break
        value /= 1024
    return f"{sign}{_three_digits(value)} {unit}"


def format_seconds(seconds: float) -> str:
    """E.g. ``12.3 ms``; three significant digits."""
    sign = "-" if seconds < 0 else ""
    value = abs(float(seconds))
    if value >= 120:
        minutes, rest = divmod(value, 60)
        return f"{sign}{int(minutes)} min {rest:.0f} s"
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6), ("ns", 1e9)):
        if value * factor >= 1 or unit == "ns":
            return f"{sign}{_three_digits(value * factor)} {unit}" if value else "0 s"
    raise AssertionError(seconds)


def _three_digits(value: float) -> str:
    if value == int(value) and value < 1000:
        return str(int(value))
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def format_rate(per_second: float) -> str:
    """E.g. ``1,860`` or ``0.453``: so many a second, written out; three significant digits below a thousand."""
    return f"{per_second:,.0f}" if per_second >= 999.5 else f"{per_second:.3g}"
