"""What crosses each boundary of a cut, and what would a layer or two to either side: where activations are narrow.

With the stages one after another their layers stand in a topological order; a position in it is a cut of the graph.
"""

from __future__ import annotations

from itertools import accumulate

from planner.graph import LayerGraph, Stage
from planner.record import record

REACH = 2
"""Positions to either side."""


@record
class Boundary:
    """Between stage k and k + 1. ``bytes[REACH]`` is what crosses there ahead, a micro-batch; None: no position."""

    before_stage: int
    after_layer: str
    bytes: tuple[int | None, ...]


def boundaries_of(graph: LayerGraph, stages: tuple[Stage, ...], *, microbatch_size: int, tensor: int) -> list[Boundary]:
    """Every boundary of a cut, with what crosses at the positions near it."""
    order = [name for stage in stages for name in stage.layers]
    place = {graph.index[name]: position for position, name in enumerate(order)}
    change = [0] * (len(order) + 1)  # of what crosses, at the position after each layer
    for held in graph.tensors:
        last = max(place[reader.layer] for reader in held.readers)
        change[place[held.source]] += held.bytes(microbatch_size, tensor)
        change[last] -= held.bytes(microbatch_size, tensor)
    crossing = list(accumulate(change))  # crossing[i]: after the layer at position i
    made, end = [], 0
    for stage in stages[:-1]:
        end += len(stage.layers)
        near = range(end - 1 - REACH, end + REACH)
        made.append(
            Boundary(
                before_stage=stage.stage + 1,
                after_layer=order[end - 1],
                bytes=tuple(crossing[at] if 0 <= at < len(order) - 1 else None for at in near),
            )
        )
    return made
