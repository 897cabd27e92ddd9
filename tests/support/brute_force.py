"""Every plan there is of a small profile, one by one; shares nothing with planner.search.

A plan here: pipeline size, replicas, stages a rank, placement, micro-batch size; a cut; who recomputes; a named
schedule at a warm-up. Where they are more than can be looked at, random ones stand for the rest.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from planner.cluster import Cluster, memory_limit
from planner.errors import InputError
from planner.graph import LayerGraph
from planner.schedules import Placement, Schedule, ScheduleName, build, default_warmup, ranks_of, shape_fault
from planner.simulate import Job, Walk, simulate
from planner.simulate.memory import resident_bytes
from support.random_profiles import all_cuts, job_for

NAMES = tuple(name for name in ScheduleName if name is not ScheduleName.SYNTHESISED)
CHOICES = {"none": (False,), "all": (True,), "auto": (False, True)}


class Shape(NamedTuple):
    """P ranks of v stages, D replicas, M micro-batches of b samples."""

    pipeline: int
    data: int
    virtual: int
    placement: Placement
    microbatch_size: int
    num_microbatches: int


def shapes(graph: LayerGraph, *, gpus: int, global_batch: int, most_data: int = 2) -> Iterator[Shape]:
    """Every shape with at most so many GPUs, with a layer for every stage and whole micro-batches."""
    for ranks, data, virtual in itertools.product(range(1, gpus + 1), range(1, most_data + 1), (1, 2)):
        placements = (Placement.LOOP, Placement.V) if virtual == 2 and ranks > 1 else (Placement.LOOP,)
        for (size, tensor), placement in itertools.product(graph.rows(), placements):
            if ranks * data <= gpus and ranks * virtual <= len(graph) and not global_batch % (size * data):
                assert tensor == 1
                yield Shape(ranks, data, virtual, placement, size, global_batch // (size * data))


def jobs(
    graph: LayerGraph, every: Sequence[Shape], rng: random.Random, *, cluster: Cluster, recompute: str, most: int
) -> Iterator[tuple[Shape, Job]]:
    """Every cut of every shape with every choice of stages that recompute; a sample, where they are more than that."""
    left = most
    for number, shape in enumerate(rng.sample(every, len(every))):
        homes = ranks_of(shape.pipeline, shape.virtual, shape.placement)
        choices = [
            (cut, again)
            for cut in all_cuts(graph, len(homes))
            for again in itertools.product(CHOICES[recompute], repeat=len(homes))
        ]
        share = max(1, left // (len(every) - number))
        for cut, again in choices if len(choices) <= share else rng.sample(choices, share):
            left -= 1
            job = job_for(
                graph,
                cut,
                ranks=list(homes),
                microbatch_size=shape.microbatch_size,
                num_microbatches=shape.num_microbatches,
                cluster=cluster,
                data=shape.data,
                recompute=list(again),
            )
            yield shape, job


def schedules(
    shape: Shape, names: Sequence[ScheduleName], rng: random.Random, most: int
) -> Iterator[tuple[ScheduleName, Schedule]]:
    """Schedules of a shape at every warm-up; where these are more than ``most``, a sample of them."""
    for name in names:
        if name in NAMES and not shape_fault(name, virtual=shape.virtual, placement=shape.placement):
            for warmup in _warmups(name, shape, rng, most):
                yield name, _built(name, shape, warmup)


def _warmups(name: ScheduleName, shape: Shape, rng: random.Random, most: int) -> list[tuple[int, ...] | None]:
    ranks, deepest = shape.pipeline, shape.virtual * shape.num_microbatches
    default = default_warmup(name, num_ranks=ranks, virtual=shape.virtual, num_microbatches=shape.num_microbatches)
    if default is None:
        return [None]
    if deepest**ranks <= most:
        return list(itertools.product(range(1, deepest + 1), repeat=ranks))
    made = [default, (1,) * ranks, (deepest,) * ranks]
    for _ in range(most - 3):
        if rng.random() < 0.5:  # near the usual one
            made.append(tuple(min(deepest, max(1, depth + rng.randint(-2, 3))) for depth in default))
        else:
            made.append(tuple(sorted(rng.choices(range(1, deepest + 1), k=ranks), reverse=True)))
    return list(dict.fromkeys(made))


def _built(name: ScheduleName, shape: Shape, warmup: tuple[int, ...] | None) -> Schedule:
    return build(
        name,
        num_ranks=shape.pipeline,
        virtual=shape.virtual,
        num_microbatches=shape.num_microbatches,
        placement=shape.placement,
        warmup=warmup,
    )


def least_s(walk: Walk) -> float:
    """What the busiest rank alone takes: no schedule is faster."""
    job, loads = walk.job, [0.0] * walk.job.num_ranks
    for stage, lasts in zip(job.stages, walk.durations, strict=True):
        loads[stage.rank] += lasts.forward_s + lasts.backward_s
    return job.num_microbatches * max(loads)


def least_bytes(job: Job) -> int:
    """What the fullest rank holds at all times: no schedule needs less."""
    return max(resident_bytes(job, rank) for rank in range(job.num_ranks))


def fitting_s(walk: Walk, schedule: Schedule, below_s: float) -> float:
    """The iteration's time where it is below that and fits in memory, else infinity."""
    try:
        if simulate(walk, schedule, memory=False).iteration_s >= below_s:
            return math.inf
    except InputError:  # a warm-up that waits for ever
        return math.inf
    timeline, limit = simulate(walk, schedule), memory_limit(walk.job.cluster)
    fits = limit is None or max(use.peak_memory_bytes for use in timeline.ranks) <= limit
    return timeline.iteration_s if fits else math.inf
