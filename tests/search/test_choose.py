"""The search against brute force over every configuration, cut, recompute choice and warm-up."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Iterator

import pytest
from support.random_profiles import all_cuts, random_cluster, random_profile

from planner.cluster import memory_limit, resolve
from planner.errors import InputError, NothingFitsError
from planner.graph import LayerGraph
from planner.profile import Profile
from planner.schedules import Placement, Schedule, ScheduleName, build, shape_fault
from planner.search import Asked, solve
from planner.search.job import job_of_cut
from planner.search.orders import FUSED, SPLIT
from planner.search.space import configurations
from planner.simulate import Job, Walk, simulate

NAMED = (ScheduleName.GPIPE, ScheduleName.ONE_F_ONE_B)


def random_question(seed: int, most_layers: int) -> tuple[Profile, Asked]:
    rng = random.Random(seed)
    profile = random_profile(rng, chain=rng.random() < 0.5, most_layers=most_layers)
    memory = rng.choice((None, None, 300, 500, 900))
    return profile, Asked(
        gpus=rng.randint(1, 4),
        global_batch=rng.choice((2, 4, 6)),
        cluster=resolve(random_cluster(rng, memory=memory), profile),
        schedules=rng.choice((NAMED, NAMED, NAMED[:1])),
        recompute=rng.choice(("none", "auto", "all")),
        data=rng.choice(((1,), (1,), (1, 2))),
    )


def every_job(graph: LayerGraph, asked: Asked) -> Iterator[Job]:
    choices = {"none": (False,), "all": (True,), "auto": (False, True)}[asked.recompute]
    for configuration in configurations(graph, asked):
        for cut in all_cuts(graph, configuration.pipeline):
            for again in itertools.product(choices, repeat=configuration.pipeline):
                yield job_of_cut(graph, asked, configuration, cut, again)


def every_schedule(job: Job, asked: Asked, rng: random.Random, most: int) -> Iterator[Schedule]:
    """All warm-ups; where they are many, the usual ones and random ones."""
    count, ranks = job.num_microbatches, job.num_ranks
    depths = [(count,) * ranks]
    if ScheduleName.ONE_F_ONE_B in asked.schedules:
        depths.append(tuple(min(count, ranks - rank) for rank in range(ranks)))
        if count**ranks <= most:
            depths += itertools.product(range(1, count + 1), repeat=ranks)
        else:
            depths += [tuple(sorted(rng.choices(range(1, count + 1), k=ranks), reverse=True)) for _ in range(most)]
    for warmup in dict.fromkeys(depths):
        yield build(
            ScheduleName.ONE_F_ONE_B,
            num_ranks=ranks,
            virtual=1,
            num_microbatches=count,
            placement=Placement.LOOP,
            warmup=warmup,
        )


def fitting_s(walk: Walk, schedule: Schedule, below_s: float) -> float:
    """The iteration's time where it is below that and fits, else infinity."""
    try:
        if simulate(walk, schedule, memory=False).iteration_s >= below_s:
            return math.inf
    except InputError:  # a warm-up that waits for ever
        return math.inf
    timeline, limit = simulate(walk, schedule), memory_limit(walk.job.cluster)
    fits = limit is None or max(use.peak_memory_bytes for use in timeline.ranks) <= limit
    return timeline.iteration_s if fits else math.inf


def check_against_brute_force(seed: int, *, most_layers: int, most_cuts: int, most_warmups: int) -> None:
    profile, asked = random_question(seed, most_layers)
    graph = LayerGraph.of(profile)
    try:
        found = solve(profile, asked)
    except NothingFitsError:
        found = None
    rng = random.Random(seed)
    jobs = list(every_job(graph, asked))
    for job in jobs if len(jobs) <= most_cuts else rng.sample(jobs, most_cuts):
        walk = Walk(job)
        below = found.best.iteration_s * (1 - 1e-9) if found else math.inf
        for schedule in every_schedule(job, asked, rng, most_warmups):
            assert fitting_s(walk, schedule, below) == math.inf
    if found is not None:
        assert found.bound_s <= found.best.iteration_s * (1 + 1e-9)
        limit = memory_limit(asked.cluster)
        assert limit is None or found.best.peak_memory_bytes <= limit


@pytest.mark.parametrize("seed", range(25))
def test_brute_force_finds_nothing_better(seed: int) -> None:
    check_against_brute_force(seed, most_layers=6, most_cuts=150, most_warmups=40)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(1000, 1200))
def test_brute_force_finds_nothing_better_at_length(seed: int) -> None:
    check_against_brute_force(seed, most_layers=8, most_cuts=3000, most_warmups=300)


EVERY = (*FUSED, *SPLIT)


@pytest.mark.parametrize("seed", range(12))
def test_no_named_schedule_beats_the_plan(seed: int) -> None:
    """All schedules, both placements, one and two stages a rank, replicas: any cut, each schedule as it comes."""
    rng = random.Random(seed)
    profile = random_profile(rng, chain=rng.random() < 0.5, most_layers=6)
    asked = Asked(
        gpus=rng.randint(1, 4),
        global_batch=rng.choice((2, 4, 6)),
        cluster=resolve(random_cluster(rng, memory=rng.choice((None, None, 900))), profile),
        schedules=EVERY,
        virtual=(1, 2),
        data=(1, 2),
        recompute="none",
    )
    graph = LayerGraph.of(profile)
    try:
        found = solve(profile, asked)
    except NothingFitsError:
        found = None
    if found is not None:
        assert found.bound_s <= found.best.iteration_s * (1 + 1e-9)
    below = found.best.iteration_s * (1 - 1e-9) if found else math.inf
    for configuration in configurations(graph, asked):
        stages, shape = configuration.pipeline * configuration.virtual, (configuration.virtual, configuration.placement)
        names = [n for n in EVERY if not shape_fault(n, virtual=shape[0], placement=shape[1])]
        for cut in itertools.islice(all_cuts(graph, stages), 30):
            walk = Walk(job_of_cut(graph, asked, configuration, cut))
            for name in names:
                schedule = build(
                    name,
                    num_ranks=configuration.pipeline,
                    virtual=configuration.virtual,
                    num_microbatches=configuration.num_microbatches,
                    placement=configuration.placement,
                )
                assert fitting_s(walk, schedule, below) == math.inf


@pytest.mark.parametrize("seed", range(300, 312))
def test_where_ideals_are_too_many_the_ilp_takes_over(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cuts along orders, then the ILP's: what it calls proven is what looking at every ideal finds."""
    profile, asked = random_question(seed, 6)
    asked = dataclasses.replace(asked, recompute="none")
    try:
        whole = solve(profile, asked)
    except NothingFitsError:
        return
    monkeypatch.setattr("planner.search.bounds.lattice_of", lambda graph: None)
    found = solve(profile, asked)
    assert found.bound_s <= whole.best.iteration_s * (1 + 1e-6)
    assert found.best.iteration_s >= whole.best.iteration_s * (1 - 1e-9)
    if found.proven:
        assert found.best.iteration_s == pytest.approx(whole.best.iteration_s, rel=1e-5)
