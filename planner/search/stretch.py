"""How many micro-batches each stage may hold between F and I, where ranks of several stages have little memory.

A micro-batch is held by a stage for its round trip: all F's and I's behind it, links, and what it waits at busy ranks,
which makes it longer than it need be by some factor, its stretch. So a stage that is to go on without a pause holds

    depth = round trip · stretch / pace + slack,    pace: the load of the busiest rank

micro-batches. A rank whose memory does not hold so many of all of its stages gets the largest stretch that it holds:
what is there is shared by the length of the trips, so that no stage floods the next while another starves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from planner.graph import Stage
from planner.schedules import Letter
from planner.simulate import Walk
from planner.simulate.memory import held_by

STRETCHES: Final = (3.0, 1.8, 1.4)
"""Stretches tried, those that most often do best first."""
_HALVINGS: Final = 12


def stretched(
    walk: Walk, budgets: Sequence[float | None], stretch: float, slack: float, *, split: bool
) -> tuple[int, ...] | None:
    """Depths of all stages that fit together; None where a rank does not hold one micro-batch of each of its stages.

    ``budgets``: what each rank may hold beside what it always holds, in bytes.
    """
    job = walk.job
    trips, made = _round_trips(walk, split), [1] * len(job.stages)
    pace_s = max(_loads(walk)) or 1.0
    for rank, budget in enumerate(budgets):
        own = [stage for stage in job.stages if stage.rank == rank]

        def depths(factor: float, own: list[Stage] = own) -> list[int]:
            wanted = (math.ceil(trips[stage.stage] * factor / pace_s + slack - 1e-9) for stage in own)
            return [max(1, min(job.num_microbatches, depth)) for depth in wanted]

        chosen = depths(stretch)
        if budget is not None:
            room = budget - _burst(own, split)
            kept = [held_by(stage, Letter.FORWARD)[1] for stage in own]

            def fits(tried: Sequence[int], room: float = room, kept: list[int] = kept) -> bool:
                return sum(depth * size for depth, size in zip(tried, kept, strict=True)) <= room

            low, high = 0.0, stretch
            if not fits(chosen):
                chosen = depths(low)
                if not fits(chosen):
                    chosen = [1] * len(own)
                    high = 0.0
                if not fits(chosen):
                    return None
                for _ in range(_HALVINGS):
                    middle = (low + high) / 2
                    if fits(depths(middle)):
                        low, chosen = middle, depths(middle)
                    else:
                        high = middle
        for stage, depth in zip(own, chosen, strict=True):
            made[stage.stage] = depth
    return tuple(made)


def _burst(own: Sequence[Stage], split: bool) -> int:
    """What a rank's running actions take beside what its stages keep."""
    back = Letter.BACKWARD_INPUT if split else Letter.BACKWARD
    return max((max(max(held_by(s, back)), s.workspace_bytes) for s in own), default=0)


def _loads(walk: Walk) -> list[float]:
    loads = [0.0] * walk.job.num_ranks
    for stage, cost in zip(walk.job.stages, walk.durations, strict=True):
        loads[stage.rank] += cost.forward_s + cost.backward_s
    return loads


def _round_trips(walk: Walk, split: bool) -> list[float]:
    """Seconds from each stage's F to the end of its B (or I), of a lone micro-batch."""
    stages = range(len(walk.job.stages))
    begun, back, made = [0.0] * len(stages), [0.0] * len(stages), [0.0] * len(stages)
    for k in stages:
        end = begun[k] + walk.durations[k].forward_s + walk.sends[k].added_s
        back[k] = max(back[k], end)
        for goal, there in walk.sends[k].arrivals(end):
            begun[goal] = max(begun[goal], there)
    for k in reversed(stages):
        cost = walk.durations[k]
        end = back[k] + (cost.backward_input_s if split else cost.backward_s) + walk.returns[k].added_s
        made[k] = end - begun[k]
        for goal, there in walk.returns[k].arrivals(end):
            back[goal] = max(back[goal], there)
    return made
