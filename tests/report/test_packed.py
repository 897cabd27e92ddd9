"""Packed columns, unpacked by the definition."""

from __future__ import annotations

import base64
import zlib

from hypothesis import given
from hypothesis import strategies as st

from planner.report.packed import packed

columns = st.dictionaries(st.sampled_from("abcd"), st.lists(st.integers(-(2**31), 2**31 - 1), max_size=50))


@given(columns)
def test_every_column_comes_back(given_columns: dict[str, list[int]]) -> None:
    document = packed(given_columns)
    planes = zlib.decompress(base64.b64decode(document["data"]))
    count = len(planes) // 4
    numbers = [int.from_bytes(planes[place::count], "little") for place in range(count)]
    found, place = {}, 0
    for name, length in document["columns"]:
        value, found[name] = 0, []
        for number in numbers[place : place + length]:
            value = (value + number) % 2**32
            found[name].append(value - 2**32 if value >= 2**31 else value)
        place += length
    assert found == given_columns
    assert place == count
