"""Orders made better by local search: swap two neighbours on the critical path, look, go on.

The critical path goes back from the end of the last action, from each action to what it waited for: the action before
it on its rank, or the message that it needed. Only a swap of two neighbours on it can shorten the iteration. What a
swap would give is estimated from the longest paths to the start of either action and from its end; the best is taken,
even where it is worse than what there is, and not undone for a while (Nowicki and Smutnicki, 1996).

Here an action is one number, (letter · K + stage) · M + micro-batch; its kind is letter · K + stage.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Final

from planner.errors import InputError
from planner.schedules.action import Action, Letter, Schedule
from planner.simulate.costs import Handover
from planner.simulate.memory import held_in_order
from planner.simulate.model import simulate
from planner.simulate.timeline import Timeline
from planner.simulate.walk import Walk

_TENURE: Final = 8
"""For so many steps a swap is not undone, unless that beats the best."""

_SAME: Final = 1e-12
_LETTERS: Final = tuple(Letter)


def improve(
    walk: Walk, schedule: Schedule, *, steps: int, budget_bytes: tuple[float | None, ...], spans: bool = False
) -> list[Schedule]:
    """Better orders than the given one, the best first; none where ``steps`` swaps find none.

    ``spans``: look for orders that are as fast, and whose longest rank takes less from its first start to its last end.
    No rank's actions hold more than its budget beyond what it always holds (None: no limit). Deterministic.
    """
    search = _Search(walk, schedule, budget_bytes)
    best = _worth(simulate(walk, schedule, memory=False))
    found: list[Schedule] = []
    for step in range(steps):
        made = search.schedule()
        try:
            timeline = simulate(walk, made, memory=False)
        except InputError:  # ranks wait for each other: where actions last no time, a swap can bring that about
            break
        worth = _worth(timeline)
        if worth[0] < best[0] * (1 - _SAME) or (worth[0] <= best[0] * (1 + _SAME) and worth[1] < best[1] * (1 - _SAME)):
            best = worth
            found.append(made)
        sink = longest_rank(timeline) if spans else None
        if not search.swap(_Paths(search, timeline, sink), step, best[0] if sink is None else best[1]):
            break
    return found[::-1]


def _worth(timeline: Timeline) -> tuple[float, float]:
    """What an order is judged by: the iteration, then its longest rank's span."""
    rank = longest_rank(timeline)
    return timeline.iteration_s, span_s(timeline, rank)


def longest_rank(timeline: Timeline) -> int:
    """The rank that takes longest from its first start to its last end."""
    return max(range(len(timeline.schedule)), key=lambda rank: span_s(timeline, rank))


def span_s(timeline: Timeline, rank: int) -> float:
    """Seconds from a rank's first start to its last end."""
    return timeline.ends_s[rank][-1] - timeline.starts_s[rank][0]


class _Search:
    def __init__(self, walk: Walk, schedule: Schedule, budget_bytes: tuple[float | None, ...]) -> None:
        job = walk.job
        self.walk, self.budget_bytes = walk, budget_bytes
        self.num_stages, self.num_microbatches = len(job.stages), job.num_microbatches
        self.seconds = _seconds(walk)
        self.after = _after(walk)
        self.before: list[list[tuple[int, float]]] = [[] for _ in self.after]
        for source, targets in enumerate(self.after):
            for target, delay in targets:
                self.before[target].append((source, delay))
        self.actions = [
            Action(stage, letter, m)
            for letter in _LETTERS
            for stage in range(self.num_stages)
            for m in range(self.num_microbatches)
        ]
        self.orders = [[self._number(action) for action in order] for order in schedule]
        self.barred: dict[tuple[int, int], int] = {}

    def schedule(self) -> Schedule:
        """The orders as they stand."""
        actions = self.actions
        return tuple(tuple(actions[number] for number in order) for order in self.orders)

    def swap(self, paths: _Paths, step: int, best_s: float) -> bool:
        """Swap the two neighbours that promise most; False where there are none to swap."""
        swaps = []
        for rank, position in paths.critical_pairs():
            first, second = self.orders[rank][position : position + 2]
            if self._may_swap(first, second):
                estimate_s = paths.estimate(rank, position)
                if self.barred.get((second, first), -1) < step or estimate_s < best_s * (1 - _SAME):
                    swaps.append((estimate_s, rank, position))
        for _, rank, position in sorted(swaps):
            order, budget = self.orders[rank], self.budget_bytes[rank]
            first, second = order[position], order[position + 1]
            order[position], order[position + 1] = second, first
            if budget is None or held_in_order(self.walk.job, [self.actions[number] for number in order]) <= budget:
                self.barred[first, second] = step + _TENURE
                return True
            order[position], order[position + 1] = first, second
        return False

    def _number(self, action: Action) -> int:
        stage, letter, m = action
        return (_LETTERS.index(letter) * self.num_stages + stage) * self.num_microbatches + m

    def _may_swap(self, first: int, second: int) -> bool:
        """Two actions of one stage and letter keep their order, and what waits for the one before it does."""
        one, other = self.actions[first], self.actions[second]
        if one.microbatch != other.microbatch:
            return one.stage != other.stage or one.letter is not other.letter
        goals = self.after[first // self.num_microbatches]
        return one.stage != other.stage and all(goal != second // self.num_microbatches for goal, _ in goals)


class _Paths:
    """Of one timeline: when every action starts and ends, and the longest path from its end.

    ``sink``: the rank whose last action paths lead to, and from whose first one they are measured; None: to any end.
    """

    def __init__(self, search: _Search, timeline: Timeline, sink: int | None) -> None:
        self.search, self.timeline, self.sink = search, timeline, sink
        self.floor_s = 0.0 if sink is None else -math.inf
        self.origin_s = 0.0 if sink is None else timeline.starts_s[sink][0]
        self.start_s, self.end_s, self.tail_s = ([0.0] * len(search.actions) for _ in range(3))
        self.place = [(0, 0)] * len(search.actions)
        last = []
        for rank, order in enumerate(search.orders):
            for position, number in enumerate(order):
                self.start_s[number] = timeline.starts_s[rank][position]
                self.end_s[number] = timeline.ends_s[rank][position]
                self.place[number] = (rank, position)
                last.append((self.start_s[number], self.end_s[number], position, number))
        for *_, number in sorted(last, reverse=True):
            rank, position = self.place[number]
            self.tail_s[number] = max(self._tail(number), self._from(rank, position + 1))

    def critical_pairs(self) -> list[tuple[int, int]]:
        """Rank and position of every two neighbours on the critical path that follow each other without a gap."""
        orders, timeline = self.search.orders, self.timeline
        ending = [(ended[-1], rank) for rank, ended in enumerate(timeline.ends_s)]
        ending += [(closing.end_s, closing.rank) for closing in timeline.closings]
        number: int | None = orders[max(ending)[1] if self.sink is None else self.sink][-1]
        path = []
        while number is not None:
            path.append(number)
            rank, position = self.place[number]
            start_s = self.start_s[number]
            if position and self.end_s[orders[rank][position - 1]] >= start_s * (1 - _SAME):
                number = orders[rank][position - 1]
            else:
                number = self._awaited(number)
        places = [self.place[number] for number in reversed(path)]
        return [one for one, other in pairwise(places) if other == (one[0], one[1] + 1)]

    def estimate(self, rank: int, position: int) -> float:
        """The longest path through either of two neighbours if they were swapped; a lower bound, mostly exact."""
        order, seconds = self.search.orders[rank], self.search.seconds
        first, second = order[position : position + 2]
        one_s, other_s = (seconds[number // self.search.num_microbatches] for number in (first, second))
        before = self.end_s[order[position - 1]] if position else 0.0
        second_end = max(before, self._head(second)) + other_s
        first_end = max(second_end, self._head(first)) + one_s
        first_tail = max(self._tail(first), self._from(rank, position + 2))
        second_tail = max(self._tail(second), first_tail + one_s)
        return max(second_end + second_tail, first_end + first_tail) - self.origin_s

    def _awaited(self, number: int) -> int | None:
        """The action whose message, or result, an action waited for."""
        kind, m = divmod(number, self.search.num_microbatches)
        sources = [(source * self.search.num_microbatches + m, delay) for source, delay in self.search.before[kind]]
        return max(sources, key=lambda entry: self.end_s[entry[0]] + entry[1])[0] if sources else None

    def _head(self, number: int) -> float:
        num = self.search.num_microbatches
        kind, m = divmod(number, num)
        return max((self.end_s[source * num + m] + delay for source, delay in self.search.before[kind]), default=0.0)

    def _tail(self, number: int) -> float:
        num, seconds = self.search.num_microbatches, self.search.seconds
        kind, m = divmod(number, num)
        goals = self.search.after[kind]
        paths = (delay + seconds[goal] + self.tail_s[goal * num + m] for goal, delay in goals)
        return max(paths, default=self.floor_s)

    def _from(self, rank: int, position: int) -> float:
        """The longest path from the start of the action at a place; behind the last there is none."""
        order = self.search.orders[rank]
        if position >= len(order):
            return 0.0 if rank == self.sink else self.floor_s
        number = order[position]
        return self.search.seconds[number // self.search.num_microbatches] + self.tail_s[number]


def _seconds(walk: Walk) -> list[float]:
    """How long an action of each kind lasts."""
    made = {
        Letter.FORWARD: [c.forward_s + g.added_s for c, g in zip(walk.durations, walk.sends, strict=True)],
        Letter.BACKWARD: [c.backward_s + g.added_s for c, g in zip(walk.durations, walk.returns, strict=True)],
        Letter.BACKWARD_INPUT: [
            c.backward_input_s + g.added_s for c, g in zip(walk.durations, walk.returns, strict=True)
        ],
        Letter.BACKWARD_WEIGHT: [c.backward_weight_s for c in walk.durations],
    }
    return [seconds for letter in _LETTERS for seconds in made[letter]]


def _after(walk: Walk) -> list[list[tuple[int, float]]]:
    """Of each kind, the kinds of the same micro-batch that wait for it, and how long after its end at the least.

    A stage and micro-batch has a B or an I; whichever it has not counts as over at once.
    """
    num_stages = len(walk.job.stages)
    base = {letter: index * num_stages for index, letter in enumerate(_LETTERS)}
    backs = (base[Letter.BACKWARD], base[Letter.BACKWARD_INPUT])
    made: list[list[tuple[int, float]]] = [[] for _ in range(4 * num_stages)]
    for stage in range(num_stages):
        made[stage] = [*_delays(walk.sends[stage]), *((back + stage, 0.0) for back in backs)]
        for back in backs:
            made[back + stage] = [
                (then + goal, delay) for goal, delay in _delays(walk.returns[stage]) for then in backs
            ]
        made[backs[1] + stage].append((base[Letter.BACKWARD_WEIGHT] + stage, 0.0))
    return made


def _delays(given: Handover) -> list[tuple[int, float]]:
    """The stages that get something, and how long after the action's end at the least."""
    made = [(goal, 0.0) for goal in given.at_once]
    queued: dict[int, float] = {}
    for parcel in given.parcels:
        queued[parcel.to_rank] = queued.get(parcel.to_rank, 0.0) + parcel.busy_s
        made += [(goal, queued[parcel.to_rank] + parcel.latency_s) for goal in (parcel.to_stage, *parcel.riders)]
    return made
