"""1F1B (Narayanan et al., 2019), with any warm-up depth per rank.

P=3, M=4, warm-up 3 2 1    rank 0: 0F0 0F1 0F2         0B0 0F3 0B1     0B2     0B3
                           rank 1:     1F0 1F1     1B0 1F2 1B1 1F3 1B2     1B3
                           rank 2:         2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3
"""

from __future__ import annotations

from collections.abc import Sequence

from planner.schedules.action import Action, Letter, Order, Schedule


def one_f_one_b(num_ranks: int, num_microbatches: int, warmup: Sequence[int]) -> Schedule:
    """On rank r ``warmup[r]`` forwards, then a backward and a forward in turn, then the backwards that remain."""

    def order(rank: int) -> Order:
        actions = [Action(rank, Letter.FORWARD, m) for m in range(warmup[rank])]
        for m in range(num_microbatches):
            actions.append(Action(rank, Letter.BACKWARD, m))
            if m + warmup[rank] < num_microbatches:
                actions.append(Action(rank, Letter.FORWARD, m + warmup[rank]))
        return tuple(actions)

    return tuple(map(order, range(num_ranks)))


def default_depths(num_ranks: int, num_microbatches: int) -> tuple[int, ...]:
    """Forwards before rank r's first B: P - r, at most M."""
    return tuple(min(num_ranks - rank, num_microbatches) for rank in range(num_ranks))
