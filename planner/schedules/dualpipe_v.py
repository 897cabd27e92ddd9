"""DualPipeV (DeepSeek, 2025; the cut-in-half DualPipe): ZB-V's placement, full B's in the middle, I and W at the ends.

    P=2, M=4   rank 0: 0F0 0F1 0F2     3F0 3I0 3W0 3F1 0F3 3B1 3F2 0B0 3B2 3F3 0B1 3B3 0I2 0W2 0I3 0W3
               rank 1:     1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 1F3 2B1 2F3 1B1 2B2 1B2 2I3 1I3 2W3 1W3

Where the original runs a forward beside a backward of another micro-batch, they run one after the other here. Made for
at least 2P micro-batches; for fewer it is that table less the micro-batches that there are not.
"""

from __future__ import annotations

from collections import deque

from planner.schedules.action import Action, Letter, Order, Schedule


def dualpipe_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """The eight steps of DualPipeV, in the order of its authors; W's wait in a queue, I and W of a stage in order."""
    filled = max(2 * num_ranks, num_microbatches)

    def order(rank: int) -> Order:
        low, high = rank, 2 * num_ranks - 1 - rank
        actions: list[Action] = []
        forwards, backwards = {low: 0, high: 0}, {low: 0, high: 0}
        waiting: deque[Action] = deque()

        def forward(stage: int) -> None:
            actions.append(Action(stage, Letter.FORWARD, forwards[stage]))
            forwards[stage] += 1

        def backward(stage: int, *, split: bool = False) -> None:
            letter = Letter.BACKWARD_INPUT if split else Letter.BACKWARD
            actions.append(Action(stage, letter, backwards[stage]))
            if split:
                waiting.append(Action(stage, Letter.BACKWARD_WEIGHT, backwards[stage]))
            backwards[stage] += 1

        for _ in range(2 * (num_ranks - rank - 1)):
            forward(low)
        for _ in range(rank + 1):
            forward(low)
            forward(high)
        for _ in range(num_ranks - rank - 1):
            backward(high, split=True)
            actions.append(waiting.popleft())
            forward(high)
        for _ in range(filled - 2 * num_ranks + rank + 1):
            forward(low)
            backward(high)
            forward(high)
            backward(low)
        for _ in range(num_ranks - rank - 1):
            backward(high)
            forward(high)
            backward(low)
        for half in range(2 * (rank + 1)):  # the second half of these splits
            backward(low if half % 2 else high, split=half > rank)
        for _ in range(num_ranks - rank - 1):
            actions.append(waiting.popleft())
            backward(low, split=True)
        return tuple(action for action in (*actions, *waiting) if action.microbatch < num_microbatches)

    return tuple(map(order, range(num_ranks)))
