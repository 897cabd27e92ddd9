"""Synthesised orders: whole, within memory, never slower than the named ones, near what is possible at all."""

from __future__ import annotations

import csv
import dataclasses
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cases import case
from support.exact import fastest
from support.jobs import Shape, chain_job, jobs

from planner.cluster import Link, memory_limit
from planner.schedules import Letter, Placement, ScheduleName, Wiring, build, check_schedule, ranks_of, shape_fault
from planner.search.bound import cut_bound
from planner.search.depth import Depths1F1B
from planner.simulate import Job, Timeline, Walk, simulate
from planner.simulate.greedy import Rule, Turn, greedy
from planner.simulate.improve import improve, longest_rank, span_s
from planner.simulate.memory import resident_bytes
from planner.simulate.synthesise import synthesise


def shapes(max_ranks: int, max_virtual: int) -> st.SearchStrategy[Shape]:
    loop = st.tuples(st.integers(1, max_ranks), st.integers(1, max_virtual), st.just(Placement.LOOP))
    return loop | st.tuples(st.integers(1, max_ranks), st.just(2), st.just(Placement.V))


def named(job: Job) -> list[Timeline]:
    """The named schedules that the job's shape can have, simulated."""
    virtual = len(job.stages) // job.num_ranks
    ranks = tuple(stage.rank for stage in job.stages)
    shape = {"num_ranks": job.num_ranks, "virtual": virtual, "num_microbatches": job.num_microbatches}
    return [
        simulate(job, build(name, placement=placement, **shape))
        for placement in ((Placement.LOOP, Placement.V) if virtual == 2 else (Placement.LOOP,))
        if ranks == ranks_of(job.num_ranks, virtual, placement)
        for name in ScheduleName
        if not shape_fault(name, virtual=virtual, placement=placement)
    ]


def peak(timeline: Timeline) -> int:
    return max(use.peak_memory_bytes for use in timeline.ranks)


def within(job: Job, limit: int) -> Job:
    return dataclasses.replace(
        job, cluster=dataclasses.replace(job.cluster, memory_bytes=limit, memory_reserve_fraction=0.0)
    )


def whole(timeline: Timeline) -> bool:
    letters = {action.letter for order in timeline.schedule for action in order}
    return letters <= {Letter.FORWARD, Letter.BACKWARD}


def rules(job: Job) -> st.SearchStrategy[Rule]:
    """Any rule for a job."""
    ranks, stages = job.num_ranks, len(job.stages)
    budgets, limits = st.none() | st.floats(0, 2e4), st.integers(1, 4)
    return st.builds(
        Rule,
        split=st.booleans(),
        turn=st.sampled_from(Turn),
        alternate=st.booleans(),
        patience=st.sampled_from((0.0, 0.15, 0.5, 1.0)),
        budget_bytes=st.tuples(*[budgets] * ranks),
        ahead=st.none() | st.tuples(*[limits] * ranks),
        window=st.none() | limits,
        depths=st.none() | st.tuples(*[limits] * stages),
    )


@settings(max_examples=40, deadline=None)
@given(jobs(shapes=shapes(8, 4), max_microbatches=12), st.booleans(), st.floats(0, 1.5))
def test_never_slower_than_the_named_ones_in_the_same_memory(job: Job, split: bool, share: float) -> None:
    known = [timeline for timeline in named(job) if split or whole(timeline)]
    peaks = sorted(map(peak, named(job)))
    if share < 1:
        job = within(job, int(peaks[0] + share * (peaks[-1] - peaks[0])))
    limit = memory_limit(job.cluster)
    schedule = synthesise(Walk(job), split=split, steps=4)
    fitting = [timeline for timeline in known if limit is None or peak(timeline) <= limit]
    if schedule is None:
        assert not fitting
        return
    found = check_schedule(schedule, num_microbatches=job.num_microbatches, wiring=Wiring.of(job.stages))
    assert not found.errors
    assert not any("rounding" in remark for remark in found.remarks)
    timeline = simulate(job, schedule)
    assert limit is None or peak(timeline) <= limit
    assert split or whole(timeline)
    for other in fitting:
        assert timeline.iteration_s <= other.iteration_s * (1 + 1e-9)


@settings(max_examples=150, deadline=None)
@given(jobs(shapes=shapes(6, 3), max_microbatches=10), st.data())
def test_no_order_is_faster_than_the_bound(job: Job, data: st.DataObject) -> None:
    walk = Walk(job)
    rule = data.draw(rules(job))
    made = greedy(walk, rule)
    tables = [timeline.schedule for timeline in named(job)] + ([made] if made else [])
    for schedule in tables:
        timeline = simulate(walk, schedule, memory=False)
        assert timeline.iteration_s >= cut_bound(walk, fused=whole(timeline)) * (1 - 1e-9)
        assert timeline.iteration_s >= cut_bound(walk, fused=False) * (1 - 1e-9)


@settings(max_examples=200, deadline=None)
@given(jobs(shapes=shapes(6, 3), max_microbatches=10), st.data())
def test_list_scheduling_knows_the_times_of_its_orders(job: Job, data: st.DataObject) -> None:
    """What it tells the walk is, to the bit, what another walk of the same order finds, however times round."""
    stages = (
        dataclasses.replace(stage, forward_s=stage.forward_s / 3, backward_input_s=stage.backward_input_s / 7)
        for stage in job.stages
    )
    job = dataclasses.replace(job, stages=tuple(stages))
    walk = Walk(job)
    rule = data.draw(rules(job))
    made = greedy(walk, rule)
    if made is not None:
        assert walk.run(made) == Walk(job).run(made)
        assert simulate(walk, made) == simulate(job, made)


@settings(max_examples=100, deadline=None)
@given(jobs(shapes=shapes(4, 3)), st.integers(1, 40), st.booleans())
def test_list_scheduling_keeps_to_its_budget(job: Job, activations: int, split: bool) -> None:
    """With messages and workspace aside, what the actions hold stays within the budget, or there is no order."""
    free = tuple(
        dataclasses.replace(
            stage,
            recompute=False,
            workspace_bytes=0,
            saved_bytes=100,
            saved_for_weight_bytes=50,
            sends=tuple(dataclasses.replace(entry, bytes=0) for entry in stage.sends),
            returns=tuple(dataclasses.replace(entry, bytes=0) for entry in stage.returns),
        )
        for stage in job.stages
    )
    job = dataclasses.replace(job, stages=free)
    virtual = len(job.stages) // job.num_ranks
    budget = 100.0 * activations
    schedule = greedy(Walk(job), Rule(split=split, budget_bytes=(budget,) * job.num_ranks))
    assert schedule or activations < virtual * job.num_microbatches, "all that can be in flight is enough"
    if schedule:
        timeline = simulate(job, schedule)
        assert all(use.peak_memory_bytes - resident_bytes(job, use.rank) <= budget for use in timeline.ranks)


@settings(max_examples=60, deadline=None)
@given(jobs(shapes=shapes(4, 3), max_microbatches=6), st.booleans())
def test_swaps_make_orders_better_and_keep_them_whole(job: Job, spans: bool) -> None:
    walk = Walk(job)
    before = simulate(walk, named(job)[0].schedule)
    worth = (before.iteration_s, span_s(before, longest_rank(before)))
    better = improve(walk, before.schedule, steps=20, budget_bytes=(None,) * job.num_ranks, spans=spans)
    for schedule in reversed(better):
        found = check_schedule(schedule, num_microbatches=job.num_microbatches, wiring=Wiring.of(job.stages))
        assert not found.errors
        timeline = simulate(walk, schedule)
        now = (timeline.iteration_s, span_s(timeline, longest_rank(timeline)))
        assert now[0] <= worth[0] * (1 + 1e-9)
        assert now[0] < worth[0] or now[1] < worth[1]
        worth = now


def uneven(job: Job, seed: int) -> Job:
    """The job with every time off by up to 30 %."""
    random = Random(seed)
    stages = tuple(
        dataclasses.replace(
            stage,
            forward_s=stage.forward_s * random.uniform(0.7, 1.3),
            backward_input_s=stage.backward_input_s * random.uniform(0.7, 1.3),
            backward_weight_s=stage.backward_weight_s * random.uniform(0.7, 1.3),
        )
        for stage in job.stages
    )
    return dataclasses.replace(job, stages=stages)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("ahead", [None, 2, 3])
@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(2, 3), (3, 3), (3, 4), (4, 4)])
def test_optimal_on_small_pipelines(num_ranks: int, num_microbatches: int, ahead: int | None, split: bool) -> None:
    """One stage a rank: the exact optimum, with memory for all micro-batches, for three, and for two."""
    link = Link(latency_s=0.3, bandwidth_bytes_per_s=1e300)
    for seed in range(3):
        job = uneven(chain_job(num_ranks, num_microbatches, link=link, message_bytes=1), seed)
        if ahead:
            stages = tuple(dataclasses.replace(stage, saved_bytes=1000) for stage in job.stages)
            job = within(dataclasses.replace(job, stages=stages), 1000 * ahead + 100)
        walk = Walk(job)
        schedule = synthesise(walk, split=split)
        assert schedule is not None
        found_s, bound_s = simulate(walk, schedule).iteration_s, cut_bound(walk, fused=not split)
        if found_s > bound_s * (1 + 1e-9):
            best_s = fastest(walk, split=split, at_most_s=found_s * (1 + 1e-6), at_least_s=bound_s, ahead=ahead)
            assert found_s <= best_s * (1 + 1e-6)


@pytest.mark.parametrize(
    ("num_ranks", "num_microbatches", "placement", "split"),
    [
        (2, 3, Placement.LOOP, False),
        (2, 3, Placement.V, False),
        (2, 4, Placement.V, False),
        (3, 3, Placement.LOOP, False),
        (2, 2, Placement.LOOP, True),
        (2, 2, Placement.V, True),
        pytest.param(2, 3, Placement.LOOP, True, marks=pytest.mark.slow),
    ],
)
def test_near_the_optimum_with_two_stages_a_rank(
    num_ranks: int, num_microbatches: int, placement: Placement, split: bool
) -> None:
    """Two stages a rank: within 1 % of the exact optimum (found: at it, but for 0.7 % once)."""
    link = Link(latency_s=0.15, bandwidth_bytes_per_s=1e300)
    for seed in range(1 if split and num_microbatches > 2 else 3):
        job = chain_job(num_ranks, num_microbatches, virtual=2, placement=placement, link=link, message_bytes=1)
        walk = Walk(uneven(job, seed))
        schedule = synthesise(walk, split=split)
        assert schedule is not None
        found_s, bound_s = simulate(walk, schedule).iteration_s, cut_bound(walk, fused=not split)
        if found_s > bound_s * (1 + 1e-9):
            best_s = fastest(walk, split=split, at_most_s=found_s * (1 + 1e-6), at_least_s=bound_s)
            assert found_s <= best_s * 1.01


ROWS = [*range(8), *(pytest.param(row, marks=pytest.mark.slow) for row in range(8, 12))]


@pytest.mark.parametrize("activations", [1, 2])
@pytest.mark.parametrize("row", ROWS)
def test_at_least_as_good_as_the_zero_bubble_papers_orders(row: int, activations: int) -> None:
    """ZB-1p and ZB-2p: orders within p and 2p activations, judged by the idle share of the longest rank's span."""
    with case("zero-bubble/iclr_bubble_rates.csv").open() as file:
        data = list(csv.DictReader(file))[row]
    num_ranks, num_microbatches = int(data["p"]), int(data["m"])
    forward_s, backward_input_s, backward_weight_s = (float(data[key]) for key in ("TF_us", "TB_us", "TW_us"))
    job = chain_job(
        num_ranks,
        num_microbatches,
        forward_s=forward_s,
        backward_input_s=backward_input_s,
        backward_weight_s=backward_weight_s,
        link=Link(latency_s=float(data["Tcomm_us"]), bandwidth_bytes_per_s=1e300),
        message_bytes=1,
    )
    held, for_weight = int(data["mem_F"]), -int(data["mem_W"])
    stages = tuple(
        dataclasses.replace(stage, saved_bytes=held, saved_for_weight_bytes=for_weight) for stage in job.stages
    )
    walk = Walk(within(dataclasses.replace(job, stages=stages), activations * num_ranks * held + 100))
    steps = 50 if row == 0 else 0  # list scheduling alone does it on all rows but the first
    schedule = synthesise(walk, steps=steps, bound_s=cut_bound(walk, fused=False))
    assert schedule is not None
    timeline = simulate(walk, schedule)
    assert peak(timeline) <= activations * num_ranks * held + 100
    work = num_microbatches * (forward_s + backward_input_s + backward_weight_s)
    rate = 1 - work / span_s(timeline, longest_rank(timeline))
    name = "ZB_1p(max_mem=p*mem_F)" if activations == 1 else "ZB_2p(max_mem=2p*mem_F)"
    assert float(f"{rate:.4f}") <= float(data[f"bubble_{name}"])


@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(4, 8), (4, 16), (8, 16), (8, 32), (8, 64)])
def test_whole_backwards_reach_the_bound_in_spite_of_links(num_ranks: int, num_microbatches: int) -> None:
    """Links of 15 % of a stage's time: plain 1F1B loses 12-23 %, an order with whole backwards less than 2 %."""
    job = chain_job(num_ranks, num_microbatches, link=Link(latency_s=0.45, bandwidth_bytes_per_s=1e300))
    walk = Walk(job)
    bound_s = cut_bound(walk, fused=True)
    plain = build(
        ScheduleName.ONE_F_ONE_B,
        num_ranks=num_ranks,
        virtual=1,
        num_microbatches=num_microbatches,
        placement=Placement.LOOP,
    )
    assert simulate(walk, plain, memory=False).iteration_s > 1.1 * bound_s
    schedule = synthesise(walk, split=False)
    assert schedule is not None
    assert simulate(walk, schedule, memory=False).iteration_s < 1.02 * bound_s


@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(4, 8), (4, 16), (8, 16), (8, 32), (8, 64)])
def test_free_depth_reaches_the_bound_in_spite_of_links(num_ranks: int, num_microbatches: int) -> None:
    """The same with 1F1B itself, its warm-up depths chosen freely."""
    job = chain_job(num_ranks, num_microbatches, link=Link(latency_s=0.45, bandwidth_bytes_per_s=1e300))
    walk = Walk(job)
    bound_s = cut_bound(walk, fused=True)
    found = Depths1F1B(walk, None).climb(bound_s, effort=10**7)
    assert found is not None
    assert found.iteration_s < 1.02 * bound_s
