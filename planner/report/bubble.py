"""Where a pipeline's idle time comes from: what no order can avoid, and what this one adds.

makespan with links          ─┐ links:     what goes when links are free
makespan with free links     ─┤ rest:      what is left to the order of actions
bound on it, any order       ─┤ skew:      to fill and to drain: the last rank cannot start at once, nor the first end
busy time of the busiest rank─┤ imbalance: ranks that have less to do wait for it
mean busy time               ─┘
"""

from __future__ import annotations

import dataclasses
from typing import Final

from planner.cluster import ClusterLinks
from planner.record import record
from planner.schedules import Letter
from planner.search.bound import cut_bound
from planner.simulate import Job, Timeline, Walk, simulate

_ROUNDING: Final = 1e-12


@record
class Bubble:
    """A rank's mean idle time up to the end of the last action, in seconds, by cause."""

    skew_s: float
    imbalance_s: float
    links_s: float
    rest_s: float


def bubble_of(job: Job, timeline: Timeline) -> Bubble:
    """The idle time of a simulated job, split by cause; its parts add up to bubble_fraction · makespan.

    Where transfers do not overlap with compute they are busy time, and links no cause.
    """
    alone = dataclasses.replace(
        job,
        ties=(),
        gradient_bytes_per_trainable_byte=0.0,
        step_s_per_trainable_byte=0.0,
        cluster=dataclasses.replace(job.cluster, memory_bytes=None),
    )
    if job.cluster.overlap is not False:
        alone = dataclasses.replace(alone, cluster=dataclasses.replace(alone.cluster, links=ClusterLinks()))
    walk = Walk(alone)
    free_s = simulate(walk, timeline.schedule, memory=False).makespan_s
    whole = all(action.letter in (Letter.FORWARD, Letter.BACKWARD) for order in timeline.schedule for action in order)
    busy = [use.busy_s for use in timeline.ranks]
    busiest, mean = max(busy), sum(busy) / len(busy)
    least = min(max(cut_bound(walk, fused=whole), busiest), free_s)
    parts = (least - busiest, busiest - mean, timeline.makespan_s - free_s, free_s - least)
    skew, imbalance, links, rest = (part if part > _ROUNDING * timeline.makespan_s else 0.0 for part in parts)
    return Bubble(skew_s=skew, imbalance_s=imbalance, links_s=links, rest_s=rest)
