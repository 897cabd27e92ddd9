"""The search against brute force over the whole space, which shares nothing with it but the time model.

Every shape, cut and choice of stages that recompute is made here (support.brute_force), every warm-up of every named
schedule, and orders at random; where they are too many, a sample of them. The simulator is the judge.
"""

from __future__ import annotations

import dataclasses
import math
import random

import pytest
from support.brute_force import CHOICES, NAMES, Shape, fitting_s, jobs, least_bytes, least_s, schedules, shapes
from support.naive_model import Naive
from support.random_orders import random_order
from support.random_profiles import random_cluster, random_profile, with_split_costs

from planner.cluster import memory_limit, resolve
from planner.errors import InputError, NothingFitsError
from planner.graph import LayerGraph
from planner.profile import Profile
from planner.schedules import ScheduleName, shape_fault
from planner.search import Asked, Found, solve
from planner.simulate import Job, Walk
from planner.simulate.synthesise import synthesise


def random_question(rng: random.Random) -> tuple[Profile, Asked]:
    """Any small profile and cluster; half of the time all that there is is asked for, else a part of it."""
    sizes = rng.choice(((1, 2), (1, 2, 4)))
    profile = random_profile(rng, chain=rng.random() < 0.5, most_layers=8, sizes=sizes)
    memory = rng.choice((None, int(10 ** rng.uniform(2, 3.1))))
    cluster = dataclasses.replace(random_cluster(rng, memory=memory), memory_reserve_fraction=rng.choice((0.0, 0.1)))
    asked = Asked(
        gpus=rng.randint(1, 4),
        global_batch=rng.choice((2, 4, 6, 8)),
        cluster=resolve(cluster, profile),
        schedules=(*NAMES, ScheduleName.SYNTHESISED),
        virtual=(1, 2),
        data=(1, 2),
    )
    if rng.random() < 0.5:
        return profile, asked
    return profile, dataclasses.replace(
        asked,
        schedules=tuple(rng.sample(asked.schedules, rng.randint(1, 4))),
        virtual=rng.choice(((1,), (2,), (1, 2))),
        data=rng.choice(((1,), (2,), (1, 2))),
        pipeline=rng.choice((None, (1, 3), (2,), (2, 4))),
        microbatch=rng.choice((None, (1,), (2,))),
        recompute=rng.choice(tuple(CHOICES)),
    )


def found_for(profile: Profile, asked: Asked) -> Found | None:
    """What the search finds; None where it says that nothing fits."""
    try:
        return solve(profile, asked)
    except NothingFitsError:
        return None


def suits(shape: Shape, name: ScheduleName) -> bool:
    fault = shape_fault(name, virtual=shape.virtual, placement=shape.placement)
    return not fault or name is ScheduleName.SYNTHESISED


def sharded_by_hand(job: Job) -> Job:
    """The same with its optimizer's state and step shared by the replicas (ZeRO-1)."""
    return dataclasses.replace(
        job,
        zero1=True,
        state_bytes_per_trainable_byte=job.state_bytes_per_trainable_byte / job.data,
        step_s_per_trainable_byte=job.step_s_per_trainable_byte / job.data,
    )


def check_against_brute_force(
    seed: int, *, most_jobs: int, most_warmups: int, zero1: bool = False, split_costs: bool = False
) -> None:
    rng = random.Random(seed)
    profile, asked = random_question(rng)
    if split_costs:
        profile = with_split_costs(profile, rng)
    if zero1:
        asked = dataclasses.replace(asked, gpus=max(2, asked.gpus), data=(2,), zero1=True)
    graph, limit = LayerGraph.of(profile), memory_limit(asked.cluster)
    every = [
        shape
        for shape in shapes(graph, gpus=asked.gpus, global_batch=asked.global_batch)
        if (asked.pipeline is None or shape.pipeline in asked.pipeline)
        and (asked.microbatch is None or shape.microbatch_size in asked.microbatch)
        and shape.virtual in asked.virtual
        and shape.data in asked.data
    ]
    if not any(suits(shape, name) for shape in every for name in asked.schedules):
        with pytest.raises(InputError):
            solve(profile, asked)
        return
    found = found_for(profile, asked)
    best_s = bound_s = math.inf
    if found is not None:
        best_s, bound_s = found.best.iteration_s, found.bound_s
        again = Naive(found.best.job, found.best.timeline.schedule)
        assert best_s == pytest.approx(again.iteration_s, rel=1e-9)
        assert limit is None or max(again.peaks) <= limit
        assert bound_s <= best_s * (1 + 1e-9)
        assert found.proven or split_costs  # so small that all there is can be gone through
        assert found.left == 0 or split_costs
        assert min(found.solved, found.pruned, found.left) >= 0
    for shape, plain in jobs(graph, every, rng, cluster=asked.cluster, recompute=asked.recompute, most=most_jobs):
        job = sharded_by_hand(plain) if zero1 else plain
        walk = Walk(job)
        if least_s(walk) >= best_s or (limit is not None and least_bytes(job) > limit):
            continue
        for name, schedule in schedules(shape, asked.schedules, rng, most_warmups):
            seconds = fitting_s(walk, schedule, best_s * (1 - 1e-9))
            assert seconds == math.inf, f"{name} takes {seconds}, the plan {best_s} ({shape}, {job.stages})"
        if found is not None and rng.random() < 0.2 and least_s(walk) < bound_s:
            check_no_order_is_below(walk, bound_s, rng)


def check_no_order_is_below(walk: Walk, bound_s: float, rng: random.Random) -> None:
    """Any order at all: at random, and one that is made to be fast."""
    orders = [random_order(rng, walk.job, split=split) for split in (True, False)]
    own = synthesise(walk, steps=5) if rng.random() < 0.25 else None
    for order in (*orders, *([own] if own is not None else [])):
        assert fitting_s(walk, order, bound_s * (1 - 1e-9)) == math.inf


@pytest.mark.parametrize("seed", range(40))
def test_nothing_is_faster_than_the_plan(seed: int) -> None:
    check_against_brute_force(seed, most_jobs=150, most_warmups=30)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 2000))
def test_nothing_is_faster_than_the_plan_at_length(seed: int) -> None:
    check_against_brute_force(seed, most_jobs=1500, most_warmups=150)


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 100))])
def test_nothing_is_faster_where_replicas_share_the_optimizer(seed: int) -> None:
    check_against_brute_force(5000 + seed, most_jobs=150, most_warmups=30, zero1=True)


@pytest.mark.parametrize(
    "seed", [112, *range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 112))]
)
def test_nothing_is_faster_where_splitting_a_backward_costs(seed: int) -> None:
    check_against_brute_force(6000 + seed, most_jobs=150, most_warmups=30, split_costs=True)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(400, 520))
def test_orders_of_its_own_only_improve_on_schedules(seed: int) -> None:
    profile, asked = random_question(random.Random(seed))
    named = dataclasses.replace(asked, schedules=NAMES, virtual=(1, 2))
    try:
        found = found_for(profile, named)
    except InputError:
        return
    own = found_for(profile, dataclasses.replace(named, schedules=(*NAMES, ScheduleName.SYNTHESISED)))
    assert own is not None or found is None
    if own is not None and found is not None:
        assert own.best.iteration_s <= found.best.iteration_s * (1 + 1e-9) or not found.proven
        assert own.bound_s <= own.best.iteration_s


@pytest.mark.parametrize("seed", range(300, 312))
def test_where_ideals_are_too_many_the_ilp_takes_over(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cuts along orders, then the ILP's: what it calls proven is what looking at every ideal finds."""
    profile, asked = random_question(random.Random(seed))
    asked = dataclasses.replace(asked, recompute="none", virtual=(1,), schedules=(ScheduleName.ONE_F_ONE_B,))
    try:
        whole = solve(profile, asked)
    except (NothingFitsError, InputError):
        return
    monkeypatch.setattr("planner.search.bounds.lattice_of", lambda graph: None)
    found = solve(profile, asked)
    assert found.bound_s <= whole.best.iteration_s * (1 + 1e-6)
    assert found.best.iteration_s >= whole.best.iteration_s * (1 - 1e-9) or not whole.proven
    if found.proven:
        assert found.best.iteration_s <= whole.best.iteration_s * (1 + 1e-5)
