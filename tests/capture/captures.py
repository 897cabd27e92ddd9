"""Captures that several tests look at, each made once a session."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from planner.capture import Capture, capture, load_model_file

DEFAULTS = {"microbatch_size": 2, "granularity": "block", "weightless": False, "seed": 0}


def captured_at(path: Path, **settings: Any) -> Capture:
    """The capture of a model file at micro-batch size 2, or as ``settings`` say; its module is the caller's own."""
    found = _captured(path, path.read_text(), tuple(sorted((DEFAULTS | settings).items())))
    return found if settings.get("weightless") else replace(found, module=copy.deepcopy(found.module))


@cache
def _captured(path: Path, text: str, settings: tuple[tuple[str, Any], ...]) -> Capture:
    return capture(load_model_file(path), **dict(settings))
