"""The time model's front door: a job and a schedule in, a timeline out."""

from __future__ import annotations

from operator import sub

from planner.schedules.action import Schedule
from planner.simulate.closing import closings
from planner.simulate.job import Job
from planner.simulate.memory import levels as over_time
from planner.simulate.memory import passages, peaks
from planner.simulate.timeline import Level, Passage, RankUse, Timeline
from planner.simulate.walk import Walk


def simulate(job: Job | Walk, schedule: Schedule, *, memory: bool = True, levels: bool = True) -> Timeline:
    """One iteration of a job under a schedule that check_schedule finds nothing wrong with.

    A Walk is a job made ready once for many schedules. Without ``memory`` there are no messages and no levels in the
    timeline, and it is made several times faster; without ``levels`` there are only the ranks' peaks. Raises InputError
    where the schedule waits for ever.
    """
    walk = job if isinstance(job, Walk) else Walk(job)
    job = walk.job
    walked = walk.run(schedule)
    after = closings(job, schedule, walked.ends_s)
    makespan = max((ended[-1] for ended in walked.ends_s if ended), default=0.0)
    iteration = max([makespan, *(closing.end_s for closing in after)])
    busy = [sum(map(sub, ended, begun)) for begun, ended in zip(walked.starts_s, walked.ends_s, strict=True)]
    messages: tuple[Passage, ...] = ()
    held: tuple[tuple[Level, ...], ...] = ()
    most = [0] * job.num_ranks
    if memory and levels:
        messages = passages(walk, schedule, walked)
        held = over_time(job, schedule, walked, messages, iteration)
        most = [max(level.bytes for level in own) for own in held]
    elif memory:
        most = peaks(walk, schedule, walked, iteration)
    return Timeline(
        schedule=schedule,
        starts_s=walked.starts_s,
        ends_s=walked.ends_s,
        makespan_s=makespan,
        iteration_s=iteration,
        bubble_fraction=1 - sum(busy) / (job.num_ranks * makespan) if makespan else 0.0,
        ranks=tuple(RankUse(rank, busy[rank], most[rank]) for rank in range(job.num_ranks)),
        closings=after,
        messages=messages,
        memory=held,
    )
