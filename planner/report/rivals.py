"""The plans that lost: the search's own runners-up, as far as the plan's file keeps them and they are still true, and
what can be made again from it and the profile: the same cut under other schedules, and what people do by hand."""

from __future__ import annotations

from collections.abc import Iterator

from planner.cluster import memory_limit
from planner.errors import InputError
from planner.record import record
from planner.report.overview import Overview
from planner.schedules import Placement, ScheduleName, Wiring, build, check_schedule
from planner.search.baselines import baselines
from planner.search.space import Asked
from planner.simulate import Walk, simulate


@record
class Rival:
    """Another plan for the same model, batch and cluster, under the same time model."""

    name: str
    gpus: int
    microbatch_size: int
    num_microbatches: int
    iteration_s: float
    bubble_fraction: float
    peak_memory_bytes: int
    fits: bool


def rivals_of(shown: Overview) -> tuple[Rival, ...]:
    """Fastest first, those that do not fit last."""
    found = [*_searched(shown), *_other_schedules(shown), *_by_hand(shown)]
    return tuple(sorted(found, key=lambda rival: (not rival.fits, rival.iteration_s, rival.name)))


def _searched(shown: Overview) -> Iterator[Rival]:
    """The best plans of other configurations; they fitted the memory of what was asked for, or were no plans."""
    search = shown.plan.search
    if search is None or shown.predicted.bound_s is None:
        return
    for plan in search.lost or ():
        yield Rival(
            name=f"search: {plan.name}",
            gpus=plan.gpus,
            microbatch_size=plan.microbatch,
            num_microbatches=plan.microbatches,
            iteration_s=plan.iteration_s,
            bubble_fraction=plan.bubble_fraction,
            peak_memory_bytes=plan.peak_memory_bytes,
            fits=True,
        )


def _other_schedules(shown: Overview) -> Iterator[Rival]:
    plan, job = shown.plan, shown.job
    if plan.schedule.placement is Placement.FREE:
        return
    walk, limit = Walk(job), memory_limit(job.cluster)
    several = (ScheduleName.INTERLEAVED, ScheduleName.LOOPED_BFS)  # made for several stages a rank
    for name in ScheduleName:
        if name in several and plan.parallel.virtual == 1:
            continue
        depths = plan.schedule.warmup if name is plan.schedule.name else None
        if name is plan.schedule.name and depths is None:
            continue
        try:
            schedule = build(
                name,
                num_ranks=job.num_ranks,
                virtual=plan.parallel.virtual,
                num_microbatches=job.num_microbatches,
                placement=plan.schedule.placement,
            )
        except InputError:
            continue
        if schedule == shown.timeline.schedule:
            continue
        if check_schedule(schedule, num_microbatches=job.num_microbatches, wiring=Wiring.of(job.stages)).errors:
            continue
        timeline = simulate(walk, schedule, levels=False)
        peak = max(use.peak_memory_bytes for use in timeline.ranks)
        yield Rival(
            name=f"same cut, {name.value}{' at its default warm-up' if depths else ''}",
            gpus=plan.parallel.gpus,
            microbatch_size=plan.batch.microbatch,
            num_microbatches=plan.batch.microbatches,
            iteration_s=timeline.iteration_s,
            bubble_fraction=timeline.bubble_fraction,
            peak_memory_bytes=peak,
            fits=limit is None or peak <= limit,
        )


def _by_hand(shown: Overview) -> Iterator[Rival]:
    plan = shown.plan
    asked = Asked(
        gpus=(plan.search and plan.search.gpus) or plan.parallel.gpus,
        global_batch=plan.batch.global_batch,
        cluster=shown.job.cluster,
        schedules=(ScheduleName.ONE_F_ONE_B,),
    )
    sizes = sorted({size for size, tensor in shown.graph.rows() if tensor == 1})
    for baseline in baselines(shown.graph, asked, sizes):
        candidate = baseline.candidate
        if candidate is not None:
            yield Rival(
                name=f"by hand: {baseline.name}",
                gpus=candidate.configuration.gpus,
                microbatch_size=candidate.configuration.microbatch_size,
                num_microbatches=candidate.configuration.num_microbatches,
                iteration_s=candidate.iteration_s,
                bubble_fraction=candidate.timeline.bubble_fraction,
                peak_memory_bytes=candidate.peak_memory_bytes,
                fits=baseline.fits,
            )
