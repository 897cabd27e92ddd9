"""A search on the contracted graph, and its answer on the graph that was asked about."""

from __future__ import annotations

import dataclasses

from planner.cluster import memory_limit
from planner.graph import LayerGraph
from planner.graph.contract import Contraction, contract
from planner.search.baselines import baselines
from planner.search.exhaust import MOST_LAYERS
from planner.search.job import job_of_cut
from planner.search.result import Candidate, Found
from planner.search.space import Asked
from planner.simulate import simulate


def smaller(graph: LayerGraph, asked: Asked) -> Contraction | None:
    """The contraction that loses no cut asked for; None where there is none, or the graph is small as it is."""
    if len(graph) <= MOST_LAYERS:
        return None
    links = asked.cluster.links
    costly = links is not None and (links.intra_node is not None or links.inter_node is not None)
    made = contract(graph, links=costly, memory=memory_limit(asked.cluster) is not None)
    stages = max(asked.pipeline or (1,)) * max(asked.virtual or (1,))
    if len(made.graph) in (len(graph), 0) or stages > len(made.graph):
        return None
    return made


def on_the_original(found: Found, made: Contraction) -> Found:
    """The same answer with the original's layers."""

    def expanded(candidate: Candidate) -> Candidate:
        cut = made.expand([list(stage.layers) for stage in candidate.stages])
        again = [stage.recompute for stage in candidate.stages]
        job = job_of_cut(made.original, found.asked, candidate.configuration, cut, again)
        timeline = simulate(job, candidate.timeline.schedule, levels=False)
        return dataclasses.replace(candidate, job=job, timeline=timeline)

    best = expanded(found.best)
    sizes = sorted({size for size, _ in made.original.rows() if found.asked.global_batch % size == 0})
    if found.asked.microbatch is not None:
        sizes = [size for size in sizes if size in found.asked.microbatch]
    whole = {id(found.best): best}
    for one in (*found.alternatives, *found.by_schedule):
        if id(one) not in whole:
            whole[id(one)] = expanded(one)
    return dataclasses.replace(
        found,
        graph=made.original,
        best=best,
        bound_s=min(found.bound_s, best.iteration_s),
        alternatives=tuple(whole[id(one)] for one in found.alternatives),
        by_schedule=tuple(whole[id(one)] for one in found.by_schedule),
        baselines=baselines(made.original, found.asked, sizes),
    )
