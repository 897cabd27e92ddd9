"""Times and bytes of layers, the optimizer and links on this machine -> profile (torch)."""

from __future__ import annotations

from planner.measure.compare import Difference, difference
from planner.measure.machine import chosen_device
from planner.measure.neighbours import default_neighbours
from planner.measure.profiler import Accuracy, LeftOut, Measured, measure_profile

__all__ = [
    "Accuracy",
    "Difference",
    "LeftOut",
    "Measured",
    "chosen_device",
    "default_neighbours",
    "difference",
    "measure_profile",
]
