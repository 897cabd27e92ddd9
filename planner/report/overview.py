"""What there is to show of a plan: what its file says, and what follows from that and the profile."""

from __future__ import annotations

from planner.cluster import memory_limit
from planner.errors import InputError
from planner.graph import LayerGraph
from planner.plan import Plan, Predicted, job_of, predicted_of, schedule_of
from planner.plan.check import bound_that_holds, check_tensor_sizes
from planner.profile import Profile
from planner.record import record
from planner.report.bubble import Bubble, bubble_of
from planner.schedules import Wiring, check_schedule
from planner.simulate import Job, Timeline, simulate


@record
class Overview:
    """A plan, simulated. ``bound_s`` and ``gap`` of ``predicted`` stand only where they still hold."""

    plan: Plan
    profile: Profile
    graph: LayerGraph
    job: Job
    timeline: Timeline
    predicted: Predicted
    bubble: Bubble

    @property
    def limit_bytes(self) -> int | None:
        """What a rank may hold; None: unlimited."""
        return memory_limit(self.job.cluster)

    @property
    def fullest(self) -> int:
        """The rank that holds most."""
        return max(self.timeline.ranks, key=lambda use: use.peak_memory_bytes).rank

    @property
    def fits(self) -> bool:
        """Whether every rank's peak is within the limit."""
        limit = self.limit_bytes
        return limit is None or all(use.peak_memory_bytes <= limit for use in self.timeline.ranks)

    @property
    def proven(self) -> bool:
        """Whether nothing asked for is faster, and the proof is of this very plan as its file stands."""
        search = self.plan.search
        return bool(search and search.proven and self.predicted.bound_s is not None)


def overview_of(plan: Plan, profile: Profile) -> Overview:
    """Simulate a plan: stages, sends and returns as they stand. Raises InputError where its schedule cannot run."""
    check_tensor_sizes(plan, profile)
    job, schedule = job_of(plan, profile), schedule_of(plan)
    found = check_schedule(schedule, num_microbatches=job.num_microbatches, wiring=Wiring.of(job.stages))
    if found.errors:
        more = f" (and {len(found.errors) - 1} more)" if len(found.errors) > 1 else ""
        raise InputError(f"{found.errors[0]}{more}", hint="correct its actions or its warmup")
    timeline = simulate(job, schedule)
    bound_s = bound_that_holds(plan, job.cluster)
    return Overview(
        plan=plan,
        profile=profile,
        graph=LayerGraph.of(profile),
        job=job,
        timeline=timeline,
        predicted=predicted_of(timeline, global_batch=plan.batch.global_batch, bound_s=bound_s),
        bubble=bubble_of(job, timeline),
    )
