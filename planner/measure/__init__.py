"""Times and bytes of layers, the optimizer and links on this machine -> profile (torch)."""

from __future__ import annotations

from planner.measure.compare import Difference, difference
from planner.measure.estimate import estimate_profile
from planner.measure.machine import chosen_device
from planner.measure.neighbours import default_neighbours
from planner.measure.profiler import LeftOut, Measured, measure_profile
from planner.measure.reuse import unchanged
from planner.measure.roofline import known_device
from planner.measure.settings import Asked

__all__ = [
    "Asked",
    "Difference",
    "LeftOut",
    "Measured",
    "chosen_device",
    "default_neighbours",
    "difference",
    "estimate_profile",
    "known_device",
    "measure_profile",
    "unchanged",
]
