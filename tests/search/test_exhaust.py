"""Branch and bound over warm-ups and recompute, against every one of them in turn."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random

import pytest
from support.brute_force import CHOICES, NAMES, Shape, fitting_s
from support.random_profiles import all_cuts, job_for, random_cluster, random_profile

from planner.graph import LayerGraph
from planner.schedules import Placement, ScheduleName, build, default_warmup, ranks_of, shape_fault
from planner.search.space import Configuration
from planner.search.warmups import Branching, Effort, OutOfEffortError, rows_of
from planner.simulate import Walk

WITH_WARMUP = (ScheduleName.ONE_F_ONE_B, ScheduleName.INTERLEAVED, ScheduleName.ZB_H1)
SHAPES = [
    Shape(ranks, 1, virtual, placement, 1, count)
    for ranks, virtual, placement, count in itertools.product(
        (1, 2, 3), (1, 2), (Placement.LOOP, Placement.V), (1, 2, 3)
    )
    if placement is Placement.LOOP or (virtual == 2 and ranks > 1)
]


def configuration_of(shape: Shape) -> Configuration:
    return Configuration(
        pipeline=shape.pipeline,
        data=shape.data,
        tensor=1,
        virtual=shape.virtual,
        placement=shape.placement,
        microbatch_size=shape.microbatch_size,
        num_microbatches=shape.num_microbatches,
    )


def all_warmups(name: ScheduleName, shape: Shape) -> list[tuple[int, ...] | None]:
    count = shape.num_microbatches
    if default_warmup(name, num_ranks=shape.pipeline, virtual=shape.virtual, num_microbatches=count) is None:
        return [None]
    return list(itertools.product(range(1, shape.virtual * count + 1), repeat=shape.pipeline))


def built(name: ScheduleName, shape: Shape, warmup: tuple[int, ...] | None):  # type: ignore[no-untyped-def]
    return build(
        name,
        num_ranks=shape.pipeline,
        virtual=shape.virtual,
        num_microbatches=shape.num_microbatches,
        placement=shape.placement,
        warmup=warmup,
    )


def suited(shape: Shape) -> list[ScheduleName]:
    return [name for name in NAMES if not shape_fault(name, virtual=shape.virtual, placement=shape.placement)]


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape.placement is Placement.LOOP], ids=str)
def test_rows_are_those_of_every_warmup_and_no_others(shape: Shape) -> None:
    for name in set(suited(shape)) & set(WITH_WARMUP):
        every = {built(name, shape, warmup) for warmup in all_warmups(name, shape)}
        found = set()
        for rows in rows_of(name, configuration_of(shape)) or []:
            for chosen in itertools.product(*rows.ranks):
                depths = tuple(row.depth for row in chosen)
                if max(depths) >= rows.least:
                    orders = tuple(row.order for row in chosen)
                    assert orders == built(name, shape, depths)
                    found.add(orders)
        assert found == every


def check_that_nothing_is_missed(seed: int) -> None:
    rng = random.Random(seed)
    graph = LayerGraph.of(random_profile(rng, chain=rng.random() < 0.5, most_layers=6))
    shape = rng.choice([shape for shape in SHAPES if shape.pipeline * shape.virtual <= len(graph)])
    memory = rng.choice((None, int(10 ** rng.uniform(2.3, 3))))
    cluster = random_cluster(rng, memory=memory)
    homes = list(ranks_of(shape.pipeline, shape.virtual, shape.placement))
    cuts = list(all_cuts(graph, len(homes)))
    if not cuts:
        return
    again = CHOICES[rng.choice(tuple(CHOICES))]
    job = job_for(
        graph,
        rng.choice(cuts),
        ranks=homes,
        microbatch_size=1,
        num_microbatches=shape.num_microbatches,
        cluster=cluster,
        data=rng.choice((1, 2)),
        recompute=[again[0]] * len(homes),
    )
    branching = Branching(job, again, Effort(10**9, lambda: None))
    for name in suited(shape):
        best_s = math.inf
        for rows in rows_of(name, configuration_of(shape)) or []:
            for _, _, timeline in branching.faster(rows, best_s):
                best_s = timeline.iteration_s
        for flags in itertools.product(again, repeat=len(homes)):
            stages = tuple(
                dataclasses.replace(stage, recompute=flag) for stage, flag in zip(job.stages, flags, strict=True)
            )
            walk = Walk(dataclasses.replace(job, stages=stages))
            for warmup in all_warmups(name, shape):
                assert fitting_s(walk, built(name, shape, warmup), best_s * (1 - 1e-9)) == math.inf, (name, warmup)


@pytest.mark.parametrize("seed", range(30))
def test_no_warmup_or_recompute_is_missed(seed: int) -> None:
    check_that_nothing_is_missed(seed)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(20))
def test_no_warmup_or_recompute_is_missed_at_length(chunk: int) -> None:
    for seed in range(100 + 50 * chunk, 150 + 50 * chunk):
        check_that_nothing_is_missed(seed)


def test_it_ends_where_its_effort_does() -> None:
    shape = Shape(2, 1, 1, Placement.LOOP, 1, 3)
    rng = random.Random(0)
    graph = LayerGraph.of(random_profile(rng, chain=True, most_layers=6))
    job = job_for(
        graph,
        next(all_cuts(graph, 2)),
        ranks=[0, 1],
        microbatch_size=1,
        num_microbatches=3,
        cluster=random_cluster(rng, memory=None),
    )
    rows = rows_of(ScheduleName.ONE_F_ONE_B, configuration_of(shape))
    assert rows is not None
    with pytest.raises(OutOfEffortError):
        list(Branching(job, (False,), Effort(20, lambda: None)).faster(rows[0], math.inf))
