"""Long columns of whole numbers, small enough to stand in a page.

columns ─differences─▶ 32-bit numbers ─by byte: all lowest, then all next ...─▶ deflate ─▶ base64

Differences of a schedule repeat, and so do the upper bytes of small numbers: both pack well.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


def packed(columns: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """Columns of numbers within ±2³¹, as ``page/data.js`` reads them: ``{columns: [[name, length]], data}``."""
    parts = [np.diff(np.asarray(column, dtype=np.int64), prepend=0) for column in columns.values()]
    numbers = np.concatenate([np.zeros(0, dtype=np.int64), *parts]).astype("<i4")
    planes = numbers.view(np.uint8).reshape(-1, 4).T.tobytes()
    return {
        "columns": [[name, len(column)] for name, column in columns.items()],
        "data": base64.b64encode(zlib.compress(planes, 9)).decode("ascii"),
    }
