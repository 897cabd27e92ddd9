"""The plan, its file format, and the check of a plan that a person edited."""

from planner.plan.file import read_plan, write_plan
from planner.plan.job import asked_of, job_of, predicted_of, schedule_of
from planner.plan.plan import (
    FORMAT,
    Batch,
    Parallel,
    Plan,
    PlannedModel,
    PlannedProfile,
    PlannedSchedule,
    Predicted,
    PredictedRank,
    Search,
)

__all__ = [
    "FORMAT",
    "Batch",
    "Parallel",
    "Plan",
    "PlannedModel",
    "PlannedProfile",
    "PlannedSchedule",
    "Predicted",
    "PredictedRank",
    "Search",
    "asked_of",
    "job_of",
    "predicted_of",
    "read_plan",
    "schedule_of",
    "write_plan",
]
