"""ZB-V (Qi et al., 2023): two stages a rank in a V, so that the first micro-batch comes back without a wait.

    P=2, M=4   rank 0: 0F0 0F1 0F2         3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 ...
               rank 1:     1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 ...

Made for at least 2P-1 micro-batches; for fewer it is that table less the micro-batches that there are not.
"""

from __future__ import annotations

from planner.schedules.action import Action, Letter, Order, Schedule


def zb_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """Warm-up, then F I W of the lower and of the upper stage in turn, then the I's, with W's where the rank waits."""
    filled = max(2 * num_ranks - 1, num_microbatches)

    def order(rank: int) -> Order:
        low, high = rank, 2 * num_ranks - 1 - rank
        actions: list[Action] = []
        done = {(stage, letter): 0 for stage in (low, high) for letter in Letter}

        def run(stage: int, letters: str) -> None:
            for letter in map(Letter, letters):
                actions.append(Action(stage, letter, done[stage, letter]))
                done[stage, letter] += 1

        for _ in range(2 * (num_ranks - rank) - 1):
            run(low, "F")
        for _ in range(rank):
            run(high, "F")
            run(low, "F")
        for _ in range(num_ranks - rank):
            run(high, "FIW")
        while done[high, Letter.FORWARD] < filled:
            run(low, "FIW" if done[low, Letter.FORWARD] < filled else "IW")
            run(high, "FIW")
        for _ in range(rank):
            run(low, "I")
            run(high, "I")
        for _ in range(num_ranks - rank):
            run(low, "IW")
        for stage in (high, low):
            run(stage, "W" * (filled - done[stage, Letter.BACKWARD_WEIGHT]))
        return tuple(action for action in actions if action.microbatch < num_microbatches)

    return tuple(map(order, range(num_ranks)))
