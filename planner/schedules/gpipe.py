"""GPipe (Huang et al., 2019): all forwards, then all backwards; every activation is held.

P=3, M=4    rank 0: 0F0 0F1 0F2 0F3                             0B0 0B1 0B2 0B3
            rank 1:     1F0 1F1 1F2 1F3             1B0 1B1 1B2 1B3
            rank 2:         2F0 2F1 2F2 2F3 2B0 2B1 2B2 2B3
"""

from __future__ import annotations

from planner.schedules.action import Action, Letter, Order, Schedule


def gpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """M forwards, then M backwards, on each of P ranks."""

    def order(rank: int) -> Order:
        letters = (Letter.FORWARD, Letter.BACKWARD)
        return tuple(Action(rank, letter, m) for letter in letters for m in range(num_microbatches))

    return tuple(map(order, range(num_ranks)))
