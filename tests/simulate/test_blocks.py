"""Orders that repeat one block: whole, without a deadlock, paced by the busiest rank, holding what they are said to."""

from __future__ import annotations

import dataclasses
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.jobs import Shape, chain_job, jobs

from planner.schedules import Placement, ScheduleName, Wiring, build, check_schedule
from planner.simulate import Job, Walk, simulate
from planner.simulate.blocks import Placed, block, busiest_s, held, repeated
from planner.simulate.memory import resident_bytes

SHAPES: st.SearchStrategy[Shape] = st.tuples(st.integers(1, 4), st.integers(1, 2), st.just(Placement.LOOP)) | st.tuples(
    st.integers(1, 4), st.just(2), st.just(Placement.V)
)
GAPS = st.sampled_from((0.0, 0.5, 2.0))
LENGTHS = st.integers(1, 24).map(lambda count: count / 8)


@st.composite
def lasting(draw: st.DrawFn) -> Job:
    """A chain over free links whose actions all last some time, and whose messages are held nowhere."""
    ranks, virtual, placement = draw(SHAPES)
    job = chain_job(ranks, draw(st.integers(1, 12)), virtual=virtual, placement=placement, message_bytes=0)
    stages = tuple(
        dataclasses.replace(
            stage,
            forward_s=draw(LENGTHS),
            backward_input_s=draw(LENGTHS),
            backward_weight_s=draw(LENGTHS),
            saved_bytes=draw(st.integers(1, 100)),
            saved_for_weight_bytes=draw(st.integers(0, 100)),
        )
        for stage in job.stages
    )
    return dataclasses.replace(job, stages=stages)


def end_s(job: Job, made: tuple[Placed, ...]) -> float:
    """When a block's last action ends."""
    ends = []
    for placed in made:
        cost = Walk(job).durations[placed.stage]
        lengths = {"F": cost.forward_s, "I": cost.backward_input_s, "W": cost.backward_weight_s, "B": cost.backward_s}
        ends.append(placed.start_s + lengths[placed.letter])
    return max(ends)


def blocked(job: Job, split: bool, gap: float) -> tuple[Walk, float, tuple[Placed, ...]]:
    """A block of a job, and the period after which it begins again."""
    walk = Walk(job)
    period_s = busiest_s(walk) or 1.0
    return walk, period_s, block(walk, period_s, split=split, gap=gap)


@settings(deadline=None)
@given(jobs(shapes=SHAPES), st.booleans(), GAPS)
def test_any_job_gets_a_whole_order_without_a_deadlock(job: Job, split: bool, gap: float) -> None:
    walk, period_s, made = blocked(job, split, gap)
    order = repeated(walk, made, period_s)
    found = check_schedule(order, num_microbatches=job.num_microbatches, wiring=Wiring.of(job.stages))
    assert found.errors == ()
    simulate(job, order)


@settings(deadline=None)
@given(lasting(), st.booleans(), GAPS)
def test_the_busiest_rank_sets_the_pace(job: Job, split: bool, gap: float) -> None:
    walk, period_s, made = blocked(job, split, gap)
    iteration_s = simulate(job, repeated(walk, made, period_s)).iteration_s
    assert iteration_s <= (job.num_microbatches - 1) * period_s + end_s(job, made) + 1e-6


@settings(deadline=None)
@given(lasting(), st.booleans(), GAPS)
def test_a_ranks_actions_do_not_overlap_in_a_period(job: Job, split: bool, gap: float) -> None:
    _, period_s, made = blocked(job, split, gap)
    lasts = [placed for placed in made if end_s(job, (placed,)) > placed.start_s]
    for one, other in combinations(lasts, 2):
        if job.stages[one.stage].rank == job.stages[other.stage].rank:
            first, second = sorted((one, other), key=lambda placed: (placed.start_s + 1e-9) % period_s)
            apart = (second.start_s + 1e-9) % period_s - (first.start_s + 1e-9) % period_s
            assert apart >= end_s(job, (first,)) - first.start_s - 1e-6
            assert period_s - apart >= end_s(job, (second,)) - second.start_s - 1e-6


@settings(deadline=None)
@given(lasting(), st.booleans(), GAPS)
def test_what_is_held_is_what_the_time_model_says(job: Job, split: bool, gap: float) -> None:
    walk, period_s, made = blocked(job, split, gap)
    peaks = [use.peak_memory_bytes for use in simulate(job, repeated(walk, made, period_s)).ranks]
    assert peaks == [resident_bytes(job, rank) + most for rank, most in enumerate(held(walk, made, period_s))]


@pytest.mark.parametrize("num_ranks", [2, 4, 5, 7, 8])
def test_equal_stages_in_a_v_hold_no_more_than_v_min(num_ranks: int) -> None:
    """The published block is found where all actions last as long."""
    job = chain_job(num_ranks, 6 * num_ranks, virtual=2, placement=Placement.V, message_bytes=0)
    walk, period_s, made = blocked(job, True, 0.0)
    v_min = build(
        ScheduleName.V_MIN, placement=Placement.V, num_ranks=num_ranks, virtual=2, num_microbatches=6 * num_ranks
    )
    published = simulate(job, v_min)
    found = simulate(job, repeated(walk, made, period_s))
    assert found.iteration_s <= published.iteration_s + 1e-9
    for one, other in zip(found.ranks, published.ranks, strict=True):
        assert one.peak_memory_bytes <= other.peak_memory_bytes
