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
from typing import Final

from planner.record import record
from planner.schedules.action import Action, Letter, Schedule
from planner.simulate.costs import Handover
from planner.simulate.memory import held_by
from planner.simulate.walk import Walk, Walked


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
    micro-batches may be on their way through the first stage and back. ``depths[k]``: how many micro-batches may be
    between F and B (or I) of stage k, in place of the room kept for the oldest: the caller sees to it that all of them
    fit at once.
    """

    split: bool
    turn: Turn = Turn.DEEPEST
    alternate: bool = False
    patience: float = 0.0
    budget_bytes: tuple[float | None, ...]
    ahead: tuple[int | None, ...] | None = None
    window: int | None = None
    depths: tuple[int, ...] | None = None


def greedy(walk: Walk, rule: Rule) -> Schedule | None:
    """The order that a rule makes for a job; None where the budget does not let it come to an end.

    Every action starts as soon as its rank is free and its inputs are there (one that is put off comes after the one
    that it waits for), so its times are those of the walk, which is told them.
    """
    run = _Run(walk, rule)
    events, free_s, decide = run.events, run.free_s, run.decide
    while events:
        now, rank = heapq.heappop(events)
        if free_s[rank] <= now:
            decide(rank, now)
    done = len(walk.job.stages) * walk.job.num_microbatches * (3 if rule.split else 2)
    if sum(map(len, run.orders)) != done:
        return None
    schedule = tuple(map(tuple, run.orders))
    walk.note(schedule, Walked(run.starts_s, run.ends_s, run.departures_s, run.arrivals_s))
    return schedule


_Wire = tuple[list[float] | None, float, float, tuple[tuple[list[float], int], ...]]
"""When the link's messages left (None: there at once), seconds it is busy, latency, where arrivals are noted, of which
stage."""

_F, _B, _W = 0, 1, 2


class _Run:
    """One order while it is made. Lists by stage; actions are of three kinds: F, B (or I), W."""

    def __init__(self, walk: Walk, rule: Rule) -> None:
        job = walk.job
        stages = range(len(job.stages))
        self.rule: Final = rule
        self.num_ranks: Final = job.num_ranks
        self.num_microbatches: Final = job.num_microbatches
        self.num_stages: Final = len(job.stages) + 1
        self.split: Final = rule.split
        self.deepest: Final = rule.turn is Turn.DEEPEST
        self.level: Final = 2.0 * self.num_stages * self.num_microbatches * (self.num_microbatches + 2)
        letters = (
            Letter.FORWARD,
            Letter.BACKWARD_INPUT if rule.split else Letter.BACKWARD,
            Letter.BACKWARD_WEIGHT,
        )
        self.actions: Final = [[walk.actions(k, letter) for k in stages] for letter in letters]
        self.ranks: Final = [stage.rank for stage in job.stages]
        self.own: Final = [[k for k in stages if self.ranks[k] == rank] for rank in range(job.num_ranks)]
        backward = [cost.backward_input_s if rule.split else cost.backward_s for cost in walk.durations]
        self.seconds: Final = (
            [walk.durations[k].forward_s + walk.sends[k].added_s for k in stages],
            [backward[k] + walk.returns[k].added_s for k in stages],
            [walk.durations[k].backward_weight_s for k in stages],
        )
        held = [[held_by(stage, letter) for stage in job.stages] for letter in letters]
        self.after: Final = [[after for _, after in row] for row in held]
        burst = [max((max(held[_B][k]) for k in own), default=0) for own in self.own]
        # a forward leaves room for the burst of a backward, which it will have to go through
        self.takes: Final = [[max(one) for one in row] for row in held]
        self.takes[_F] = [max(held[_F][k][0], held[_F][k][1] + burst[self.ranks[k]]) for k in stages]
        self.done: Final = ([0] * len(stages), [0] * len(stages), [0] * len(stages))
        self.to_begin: Final = [len(own) * job.num_microbatches for own in self.own]
        self.arrivals: Final[tuple[list[list[list[float]]], ...]] = ([[] for _ in stages], [[] for _ in stages])
        self.departures_s: Final[dict[tuple[int, int], list[float]]] = {}
        self.arrivals_s: Final[dict[tuple[bool, int, int], list[float]]] = {}
        self.wires: Final = (
            [self._wires(_F, k, walk.sends[k]) for k in stages],
            [self._wires(_B, k, walk.returns[k]) for k in stages],
        )
        # when what the next micro-batch of a stage waits for is there; infinite: not known yet
        self.ready: Final = tuple([math.inf if inputs else 0.0 for inputs in row] for row in self.arrivals)
        self.held: Final = [0] * job.num_ranks
        self.free_s: Final = [0.0] * job.num_ranks
        self.was_backward: Final = [False] * job.num_ranks
        self.orders: Final[list[list[Action]]] = [[] for _ in range(job.num_ranks)]
        self.starts_s: Final[list[list[float]]] = [[] for _ in range(job.num_ranks)]
        self.ends_s: Final[list[list[float]]] = [[] for _ in range(job.num_ranks)]
        self.events: Final = [(0.0, rank) for rank in range(job.num_ranks)]
        self.oldest: Final = [0] * job.num_ranks
        self.kept: Final = [0.0] * job.num_ranks
        self.keeps_room: Final = rule.depths is None
        for rank in range(job.num_ranks) if self.keeps_room else ():
            self._keep_room(rank)
        self.press_b: Final = self._press(_B, 1)
        self.press_f: Final = (self._press(_F, 3), self._press(_F, 0))
        """As they press usually, and right after a backward where those alternate."""
        rounds = 0 if self.deepest else self.num_stages * job.num_microbatches
        self.later: Final = [m + m // job.num_ranks * rounds for m in range(job.num_microbatches)]

    def _wires(self, kind: int, stage: int, given: Handover) -> list[_Wire]:
        """Where a stage's messages go."""

        def note(goal: int) -> tuple[list[float], int]:
            self.arrivals[kind][goal].append([])
            return self.arrivals[kind][goal][-1], goal

        made: list[_Wire] = [(None, 0.0, 0.0, (note(goal),)) for goal in given.at_once]
        for place, parcel in enumerate(given.parcels):
            goals = tuple(note(goal) for goal in (parcel.to_stage, *parcel.riders))
            self.arrivals_s[kind == _F, stage, place] = goals[0][0]
            departures = self.departures_s.setdefault((self.ranks[stage], parcel.to_rank), [0.0])
            made.append((departures, parcel.busy_s, parcel.latency_s, goals))
        return made

    def decide(self, rank: int, now: float) -> None:
        """Start the most pressing action that is ready and has room, if there is one."""
        rule, own, count = self.rule, self.own[rank], self.num_microbatches
        forwards, backwards, weights = self.done
        ready_f, ready_b = self.ready
        takes_f, takes_b, takes_w = self.takes
        press_f, press_b = self.press_f[rule.alternate and self.was_backward[rank]], self.press_b
        budget, depths, later = rule.budget_bytes[rank], rule.depths, self.later
        left = math.inf if budget is None else budget - self.held[rank]
        oldest, kept = self.oldest[rank], self.kept[rank]
        begins_left = left - kept if kept < math.inf else -math.inf
        best, stage, kind = math.inf, -1, _F
        soonest: list[tuple[float, float]] = []
        for k in own:
            begun, returned, ready = forwards[k], backwards[k], ready_b[k]
            if returned < begun and ready < math.inf and takes_b[k] <= left:
                press = press_b[k] + later[returned]
                if ready > now:
                    soonest.append((press, ready))
                elif press < best:
                    best, stage, kind = press, k, _B
            ready = ready_f[k]
            if begun < count and ready < math.inf:
                if depths is not None:
                    may = begun - returned < depths[k] and takes_f[k] <= left
                else:
                    may = takes_f[k] <= (begins_left if begun > oldest else left)
                    may = may and (k > 0 or not rule.window or begun - returned < rule.window)
                if may:
                    press = press_f[k] + later[begun]
                    if ready > now:
                        soonest.append((press, ready))
                    elif press < best:
                        best, stage, kind = press, k, _F
        if stage < 0 and self.split:
            for k in own:
                if weights[k] < backwards[k] and takes_w[k] <= left:
                    if self.to_begin[rank]:
                        press = weights[k] * self.num_stages + k
                    else:  # stage by stage, so that what follows a stage's last W runs beside the others'
                        press = (self.num_stages - k) * count + weights[k]
                    if press < best:
                        best, stage, kind = press, k, _W
        if stage < 0:
            return
        if rule.patience and not any(backwards[k] for k in own):
            levels = math.inf if kind == _W else best // self.level * self.level
            awaited = min((ready for press, ready in soonest if press < levels), default=math.inf)
            if awaited < now + rule.patience * self.seconds[kind][stage]:
                heapq.heappush(self.events, (awaited, rank))
                return
        self._start(kind, stage, rank, now)

    def _keep_room(self, rank: int) -> None:
        """Note the oldest micro-batch begun, and the room that it needs to go on: a newer one's forward leaves it."""
        rule, own = self.rule, self.own[rank]
        forwards, backwards, after = self.done[_F], self.done[_B], self.after[_F]
        self.oldest[rank] = oldest = min([backwards[k] for k in own])
        ahead = rule.ahead[rank] if rule.ahead is not None else None
        is_ahead = ahead is not None and sum([forwards[k] - backwards[k] for k in own]) >= ahead
        self.kept[rank] = math.inf if is_ahead else sum([after[k] for k in own if forwards[k] <= oldest])

    def _press(self, kind: int, level: int) -> list[float]:
        """How much a kind of action presses at a level, by stage and with ``later`` of its micro-batch: least first."""
        stages, count = self.num_stages, self.num_microbatches
        depths = range(stages - 1) if kind == _F else range(stages, 1, -1)
        turns = [stages - depth if self.deepest else depth for depth in depths]
        return [level * self.level + turn * count for turn in turns]

    def _start(self, kind: int, stage: int, rank: int, now: float) -> None:
        """Note an action, what it holds from now on, and when what it hands over arrives."""
        end, m = now + self.seconds[kind][stage], self.done[kind][stage]
        self.orders[rank].append(self.actions[kind][stage][m])
        self.starts_s[rank].append(now)
        self.ends_s[rank].append(end)
        self.done[kind][stage] = m + 1
        self.held[rank] += self.after[kind][stage]
        self.free_s[rank] = end
        self.was_backward[rank] = kind == _B
        heapq.heappush(self.events, (end, rank))
        if kind == _W:
            return
        if kind == _F:
            self.to_begin[rank] -= 1
        if self.keeps_room:
            self._keep_room(rank)
        ready, arrivals, done = self.ready[kind], self.arrivals[kind], self.done[kind]
        ready[stage] = _ready(arrivals[stage], m + 1)
        for departures, busy_s, latency_s, goals in self.wires[kind][stage]:
            there = end
            if departures is not None:
                free = departures[-1]
                departures.append(gone := (free if free > end else end) + busy_s)
                there = gone + latency_s
            for noted, goal in goals:
                noted.append(there)
                if done[goal] == m:
                    ready[goal] = _ready(arrivals[goal], m)
                if there >= self.free_s[self.ranks[goal]]:
                    heapq.heappush(self.events, (there, self.ranks[goal]))


def _ready(arrivals: list[list[float]], m: int) -> float:
    """When all that micro-batch m waits for is there; infinite: not known yet."""
    ready = 0.0
    for known in arrivals:
        if len(known) <= m:
            return math.inf
        if known[m] > ready:
            ready = known[m]
    return ready
