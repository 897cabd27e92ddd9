"""The check of a plan that a person may have edited: the rules it must keep, and the figures that follow from it.

plan.yaml ─▶ what a person says ─profile─▶ stages ─schedule─▶ actions ─time model─▶ predicted
             (cut, recompute, batch,         │                  │                      │
              schedule, cluster)        rules of a cut    complete, no deadlock   fits? as in the file?
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from planner.cluster import Cluster, memory_limit, resolve
from planner.errors import InputError
from planner.files import sha256_of
from planner.graph import LayerGraph, Stage, derive_stages
from planner.plan.job import asked_of, job_of, predicted_of, schedule_of
from planner.plan.plan import Plan, Predicted
from planner.profile import Profile, read_profile
from planner.profile.tensor_sizes import why_missing
from planner.record import record
from planner.schedules import Wiring, check_schedule
from planner.simulate import Timeline, simulate
from planner.units import format_bytes

_SAME = 1e-9


@record
class PlanCheck:
    """What a check found; ``fresh`` is the plan with every derived figure as it follows now.

    ``errors``: rules that are broken (``fresh`` is then the plan as it was). ``overflows``: ranks that do not fit.
    ``stale``: figures in the file that no longer follow. ``remarks``: what is worth knowing all the same.
    """

    fresh: Plan
    errors: tuple[str, ...] = ()
    overflows: tuple[str, ...] = ()
    stale: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()


def profile_of(plan: Plan, path: Path) -> Profile:
    """The profile that a plan file names. Raises InputError where it is missing, or is another than the plan's."""
    profile_path = path.parent / plan.profile.path
    if not profile_path.is_file():
        raise InputError(
            f"{path}: its profile is not there: profile.path names {plan.profile.path}, which is {profile_path}",
            hint="correct profile.path (from the plan's folder), or move plan and profile together",
        )
    mend = "put the plan's own profile back, or solve again with this one"
    if sha256_of(profile_path) != plan.profile.sha256:
        raise InputError(f"{profile_path}: is not the profile that {path} was made from (other sha256)", hint=mend)
    profile = read_profile(profile_path)
    if profile.model.fingerprint != plan.model.fingerprint:
        raise InputError(f"{path}: model.fingerprint is not that of the model in {profile_path}", hint=mend)
    return profile


def stale_stages(plan: Plan, profile: Profile) -> tuple[str, ...]:
    """The figures of each stage that no longer follow from its layers and the profile.

    Raises InputError where the cut or the sizes break a rule.
    """
    return tuple(_stale_stages(plan.stages, _derived(plan, profile, resolve(plan.cluster, profile))))


def _derived(plan: Plan, profile: Profile, cluster: Cluster) -> tuple[Stage, ...]:
    check_tensor_sizes(plan, profile)
    return derive_stages(
        LayerGraph.of(profile),
        [stage.layers for stage in plan.stages],
        ranks=[stage.rank for stage in plan.stages],
        recompute=[stage.recompute for stage in plan.stages],
        microbatch_size=plan.batch.microbatch,
        tensor=plan.parallel.tensor,
        cluster=cluster,
    )


def check_tensor_sizes(plan: Plan, profile: Profile) -> None:
    """Raises InputError where the profile does not tell what a plan's tensor ranks cost."""
    sizes = plan.parallel
    if (missing := why_missing(profile, sizes.tensor)) is not None:
        fault, mend = missing
        raise InputError(f"parallel.tensor: is {sizes.tensor}, but {fault}", hint=mend)
    if sizes.tensor > 1 and bool(sizes.sequence) != bool(profile.sequence_parallel):
        said, how = ("not true", "with") if profile.sequence_parallel else ("true", "without")
        raise InputError(
            f"parallel.sequence: is {said}, but the profile was measured {how} sequence parallel",
            hint="set it as the profile is, or profile the model anew and solve",
        )


def check_plan(plan: Plan, profile: Profile) -> PlanCheck:
    """Check a plan against its profile, and derive all that follows from the two.

    Raises InputError where the cut, the sizes or the schedule break a rule before there are actions to look at.
    """
    cluster = resolve(plan.cluster, profile)
    stages = _derived(plan, profile, cluster)
    fresh = dataclasses.replace(plan, stages=stages)
    schedule = schedule_of(plan)
    found = check_schedule(schedule, num_microbatches=plan.batch.microbatches, wiring=Wiring.of(stages))
    if found.errors:
        return PlanCheck(fresh=plan, errors=found.errors, remarks=found.remarks)
    timeline = simulate(job_of(fresh, profile), schedule)
    predicted = predicted_of(
        timeline,
        global_batch=plan.batch.global_batch,
        bound_s=bound_that_holds(plan, cluster),
    )
    stale = [*_stale_stages(plan.stages, stages), *_stale_prediction(plan.predicted, predicted)]
    search = plan.search
    if search is not None and search.proven and (stale or predicted.bound_s is None):
        search = dataclasses.replace(search, proven=False)
        stale.append("search: proven (it was another plan that was proven)")
    if search is not None and search.lost and predicted.bound_s is None:
        search = dataclasses.replace(search, lost=None)
        stale.append("search: lost (those plans are for another batch, cluster or profile)")
    return PlanCheck(
        fresh=dataclasses.replace(fresh, predicted=predicted, search=search),
        overflows=tuple(_overflows(timeline, cluster)),
        stale=tuple(stale),
        remarks=(*found.remarks, *_remarks(predicted)),
    )


def bound_that_holds(plan: Plan, cluster: Cluster) -> float | None:
    """The plan's bound, if its global batch, cluster and profile are still those that it was proven for."""
    if plan.search is None or plan.predicted is None:
        return None
    asked = asked_of(
        global_batch=plan.batch.global_batch,
        cluster=cluster,
        profile_sha256=plan.profile.sha256,
        zero1=bool(plan.parallel.zero1),
    )
    return plan.predicted.bound_s if plan.search.asked == asked else None


def _stale_stages(said: tuple[Stage, ...], derived: tuple[Stage, ...]) -> Iterator[str]:
    for index, (old, new) in enumerate(zip(said, derived, strict=True)):
        names = [
            field.name
            for field in dataclasses.fields(Stage)
            if field.name != "layers" and not _same(getattr(old, field.name), getattr(new, field.name))
        ]
        if names:
            yield f"stages[{index}]: {', '.join(names)}"


def _stale_prediction(said: Predicted | None, derived: Predicted) -> Iterator[str]:
    if said is None:
        return
    names = [
        field.name
        for field in dataclasses.fields(Predicted)
        if not _same(getattr(said, field.name), getattr(derived, field.name))
    ]
    if names:
        yield f"predicted: {', '.join(names)}"


def _same(old: Any, new: Any) -> bool:
    """Whether two figures, or records of figures, agree; floats to rounding."""
    if isinstance(old, float) and isinstance(new, float):
        return math.isclose(old, new, rel_tol=_SAME, abs_tol=1e-15)
    if isinstance(old, tuple) and isinstance(new, tuple):
        return len(old) == len(new) and all(map(_same, old, new))
    if dataclasses.is_dataclass(old) and type(old) is type(new):
        return all(_same(getattr(old, field.name), getattr(new, field.name)) for field in dataclasses.fields(old))
    return bool(old == new)


def _overflows(timeline: Timeline, cluster: Cluster) -> Iterator[str]:
    limit = memory_limit(cluster)
    if limit is None:
        return
    for use in timeline.ranks:
        position = timeline.first_over(use.rank, limit)
        if position is not None:
            over = use.peak_memory_bytes - limit
            action = timeline.schedule[use.rank][position]
            yield (
                f"rank {use.rank} needs {format_bytes(use.peak_memory_bytes)}, {format_bytes(over)} ({over} bytes) "
                f"more than the {format_bytes(limit)} that a rank may use, first at position {position}: {action}"
            )


def _remarks(predicted: Predicted) -> Iterator[str]:
    if predicted.gap is not None and predicted.gap < -_SAME:
        yield (
            "predicted: faster than bound_s, which was proven for the choices that were asked for, and these are others"
        )
