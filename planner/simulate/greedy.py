"""An order of actions by list scheduling: whenever a rank is free it takes the most pressing action that is ready.

Of each stage a rank knows which micro-batch is next to go forward, backward, and (where B is split) through W:
micro-batches are alike, so no order that takes them out of turn is faster. That leaves at most three candidates a
stage. Backwards press most, then forwards, then W, which nothing waits for.

Memory: a forward starts only where the rank keeps room to bring the oldest micro-batch that it has begun through all
of its stages; so that one can always go on, and with it, in the end, all.
"""

from __future__ import annotations

import heapq
import math
from enum import StrEnum

from planner.graph.stage import Stage
from planner.record import record
from planner.schedules.action import Action, Letter, Schedule
from planner.simulate.costs import Handover
from planner.simulate.memory import held_by
from planner.simulate.walk import Walk


class Turn(StrEnum):
    """Which of several stages' forwards (or backwards) on a rank comes first."""

    DEEPEST = "deepest"
    """The one nearest to the end of the pipeline (backwards: nearest to its start): finish what has begun."""
    ROUNDS = "rounds"
    """P micro-batches through one stage, then through the next, as interleaved 1F1B does it."""


@record
class Rule:
    """How a greedy order decides.

    ``alternate``: right after a backward a forward presses more than the next backward. ``patience``: before its first
    backward a rank puts an action off if a more pressing one is known to be ready before that fraction of it has
    passed, so that the first gradients come back fast. ``budget_bytes[r]``: what rank r may hold beyond what it always
    holds; ``ahead[r]``: how many of its forwards may be without their backward (None: no limit); ``window``: how many
    micro-batches may be on their way through the first stage and back; ``behind[r]``: how many W's rank r may leave
    undone before one presses more than a forward.
    """

    split: bool
    turn: Turn = Turn.DEEPEST
    alternate: bool = False
    patience: float = 0.0
    budget_bytes: tuple[float | None, ...]
    ahead: tuple[int | None, ...] | None = None
    window: int | None = None
    behind: tuple[int, ...] | None = None


def greedy(walk: Walk, rule: Rule) -> Schedule | None:
    """The order that a rule makes for a job; None where the budget does not let it come to an end."""
    run = _Run(walk, rule)
    while run.events:
        now, rank = heapq.heappop(run.events)
        if run.free_s[rank] <= now:
            run.decide(rank, now)
    done = len(walk.job.stages) * walk.job.num_microbatches * (3 if rule.split else 2)
    return tuple(map(tuple, run.orders)) if sum(map(len, run.orders)) == done else None


class _StageRun:
    """One stage while the order is made: what it costs and holds, how far it is, when its next inputs are there."""

    def __init__(self, walk: Walk, stage: Stage, split: bool) -> None:
        cost, number = walk.durations[stage.stage], stage.stage
        self.number = number
        self.sent, self.returned = walk.sends[number], walk.returns[number]
        self.back = Letter.BACKWARD_INPUT if split else Letter.BACKWARD
        self.seconds = {
            Letter.FORWARD: cost.forward_s + self.sent.added_s,
            Letter.BACKWARD: cost.backward_s + self.returned.added_s,
            Letter.BACKWARD_INPUT: cost.backward_input_s + self.returned.added_s,
            Letter.BACKWARD_WEIGHT: cost.backward_weight_s,
        }
        self.held = {letter: held_by(stage, letter) for letter in Letter}
        self.done = dict.fromkeys(Letter, 0)
        self.inputs_s: list[list[float]] = []
        self.gradients_s: list[list[float]] = []

    @property
    def forwards(self) -> int:
        """How many micro-batches have gone forward."""
        return self.done[Letter.FORWARD]

    @property
    def behind(self) -> int:
        """How many W's are still to do."""
        return self.backwards - self.done[Letter.BACKWARD_WEIGHT]

    @property
    def backwards(self) -> int:
        """How many have gone backward."""
        return self.done[self.back]


class _Run:
    def __init__(self, walk: Walk, rule: Rule) -> None:
        job = walk.job
        self.rule, self.num_ranks, self.num_microbatches = rule, job.num_ranks, job.num_microbatches
        self.stages = [_StageRun(walk, stage, rule.split) for stage in job.stages]
        self.ranks = [stage.rank for stage in job.stages]
        self.own = [[run for run in self.stages if self.ranks[run.number] == rank] for rank in range(job.num_ranks)]
        self.into: dict[tuple[bool, int, int], list[float]] = {}
        for run in self.stages:
            for forward, given in ((True, run.sent), (False, run.returned)):
                for goal in _goals(given):
                    arrivals: list[float] = []
                    self.into[forward, run.number, goal] = arrivals
                    target = self.stages[goal]
                    (target.inputs_s if forward else target.gradients_s).append(arrivals)
        self.link_free: dict[tuple[int, int], float] = {}
        self.held = [0] * job.num_ranks
        self.burst = [max((max(run.held[run.back]) for run in own), default=0) for own in self.own]
        self.free_s = [0.0] * job.num_ranks
        self.orders: list[list[Action]] = [[] for _ in range(job.num_ranks)]
        self.events = [(0.0, rank) for rank in range(job.num_ranks)]

    def decide(self, rank: int, now: float) -> None:
        """Start the most pressing action that is ready and has room, if there is one."""
        own, budget, window = self.own[rank], self.rule.budget_bytes[rank], self.rule.window
        oldest = min(run.backwards for run in own)
        left = None if budget is None else budget - self.held[rank]
        needed = sum(run.held[Letter.FORWARD][1] for run in own if run.forwards <= oldest) if left is not None else 0
        ahead = self.rule.ahead[rank] if self.rule.ahead else None
        last = self.orders[rank][-1].letter if self.orders[rank] else None
        forward_next = self.rule.alternate and last in (Letter.BACKWARD, Letter.BACKWARD_INPUT)
        full = ahead is not None and sum(run.forwards - run.backwards for run in own) >= ahead
        best: tuple[tuple[int, ...], Letter, _StageRun] | None = None
        soonest = [math.inf] * 5
        late = self.rule.behind is not None and sum(run.behind for run in own) > self.rule.behind[rank]
        for run in own:
            for press, letter, ready in self._candidates(run, 0 if forward_next else 3, 2 if late else 4):
                begins = letter is Letter.FORWARD and run.forwards > oldest
                if begins and full:
                    continue
                if letter is Letter.FORWARD and not run.number and window and run.forwards - run.backwards >= window:
                    continue
                if left is not None and self._takes(run, letter, rank) + (needed if begins else 0) > left:
                    continue
                if ready > now:
                    soonest[press[0]] = min(soonest[press[0]], ready)
                elif best is None or press < best[0]:
                    best = (press, letter, run)
        if best is None:
            return
        press, letter, run = best
        awaited = math.inf if any(other.backwards for other in own) else min(soonest[: press[0]], default=math.inf)
        if awaited < now + self.rule.patience * run.seconds[letter]:
            heapq.heappush(self.events, (awaited, rank))
        else:
            self._start(letter, run, rank, now)

    def _takes(self, run: _StageRun, letter: Letter, rank: int) -> int:
        """How much an action needs; a forward leaves room for a backward's burst, which it will have to go through."""
        during, after = run.held[letter]
        if letter is Letter.FORWARD:
            return max(during, after + self.burst[rank])
        return max(during, after)

    def _candidates(self, run: _StageRun, forward: int, weight: int) -> list[tuple[tuple[int, ...], Letter, float]]:
        """What a stage could do next: how much it presses (least first), its letter, when it is ready.

        Backwards press 1, forwards and W's as given.
        """
        found: list[tuple[tuple[int, ...], Letter, float]] = []
        forwards, backwards = run.forwards, run.backwards
        if backwards < forwards:
            ready = _ready(run.gradients_s, backwards)
            if ready is not None:
                found.append((self._press(1, backwards, len(self.stages) - run.number), run.back, ready))
        if forwards < self.num_microbatches:
            ready = _ready(run.inputs_s, forwards)
            if ready is not None:
                found.append((self._press(forward, forwards, run.number), Letter.FORWARD, ready))
        if self.rule.split and run.done[Letter.BACKWARD_WEIGHT] < backwards:
            found.append(((weight, run.done[Letter.BACKWARD_WEIGHT], run.number), Letter.BACKWARD_WEIGHT, 0.0))
        return found

    def _press(self, level: int, m: int, depth: int) -> tuple[int, ...]:
        if self.rule.turn is Turn.DEEPEST:
            return level, -depth, m
        return level, m // self.num_ranks, depth, m

    def _start(self, letter: Letter, run: _StageRun, rank: int, now: float) -> None:
        """Note an action, what it holds from now on, and when what it hands over arrives."""
        end = now + run.seconds[letter]
        self.orders[rank].append(Action(run.number, letter, run.done[letter]))
        run.done[letter] += 1
        self.held[rank] += run.held[letter][1]
        self.free_s[rank] = end
        heapq.heappush(self.events, (end, rank))
        if letter is not Letter.BACKWARD_WEIGHT:
            self._hand_over(letter is Letter.FORWARD, run, rank, end)

    def _hand_over(self, forward: bool, run: _StageRun, rank: int, end: float) -> None:
        given = run.sent if forward else run.returned
        for goal in given.at_once:
            self._arrive(forward, run.number, goal, end)
        for parcel in given.parcels:
            link = (rank, parcel.to_rank)
            self.link_free[link] = gone = max(end, self.link_free.get(link, 0.0)) + parcel.busy_s
            for goal in (parcel.to_stage, *parcel.riders):
                self._arrive(forward, run.number, goal, gone + parcel.latency_s)

    def _arrive(self, forward: bool, source: int, goal: int, time: float) -> None:
        self.into[forward, source, goal].append(time)
        heapq.heappush(self.events, (time, self.ranks[goal]))


def _ready(arrivals: list[list[float]], m: int) -> float | None:
    """When all that micro-batch m waits for is there; None: not known yet."""
    ready = 0.0
    for known in arrivals:
        if len(known) <= m:
            return None
        ready = max(ready, known[m])
    return ready


def _goals(given: Handover) -> list[int]:
    riders = [goal for parcel in given.parcels for goal in (parcel.to_stage, *parcel.riders)]
    return [*given.at_once, *riders]
