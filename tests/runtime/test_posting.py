"""When receives are posted: their buffers are those that the time model counts, action by action."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from hypothesis import given
from hypothesis import strategies as st
from support.messages import Case, cases

from planner.cluster import Cluster, ClusterLinks, Link
from planner.graph.stage import Stage, Transfer
from planner.runtime.messages import RankProgram, rank_programs
from planner.runtime.posting import Forecast, posts
from planner.schedules import Letter
from planner.simulate import Job, Timeline, simulate
from planner.simulate.costs import durations

LINKS = (None, Link(latency_s=0.25, bandwidth_bytes_per_s=16.0), Link(latency_s=0.0, bandwidth_bytes_per_s=512.0))
BYTES = (8, 64, 100)
EIGHTHS = st.integers(1, 24).map(lambda count: count / 8)


def size_of(name: str) -> int:
    return BYTES[sum(map(ord, name)) % len(BYTES)]


def transfers(case: Case, stage: int, row: Sequence[tuple[int, str]], *, once: bool) -> tuple[Transfer, ...]:
    """Entries of a plan's sends (``once``: a rank gets a tensor once) or returns."""
    here, ranks = case.routes.ranks[stage], case.routes.ranks
    there: set[tuple[int, str]] = set()
    found: dict[int, int] = {}
    for to_stage, name in row:
        is_new = ranks[to_stage] != here and not (once and (ranks[to_stage], name) in there)
        there.add((ranks[to_stage], name))
        found[to_stage] = found.get(to_stage, 0) + (size_of(name) if is_new else 0)
    return tuple(Transfer(to_stage=to_stage, bytes=num_bytes) for to_stage, num_bytes in found.items())


@st.composite
def planned(draw: st.DrawFn) -> tuple[Case, Job]:
    """A case and its job: stages of random times, between which the case's tensors travel."""
    case = draw(cases())
    nothing = dict.fromkeys(("parameter_bytes", "trainable_bytes", "buffer_bytes", "input_bytes", "saved_bytes"), 0)
    nothing |= {"saved_for_weight_bytes": 0, "workspace_bytes": 0}
    link = draw(st.sampled_from(LINKS))
    return case, Job(
        stages=tuple(
            Stage(
                stage=stage,
                rank=rank,
                layers=(str(stage),),
                recompute=False,
                forward_s=draw(EIGHTHS),
                backward_input_s=draw(EIGHTHS),
                backward_weight_s=draw(EIGHTHS),
                sends=transfers(case, stage, case.routes.sends[stage], once=True),
                returns=transfers(case, stage, case.routes.returns[stage], once=False),
                **nothing,
            )
            for stage, rank in enumerate(case.routes.ranks)
        ),
        num_ranks=len(case.schedule),
        num_microbatches=case.num_microbatches,
        cluster=Cluster(links=ClusterLinks(intra_node=link, inter_node=link), overlap=draw(st.booleans())),
        gradient_bytes_per_trainable_byte=0.0,
        state_bytes_per_trainable_byte=0.0,
        step_s_per_trainable_byte=0.0,
    )


def forecast(job: Job, *, held_bytes: int = 0, buffered_bytes: int = sys.maxsize) -> Forecast:
    costs = [durations(stage) for stage in job.stages]
    seconds: dict[Letter, Callable[[int], float]] = {
        Letter.FORWARD: lambda stage: costs[stage].forward_s,
        Letter.BACKWARD: lambda stage: costs[stage].backward_s,
        Letter.BACKWARD_INPUT: lambda stage: costs[stage].backward_input_s,
        Letter.BACKWARD_WEIGHT: lambda stage: costs[stage].backward_weight_s,
    }
    links = job.cluster.links
    return Forecast(
        action_s=lambda action: seconds[action.letter](action.stage),
        message_bytes=size_of,
        link=lambda a, b: links.intra_node if links is not None else None,
        overlap=bool(job.cluster.overlap),
        buffered_bytes=buffered_bytes,
        held_bytes=[held_bytes] * job.num_ranks,
    )


def waiting(case: Case, programs: Sequence[RankProgram], plan: Forecast) -> list[list[int]]:
    """Per rank and action: bytes of the receives that are posted while it runs, and not for it or for one before."""
    found = []
    for program, row in zip(programs, posts([program.steps for program in programs], plan), strict=True):
        posted: dict[int, int] = {}
        taken = set()
        levels = []
        for step, early in zip(program.steps, row, strict=True):
            posted |= dict(early)
            for sender, number, _ in step.waits:
                posted[sender] = max(posted.get(sender, 0), number + 1)
                taken.add((sender, number))
            levels.append(
                sum(
                    size_of(program.inbox[sender][number].name)
                    for sender, count in posted.items()
                    for number in range(count)
                    if (sender, number) not in taken
                )
            )
        found.append(levels)
    return found


def foreseen(timeline: Timeline, come: Callable[[float, int], float]) -> list[list[int]]:
    """The same as the time model has it; ``come``: from when on a message counts that left then and has such a size."""
    instant_s = 1e-9 * timeline.iteration_s
    return [
        [
            sum(
                message.bytes
                for message in timeline.messages
                if message.to_rank == rank
                and message.taken_s > start + instant_s
                and come(message.left_s, message.bytes) < end - instant_s
            )
            for start, end in zip(timeline.starts_s[rank], timeline.ends_s[rank], strict=True)
        ]
        for rank in range(len(timeline.schedule))
    ]


@given(planned())
def test_buffers_are_those_that_the_time_model_counts(drawn: tuple[Case, Job]) -> None:
    case, job = drawn
    programs = rank_programs(case.schedule, case.routes)
    timeline = simulate(job, case.schedule)
    assert waiting(case, programs, forecast(job)) == foreseen(timeline, lambda left_s, _: left_s)


@given(planned())
def test_what_no_link_can_hold_is_posted_as_it_sets_off(drawn: tuple[Case, Job]) -> None:
    case, job = drawn
    programs = rank_programs(case.schedule, case.routes)
    timeline = simulate(job, case.schedule)
    levels = waiting(case, programs, forecast(job, buffered_bytes=0))
    link = job.cluster.links.intra_node if job.cluster.links is not None else None
    if link is None or not job.cluster.overlap:
        least = foreseen(timeline, lambda left_s, _: left_s)
        assert all(
            a >= b for ours, theirs in zip(levels, least, strict=True) for a, b in zip(ours, theirs, strict=True)
        )
    else:
        bandwidth = link.bandwidth_bytes_per_s
        assert levels == foreseen(timeline, lambda left_s, num_bytes: left_s - num_bytes / bandwidth)


@given(planned())
def test_where_there_is_room_each_is_posted_an_action_early(drawn: tuple[Case, Job]) -> None:
    case, job = drawn
    programs = rank_programs(case.schedule, case.routes)
    for program, row in zip(
        programs, posts([p.steps for p in programs], forecast(job, held_bytes=1 << 40)), strict=True
    ):
        posted: dict[int, int] = {}
        before: dict[int, int] = {}
        for step, early in zip(program.steps, row, strict=True):
            before, posted = posted, posted | {sender: max(count, posted.get(sender, 0)) for sender, count in early}
            if step is not program.steps[0]:
                assert all(before.get(sender, 0) > number for sender, number, _ in step.waits)
