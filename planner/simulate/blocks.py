"""Orders that repeat one block: when one micro-batch runs through all ranks and back, again and again a period later.

    v = 2 in a V     rank 0:  F0  .  .  .  F3 I3 W3 I0 W0      a block; the next begins a period later
                     rank 1:     F1 .  F2 I2  W2 I1  W1

A period is the load of the busiest rank, so with many micro-batches that rank never waits. A rank's actions may not
overlap in it, taken round as on a clock: each is placed at the first time after what it waits for where it is free and
where what is still to be placed on that rank fits too (modulo scheduling: Rau, 1994; as building blocks of pipelines:
Qi et al., 2024). What a rank holds follows from how long a micro-batch takes from F to I, in periods. F's that are
put off (by a ``gap``) hold more and fill the pipeline sooner: while it fills, nothing is waited for, and what may begin
ahead of its gradients does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

from planner.schedules.action import Action, Letter, Schedule
from planner.simulate.memory import held_in_order
from planner.simulate.walk import Walk

_HAIR: Final = 1e-10
"""Of a period: closer than this two times are the same."""
_MOST_LEFT: Final = 5
"""Actions still to be placed of which all sums are tried as room to leave between two others."""
_MOST_TRIES: Final = 200
"""Steps of a search for places for all that is left."""


class Placed(NamedTuple):
    """An action of a block: of which stage, when it starts (seconds), and its turn among those that start together."""

    start_s: float
    turn: int
    stage: int
    letter: Letter


def repeated(walk: Walk, block: Sequence[Placed], period_s: float, count: int | None = None) -> Schedule:
    """The order of every rank's actions where a block begins in each period; ``count`` blocks (None: M)."""
    count = walk.job.num_microbatches if count is None else count
    own: list[list[tuple[float, int, int, int, Letter]]] = [[] for _ in range(walk.job.num_ranks)]
    for placed in block:
        turns = math.floor(placed.start_s / period_s + _HAIR)
        phase = max(placed.start_s - turns * period_s, 0.0)
        own[walk.job.stages[placed.stage].rank].append((phase, placed.turn, turns, placed.stage, placed.letter))
    orders = []
    for row in own:
        row.sort()
        last = max((turns for _, _, turns, _, _ in row), default=0)
        orders.append(
            tuple(
                Action(stage, letter, period - turns)
                for period in range(count + last)
                for _, _, turns, stage, letter in row
                if 0 <= period - turns < count
            )
        )
    return tuple(orders)


def block(walk: Walk, period_s: float, *, split: bool, gap: float = 0.0) -> tuple[Placed, ...]:
    """When one micro-batch's actions run, period after period.

    ``period_s``: the load of the busiest rank, or more. ``gap``: by how many times its own length what an F hands on is
    put off. ``split``: with I and W, else with whole backwards.
    """
    return _Block(walk, period_s, split).made(gap)


class _Block:
    def __init__(self, walk: Walk, period_s: float, split: bool) -> None:
        self.walk: Final = walk
        self.split: Final = split
        self.forward_s: Final = [
            cost.forward_s + sends.added_s for cost, sends in zip(walk.durations, walk.sends, strict=True)
        ]
        self.back_s: Final = [
            (cost.backward_input_s if split else cost.backward_s) + returns.added_s
            for cost, returns in zip(walk.durations, walk.returns, strict=True)
        ]
        self.weight_s: Final = [cost.backward_weight_s if split else 0.0 for cost in walk.durations]
        own: list[list[float]] = [[] for _ in range(walk.job.num_ranks)]
        for stage in walk.job.stages:
            k = stage.stage
            own[stage.rank] += [self.forward_s[k], self.back_s[k], *([self.weight_s[k]] if split else [])]
        self.clocks: Final = [_Clock(period_s, lengths) for lengths in own]
        self.placed: Final[list[Placed]] = []

    def made(self, gap: float) -> tuple[Placed, ...]:
        stages = range(len(self.walk.job.stages))
        ready, back, ended = ([0.0] * len(stages) for _ in range(3))
        for k in stages:
            end = self._place(k, Letter.FORWARD, ready[k], self.forward_s[k])
            back[k] = max(back[k], end)
            for goal, there in self.walk.sends[k].arrivals(end + gap * self.forward_s[k]):
                ready[goal] = max(ready[goal], there)
        letter = Letter.BACKWARD_INPUT if self.split else Letter.BACKWARD
        for k in reversed(stages):
            ended[k] = self._place(k, letter, back[k], self.back_s[k])
            for goal, there in self.walk.returns[k].arrivals(ended[k]):
                back[goal] = max(back[goal], there)
        for k in sorted(stages, key=lambda k: -self.weight_s[k]) if self.split else ():
            self._place(k, Letter.BACKWARD_WEIGHT, ended[k], self.weight_s[k])
        return tuple(self.placed)

    def _place(self, stage: int, letter: Letter, ready_s: float, seconds: float) -> float:
        """Place an action; when it ends."""
        start_s = self.clocks[self.walk.job.stages[stage].rank].place(ready_s, seconds)
        self.placed.append(Placed(start_s, len(self.placed), stage, letter))
        return start_s + seconds


class _Clock:
    """One rank's period, round: what is taken of it (start, length), and the lengths of what is still to be placed."""

    def __init__(self, period_s: float, lengths: list[float]) -> None:
        self.period_s: Final = period_s
        self.taken: list[tuple[float, float]] = []
        self.left: list[float] = sorted(lengths, reverse=True)

    def place(self, ready_s: float, seconds: float) -> float:
        """The first start from ``ready_s`` on where an action neither overlaps nor keeps another from a place.

        Where no such start is found it overlaps: the order holds all the same, and the rank takes longer than a period.
        """
        self.left.remove(seconds)
        if not seconds:
            return ready_s
        phase = ready_s % self.period_s
        for start in sorted(self._starts(phase, seconds), key=lambda start: self._wait_s(phase, start)):
            if self._is_free(start, seconds) and _fit(self._gaps((start, seconds)), self.left):
                self.taken.append((start, seconds))
                return ready_s + self._wait_s(phase, start)
        self.taken.append((phase, seconds))
        return ready_s

    def _wait_s(self, phase: float, start: float) -> float:
        wait_s = (start - phase) % self.period_s
        return 0.0 if wait_s >= self.period_s * (1 - _HAIR) else wait_s

    def _starts(self, phase: float, seconds: float) -> set[float]:
        """At once, or beside another action with room between them for nothing, or for some of what is left."""
        rooms = {0.0}
        if len(self.left) <= _MOST_LEFT:
            for length in self.left:
                rooms |= {room + length for room in rooms}
        starts = {phase}
        for start, length in self.taken:
            starts |= {(start + length + room) % self.period_s for room in rooms}
            starts |= {(start - seconds - room) % self.period_s for room in rooms}
        return starts

    def _is_free(self, start: float, seconds: float) -> bool:
        """Whether an action overlaps with none that is placed."""
        hair = _HAIR * self.period_s
        for other, length in self.taken:
            after = self._wait_s(other, start)
            if after < length - hair or self.period_s - after < seconds - hair:
                return False
        return True

    def _gaps(self, another: tuple[float, float]) -> list[float]:
        """Free time between what is placed and one more."""
        taken = sorted((*self.taken, another))
        following = [start for start, _ in taken[1:]] + [taken[0][0] + self.period_s]
        return [max(after - start - length, 0.0) for (start, length), after in zip(taken, following, strict=True)]


def _fit(gaps: list[float], lengths: list[float]) -> bool:
    """Whether lengths, the longest first, are found to fit into gaps: each into the least that holds it, or another."""
    gaps, tries = list(gaps), iter(range(_MOST_TRIES))

    def rest(place: int) -> bool:
        if place == len(lengths):
            return True
        length = lengths[place] * (1 - _HAIR)
        for gap in sorted({gap for gap in gaps if gap >= length}):
            if next(tries, None) is None:
                return False
            at = gaps.index(gap)
            gaps[at] = gap - lengths[place]
            if rest(place + 1):
                return True
            gaps[at] = gap
        return False

    return rest(0)


def held(walk: Walk, block: Sequence[Placed], period_s: float) -> list[int]:
    """The most bytes that a rank's actions hold beyond what it always holds, messages aside, while a block repeats."""
    trips = math.ceil(max(placed.start_s for placed in block) / period_s) + 1
    order_of = repeated(walk, block, period_s, min(walk.job.num_microbatches, trips))
    return [held_in_order(walk.job, order) for order in order_of]


def busiest_s(walk: Walk) -> float:
    """The work of one micro-batch on the rank that has most of it (seconds)."""
    loads = [0.0] * walk.job.num_ranks
    for stage, cost, sends, returns in zip(walk.job.stages, walk.durations, walk.sends, walk.returns, strict=True):
        loads[stage.rank] += cost.forward_s + cost.backward_input_s + cost.backward_weight_s
        loads[stage.rank] += sends.added_s + returns.added_s
    return max(loads)
