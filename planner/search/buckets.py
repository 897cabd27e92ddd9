"""One rank's stages as buckets of the all-reduce: the order in which they end decides how much of it is hidden.

Micro-batches go one by one, the last ones stage by stage: all that leads to the last action of the stage that is to end
first, then what else leads to that of the next, and so on. The more of them go stage by stage, the sooner the first
stages end, whose sums then run beside the rest; with all of them the bound of the cut is reached, where memory holds
them.
"""

from __future__ import annotations

from collections.abc import Iterator

from planner.schedules import Action, Letter, Schedule, Wiring
from planner.search.bound import ending_order
from planner.simulate import Walk

_Node = tuple[Letter, int]


def in_buckets(walk: Walk) -> Iterator[Schedule]:
    """Orders of a job of one rank, whole and split, with one micro-batch, two, four, ... up to all of them together.

    The first ones hold the least; with none limited by memory the last one reaches the bound of the cut.
    """
    every = [(fused, _stage_by_stage(walk, fused=fused)) for fused in (True, False)]
    count, together = walk.job.num_microbatches, 1
    while True:
        for fused, order in every:
            yield _built(walk, order, together, fused=fused)
        if together == count:
            return
        together = min(2 * together, count)


def _stage_by_stage(walk: Walk, *, fused: bool) -> list[_Node]:
    """Every action of one micro-batch, those that lead to the end of the stage that ends first before the others."""
    wiring = Wiring.of(walk.job.stages)
    back = Letter.BACKWARD if fused else Letter.BACKWARD_INPUT
    made: dict[_Node, None] = {}

    def add(node: _Node) -> None:
        letter, stage = node
        if node in made:
            return
        if letter is Letter.FORWARD:
            for sender in wiring.senders[stage]:
                add((letter, sender))
        elif letter is back:
            add((Letter.FORWARD, stage))
            for returner in wiring.returners[stage]:
                add((letter, returner))
        else:
            add((back, stage))
        made[node] = None

    for stage in ending_order(walk, fused=fused):
        add((back if fused else Letter.BACKWARD_WEIGHT, stage))
    return list(made)


def _built(walk: Walk, order: list[_Node], together: int, *, fused: bool) -> Schedule:
    """Micro-batches one by one, the last ones action by action in an order."""
    stages, count = range(len(walk.job.stages)), walk.job.num_microbatches
    backs = (Letter.BACKWARD,) if fused else (Letter.BACKWARD_INPUT, Letter.BACKWARD_WEIGHT)
    alone = [(Letter.FORWARD, k) for k in stages] + [(letter, k) for k in stages[::-1] for letter in backs]
    first = [Action(k, letter, m) for m in range(count - together) for letter, k in alone]
    last = [Action(k, letter, m) for letter, k in order for m in range(count - together, count)]
    return ((*first, *last),)
