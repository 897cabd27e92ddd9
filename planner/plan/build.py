"""From what a search found to the plan file's records."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from planner.files import sha256_of
from planner.plan.job import asked_of, predicted_of
from planner.plan.plan import Batch, LostPlan, Parallel, Plan, PlannedModel, PlannedProfile, PlannedSchedule, Search
from planner.schedules import Placement, ScheduleName, format_order
from planner.search import Candidate, Found

_MOST_LOST: Final = 10


def plan_of(found: Found, *, profile_path: Path, plan_path: Path) -> Plan:
    """The best plan found, as it is written to ``plan_path``: paths in it are relative to that file's folder."""
    digest = sha256_of(profile_path)
    asked = found.asked
    return candidate_plan(
        found,
        found.best,
        profile_path=profile_path,
        plan_path=plan_path,
        digest=digest,
        search=Search(
            gpus=asked.gpus,
            asked=asked_of(
                global_batch=asked.global_batch, cluster=asked.cluster, profile_sha256=digest, zero1=asked.zero1
            ),
            configurations=found.configurations,
            solved=found.solved,
            pruned=found.pruned,
            proven=found.proven,
            seconds=round(found.seconds, 3),
            lost=tuple(_lost(one) for one in found.alternatives if one is not found.best)[:_MOST_LOST],
        ),
    )


def _lost(candidate: Candidate) -> LostPlan:
    shape = candidate.configuration
    return LostPlan(
        name=name_of(candidate),
        gpus=shape.gpus,
        microbatch=shape.microbatch_size,
        microbatches=shape.num_microbatches,
        iteration_s=_six_digits(candidate.iteration_s),
        bubble_fraction=_six_digits(candidate.timeline.bubble_fraction),
        peak_memory_bytes=candidate.peak_memory_bytes,
    )


def _six_digits(figure: float) -> float:
    return float(f"{figure:.6g}")


def name_of(candidate: Candidate) -> str:
    """A plan in a few words: its sizes and its schedule."""
    shape = candidate.configuration
    sizes = {"P": shape.pipeline, "D": shape.data, "T": shape.tensor, "v": shape.virtual, "b": shape.microbatch_size}
    told = (f"{letter}={size}" for letter, size in sizes.items() if size > 1 or letter in "Pb")
    vee = candidate.schedule is ScheduleName.SYNTHESISED and shape.placement is Placement.V
    again = any(stage.recompute for stage in candidate.stages)
    return " ".join([*told, candidate.schedule.value]) + " in v" * vee + ", recompute" * again


def candidate_plan(
    found: Found, candidate: Candidate, *, profile_path: Path, plan_path: Path, digest: str, search: Search | None
) -> Plan:
    """Any candidate of a search as a plan."""
    profile, configuration = found.graph.profile, candidate.configuration
    return Plan(
        model=PlannedModel(
            name=profile.model.name,
            source=_relative(profile_path.parent / profile.model.source, plan_path),
            fingerprint=profile.model.fingerprint,
        ),
        profile=PlannedProfile(
            path=_relative(profile_path, plan_path),
            sha256=digest,
            provenance=profile.provenance,
            device=profile.device.name,
        ),
        cluster=found.asked.cluster,
        batch=Batch(
            global_batch=found.asked.global_batch,
            microbatch=configuration.microbatch_size,
            microbatches=configuration.num_microbatches,
        ),
        parallel=Parallel(
            gpus=configuration.gpus,
            pipeline=configuration.pipeline,
            virtual=configuration.virtual,
            data=configuration.data,
            tensor=configuration.tensor,
            sequence=True if profile.sequence_parallel and configuration.tensor > 1 else None,
            zero1=True if found.asked.zero1 else None,
        ),
        schedule=PlannedSchedule(name=candidate.schedule, placement=configuration.placement, warmup=candidate.warmup),
        stages=candidate.stages,
        actions=_actions(candidate),
        predicted=predicted_of(candidate.timeline, global_batch=found.asked.global_batch, bound_s=found.bound_s),
        search=search,
    )


def _actions(candidate: Candidate) -> tuple[str, ...] | None:
    """The orders of a synthesised schedule; named ones follow from their name."""
    if candidate.schedule is not ScheduleName.SYNTHESISED:
        return None
    return tuple(map(format_order, candidate.timeline.schedule))


def _relative(path: Path, plan_path: Path) -> str:
    return Path(os.path.relpath(path, plan_path.parent)).as_posix()
