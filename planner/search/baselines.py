"""What people do by hand, under the same time model: one GPU, an even split by layers or
parameters, and plain data parallel where replicas are asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Final

from planner.cluster import memory_limit
from planner.graph import LayerGraph
from planner.schedules import Placement, ScheduleName, build, default_warmup
from planner.search.bound import cut_bound
from planner.search.job import job_of_cut
from planner.search.result import Baseline, Candidate
from planner.search.space import Asked, Configuration, copies_for
from planner.simulate import Job, Walk, simulate

MOST_ACTIONS: Final = 200_000
"""A pipeline of more actions is not timed: it would take longer than the search."""

Split = Callable[[LayerGraph, int], list[list[str]]]


def baselines(graph: LayerGraph, asked: Asked, sizes: Sequence[int]) -> tuple[Baseline, ...]:
    """Each at the measured micro-batch size that suits it best, under 1F1B as it comes.

    Sizes are timed in order of their bound, until the next one's passes the best time.
    """
    most = min(asked.gpus, len(graph))
    made = [_best("one GPU", graph, asked, sizes, 1, even_by_count)]
    if most > 1:
        made.append(_best("even by layers", graph, asked, sizes, most, even_by_count))
        made.append(_best("even by parameters", graph, asked, sizes, most, even_by_parameters))
    copies = _most_replicas(asked, sizes)
    if copies > 1:
        made.append(_best("plain data parallel", graph, asked, sizes, 1, even_by_count, data=copies))
    return tuple(made)


def _most_replicas(asked: Asked, sizes: Sequence[int]) -> int:
    """The most replicas of one rank that the GPUs, the global batch and what is asked for allow."""
    return max((data for size in sizes for data in copies_for(asked, size, 1)), default=1)


def _best(
    name: str, graph: LayerGraph, asked: Asked, sizes: Sequence[int], ranks: int, split: Split, *, data: int = 1
) -> Baseline:
    limit, cut = memory_limit(asked.cluster), split(graph, ranks)
    shapes = [one_stage_a_rank(asked, ranks, size, data) for size in sizes if asked.global_batch % (size * data) == 0]
    shapes = [one for one in shapes if ranks == 1 or 2 * ranks * one.num_microbatches <= MOST_ACTIONS]
    jobs = [(one, job_of_cut(graph, asked, one, cut)) for one in shapes]
    bounds = [cut_bound(Walk(job), fused=True) for _, job in jobs]
    best: tuple[bool, float, Candidate] | None = None
    for place in sorted(range(len(jobs)), key=bounds.__getitem__):
        if best is not None and not best[0] and bounds[place] >= best[1]:
            break
        candidate = by_hand(*jobs[place])
        fits = limit is None or candidate.peak_memory_bytes <= limit
        if best is None or (not fits, candidate.iteration_s) < best[:2]:
            best = (not fits, candidate.iteration_s, candidate)
    if best is None:
        return Baseline(name=name, candidate=None, fits=False)
    return Baseline(name=name, candidate=best[2], fits=not best[0])


def one_stage_a_rank(asked: Asked, ranks: int, size: int, data: int = 1) -> Configuration:
    """The shape of a pipeline of one stage a rank, at a micro-batch size."""
    return Configuration(
        pipeline=ranks,
        data=data,
        tensor=1,
        virtual=1,
        placement=Placement.LOOP,
        microbatch_size=size,
        num_microbatches=asked.global_batch // (size * data),
    )


def by_hand(shape: Configuration, job: Job) -> Candidate:
    """A given cut under plain 1F1B."""
    count = {"num_ranks": shape.pipeline, "virtual": 1, "num_microbatches": shape.num_microbatches}
    warmup = default_warmup(ScheduleName.ONE_F_ONE_B, **count)
    schedule = build(ScheduleName.ONE_F_ONE_B, **count, placement=Placement.LOOP, warmup=warmup)
    return Candidate(
        configuration=shape,
        job=job,
        schedule=ScheduleName.ONE_F_ONE_B,
        warmup=warmup,
        timeline=simulate(job, schedule, levels=False),
    )


def even_by_count(graph: LayerGraph, num_stages: int) -> list[list[str]]:
    """The same number of layers in each stage, give or take one, in the profile's order."""
    marks = [stage * len(graph) // num_stages for stage in range(num_stages + 1)]
    return [list(graph.names[low:high]) for low, high in pairwise(marks)]


def even_by_parameters(graph: LayerGraph, num_stages: int) -> list[list[str]]:
    """A cut wherever the parameters so far reach the next equal share; no stage is empty."""
    total = sum(layer.parameter_bytes for layer in graph.layers)
    made: list[list[str]] = [[]]
    held = 0
    for index, layer in enumerate(graph.layers):
        left = len(graph) - index  # layers still to place, this one among them
        share = total * len(made) / num_stages
        over = held + layer.parameter_bytes / 2 > share
        if made[-1] and len(made) < num_stages and (over or left <= num_stages - len(made)):
            made.append([])
        made[-1].append(layer.name)
        held += layer.parameter_bytes
    while (
        len(made) < num_stages
    ):  # the parameters ended too soon: take single layers off the front stages that have more
        longest = max(range(len(made)), key=lambda stage: len(made[stage]))
        made[longest : longest + 1] = [made[longest][:-1], made[longest][-1:]]
    return made
