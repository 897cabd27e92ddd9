"""The search: the best plan there is, and the proof of how close to the best it is (the only part that solves ILPs)."""

from planner.search.choose import Progress, solve
from planner.search.result import Baseline, Candidate, Found
from planner.search.space import EVERY, Asked, Configuration

__all__ = ["EVERY", "Asked", "Baseline", "Candidate", "Configuration", "Found", "Progress", "solve"]
