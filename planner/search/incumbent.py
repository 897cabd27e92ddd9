"""Cuts to begin with where there are too many to look at: along topological orders, and near a given one."""

from __future__ import annotations

import random
from collections.abc import Iterator

from planner.graph import LayerGraph

_DEPTH_FIRST = 0.85


def topological_orders(graph: LayerGraph, count: int) -> Iterator[list[int]]:
    """So many orders: the profile's own, then random ones, from nearly depth first to nearly breadth first.

    Depth first (go on from the layer just placed) mostly gives the better cuts. The same graph gives the same orders.
    """
    yield list(range(len(graph)))
    rng = random.Random(0)
    following: list[list[int]] = [[] for _ in graph.names]
    needed = [0] * len(graph)
    for source, target in graph.edges:
        following[source].append(target)
        needed[target] += 1
    for turn in range(1, count):
        deep = _DEPTH_FIRST if turn % 4 else 1 - _DEPTH_FIRST
        yield _random_order(following, list(needed), rng, deep)


def _random_order(following: list[list[int]], missing: list[int], rng: random.Random, deep: float) -> list[int]:
    ready = [layer for layer, count in enumerate(missing) if count == 0]
    order: list[int] = []
    while ready:
        place = len(ready) - 1 if rng.random() < deep else rng.randrange(len(ready))
        layer = ready.pop(place)
        order.append(layer)
        opened = []
        for target in following[layer]:
            missing[target] -= 1
            if missing[target] == 0:
                opened.append(target)
        rng.shuffle(opened)
        ready += opened
    return order


def moved(graph: LayerGraph, cut: list[list[str]]) -> Iterator[list[list[str]]]:
    """Every cut that differs in one layer, which lies a stage earlier or later there; no stage is left empty."""
    stage_of = {name: stage for stage, names in enumerate(cut) for name in names}
    for name, stage in stage_of.items():
        if len(cut[stage]) == 1:
            continue
        feeding = graph.digraph.predecessors(name)
        if stage > 0 and all(stage_of[other] < stage for other in feeding):
            yield _with(cut, name, stage, stage - 1)
        reading = graph.digraph.successors(name)
        if stage + 1 < len(cut) and all(stage_of[other] > stage for other in reading):
            yield _with(cut, name, stage, stage + 1)


def _with(cut: list[list[str]], name: str, origin: int, target: int) -> list[list[str]]:
    made = [list(names) for names in cut]
    made[origin].remove(name)
    made[target].append(name)
    return made
