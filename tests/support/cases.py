"""Where real files of other systems lie, if they do on this machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def case(name: str) -> Path:
    """A real file, by its path in the folder of cases; the test is skipped where it is not there."""
    beside = Path(__file__).resolve().parents[2].parent / "shared" / "cases"
    path = Path(os.environ.get("PIPEPLAN_CASES", beside)) / name
    if not path.exists():
        pytest.skip(f"{path} is not there; PIPEPLAN_CASES names the folder of cases")
    return path
