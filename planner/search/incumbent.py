"""Topological orders to cut along, where a graph has too many ideals for all of them to be looked at."""

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
