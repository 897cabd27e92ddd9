"""Looped breadth first (Lamy-Poirier, 2022): GPipe with v stages a rank, one stage after the other.

    P=2, v=2, M=3    rank 0: 0F0 0F1 0F2 2F0 2F1 2F2             2B0 2B1 2B2 0B0 0B1 0B2
                     rank 1:     1F0 1F1 1F2 3F0 3F1 3F2 3B0 3B1 3B2 1B0 1B1 1B2

Backwards run in the order of micro-batches, 0..M-1, so that gradients add up as in one process.
"""

from __future__ import annotations

from planner.schedules.action import Action, Letter, Order, Schedule


def looped_bfs(num_ranks: int, virtual: int, num_microbatches: int) -> Schedule:
    """Each rank's stages k mod P = r: all their forwards, lowest stage first, then all backwards, highest first."""

    def order(rank: int) -> Order:
        stages = [rank + chunk * num_ranks for chunk in range(virtual)]
        forwards = [Action(k, Letter.FORWARD, m) for k in stages for m in range(num_microbatches)]
        backwards = [Action(k, Letter.BACKWARD, m) for k in reversed(stages) for m in range(num_microbatches)]
        return (*forwards, *backwards)

    return tuple(map(order, range(num_ranks)))
