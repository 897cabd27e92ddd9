"""ZB-H1 and ZB-H2 (Qi et al., 2023), and ZB-H1 over v stages a rank: B split in I and W, W put where the rank waits.

    zb-h1, P=3, M=4   rank 0: 0F0 0F1 0F2         0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
                      rank 1:     1F0 1F1     1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3
                      rank 2:         2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3

    zb-h2, P=2, M=4   rank 0: 0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
                      rank 1:     1F0 1I0 1F1 1I1 1F2 1I2 1W0 1F3 1I3 1W1 1W2 1W3

Each W comes warmup[0] - warmup[r] of the rank's I's after its own: what a rank holds less by its shallower warm-up, it
may hold in weights' gradients still to do. ZB-H2 is ZB-H1 at twice the depth less one.
"""

from __future__ import annotations

from collections.abc import Sequence

from planner.schedules.action import Action, Letter, Order, Schedule
from planner.schedules.interleaved import in_rounds


def zb_h1(num_ranks: int, virtual: int, num_microbatches: int, warmup: Sequence[int]) -> Schedule:
    """On rank r ``warmup[r]`` forwards, then I, the W that is due, and a forward in turn, then the W's that remain."""

    def order(rank: int) -> Order:
        forwards, backwards = in_rounds(rank, num_ranks, virtual, num_microbatches)
        ahead, behind = warmup[rank], max(0, warmup[0] - warmup[rank])
        actions = [Action(stage, Letter.FORWARD, m) for stage, m in forwards[:ahead]]
        for turn, (stage, m) in enumerate(backwards):
            actions.append(Action(stage, Letter.BACKWARD_INPUT, m))
            if turn >= behind:
                actions.append(Action(backwards[turn - behind][0], Letter.BACKWARD_WEIGHT, backwards[turn - behind][1]))
            if turn + ahead < len(forwards):
                actions.append(Action(forwards[turn + ahead][0], Letter.FORWARD, forwards[turn + ahead][1]))
        remain = backwards[max(0, len(backwards) - behind) :]
        return (*actions, *(Action(stage, Letter.BACKWARD_WEIGHT, m) for stage, m in remain))

    return tuple(map(order, range(num_ranks)))


def zb_h1_depths(num_ranks: int, virtual: int, num_microbatches: int) -> tuple[int, ...]:
    """Forwards before the first I of ZB-H1: (P-1-r) + (v-1)g + 1 with g = min(P, M), at most v·M."""
    size = min(num_ranks, num_microbatches)
    hops = range(num_ranks - 1, -1, -1)
    return tuple(min(hop + (virtual - 1) * size + 1, virtual * num_microbatches) for hop in hops)


def zb_h2(num_ranks: int, num_microbatches: int) -> Schedule:
    """ZB-H1 (v = 1) with 2(P-r) - 1 forwards, at most M, before rank r's first I."""
    depths = [min(2 * (num_ranks - rank) - 1, num_microbatches) for rank in range(num_ranks)]
    return zb_h1(num_ranks, 1, num_microbatches, depths)
