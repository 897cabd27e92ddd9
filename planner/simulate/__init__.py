"""The time model: actions and costs -> timeline and memory."""

from planner.simulate.job import Job, Tie
from planner.simulate.model import simulate
from planner.simulate.timeline import Closing, ClosingKind, Level, Passage, RankUse, Span, Timeline
from planner.simulate.walk import Walk

__all__ = [
    "Closing",
    "ClosingKind",
    "Job",
    "Level",
    "Passage",
    "RankUse",
    "Span",
    "Tie",
    "Timeline",
    "Walk",
    "simulate",
]
