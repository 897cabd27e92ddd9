"""V-half and V-min (Qi et al., 2024): zero bubble in a V at about 1/2 and 1/3 of the activations that 1F1B holds.

    v-min, P=2, M=3   rank 0: 0F0         3F0 3I0 3W0 0F1 0I0 0W0 3F1 3I1 3W1 0F2 0I1 0W1 3F2 3I2 3W2     0I2 0W2
                      rank 1:     1F0 2F0         2I0 1I0 1F1 2F1 2W0 1W0 2I1 1I1 1F2 2F2 2W1 1W1 2I2 1I2 ...

Both are one building block: the ticks at which micro-batch 0 runs, repeated every six ticks, since a rank has six
actions a micro-batch (F, I, W of its lower and of its upper stage). A stage's activations live from its F to its I, so
the block's shape alone says how much is held: V-min passes every action on after one tick; V-half holds forwards of
the lower stages and I's of the upper ones for two.

    v-min    lower F at r,    upper F at 2P-1-r,    upper I at 2P+r,       lower I at 4P-1-r
    v-half   lower F at 2r,   upper F at 3P-2-r,    upper I at 3P-1+2r,    lower I at 6P-2-r
"""

from __future__ import annotations

from planner.schedules.action import Action, Letter, Order, Schedule

_PERIOD = 6


def v_min(num_ranks: int, num_microbatches: int) -> Schedule:
    """About a third of 1F1B's activations. Where 3 divides P, backwards start two ticks later: none may collide."""
    late = 0 if num_ranks % 3 else 2

    def block(rank: int) -> tuple[int, int, int, int]:
        return rank, 2 * num_ranks - 1 - rank, 2 * num_ranks + rank + late, 4 * num_ranks - 1 - rank + late

    return tuple(_repeated(rank, num_ranks, num_microbatches, *block(rank)) for rank in range(num_ranks))


def v_half(num_ranks: int, num_microbatches: int) -> Schedule:
    """About half of 1F1B's activations. Where P is even, the last I's come three ticks later: none may collide."""
    late = 0 if num_ranks % 2 else 3

    def block(rank: int) -> tuple[int, int, int, int]:
        upper = 3 * num_ranks - 2
        return 2 * rank, upper - rank, upper + 1 + 2 * rank, 2 * upper + 2 - rank + late

    return tuple(_repeated(rank, num_ranks, num_microbatches, *block(rank)) for rank in range(num_ranks))


def _repeated(
    rank: int, num_ranks: int, num_microbatches: int, lower_f: int, upper_f: int, upper_i: int, lower_i: int
) -> Order:
    """A rank's actions by tick: the block for each micro-batch, each W at the first tick that is free after its I."""
    lower, upper = rank, 2 * num_ranks - 1 - rank
    taken = {tick % _PERIOD for tick in (lower_f, upper_f, upper_i, lower_i)}
    assert len(taken) == 4, "two actions of a building block collide"
    block = [(lower_f, lower, "F"), (upper_f, upper, "F"), (upper_i, upper, "I"), (lower_i, lower, "I")]
    for after, stage in ((upper_i, upper), (lower_i, lower)):
        tick = next(tick for tick in range(after, after + _PERIOD) if tick % _PERIOD not in taken)
        taken.add(tick % _PERIOD)
        block.append((tick, stage, "W"))
    ticks = [
        (tick + m * _PERIOD, Action(stage, Letter(letter), m))
        for tick, stage, letter in block
        for m in range(num_microbatches)
    ]
    return tuple(action for _, action in sorted(ticks))
