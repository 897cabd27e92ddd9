"""Which pipeline rank runs which stage.

loop, P=4, v=2          v, P=4 (v=2)
rank 0: 0 4             rank 0: 0 7
rank 1: 1 5             rank 1: 1 6
rank 2: 2 6             rank 2: 2 5
rank 3: 3 7             rank 3: 3 4
"""

from __future__ import annotations

from planner.schedules.names import Placement


def rank_of(stage: int, num_ranks: int, virtual: int, placement: Placement) -> int:
    """The pipeline rank of a stage, 0..K-1 with K = P·v. FREE has no rule: there the plan's stages say it."""
    if placement is Placement.LOOP:
        return stage % num_ranks
    if placement is Placement.V and virtual == 2:
        return min(stage, 2 * num_ranks - 1 - stage)
    raise ValueError(f"placement {placement} gives no rank at v={virtual}")


def ranks_of(num_ranks: int, virtual: int, placement: Placement) -> tuple[int, ...]:
    """The rank of every stage, 0..K-1."""
    return tuple(rank_of(stage, num_ranks, virtual, placement) for stage in range(num_ranks * virtual))
