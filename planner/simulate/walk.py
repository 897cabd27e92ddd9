"""When every action of a schedule starts and ends: the innermost loop, plain lists and floats.

A link carries what one rank hands to one other, in the order handed over; that order is the sender's own order of
actions. So no clock has to be shared: each rank is walked as far as the messages that are known let it, then the next,
down and up the ranks until all are through.
"""

from __future__ import annotations

from typing import NamedTuple

from planner.errors import InputError
from planner.schedules.action import Action, Letter, Order, Schedule
from planner.simulate.costs import Durations, Handover, Links, durations, handover
from planner.simulate.job import Job

_NOT_YET = -1.0

_Arrivals = list[float]
"""Per micro-batch, when a message or a result is there; _NOT_YET before it is known."""

_Wire = tuple[_Arrivals, list[float], float, float, tuple[_Arrivals, ...]]
"""Where the message's arrival is noted, when the link's messages left, seconds it is busy, latency, who else rides."""

_Kind = tuple[float, tuple[_Arrivals, ...], tuple[_Arrivals, ...], tuple[_Wire, ...]]
"""Of one letter and stage: seconds, what it waits for, what is there as it ends, what goes over links."""


class Walked(NamedTuple):
    """Per rank the start and end of each action; per ordered pair of ranks when its messages left, in order.

    ``arrivals_s``: per parcel (whether it is an activation, its stage, its place among the stage's parcels) and
    micro-batch, when it was there.
    """

    starts_s: list[list[float]]
    ends_s: list[list[float]]
    departures_s: dict[tuple[int, int], list[float]]
    arrivals_s: dict[tuple[bool, int, int], list[float]]


class Walk:
    """One job made ready to be walked under many schedules."""

    def __init__(self, job: Job) -> None:
        links = Links(job)
        self.job = job
        self.durations: tuple[Durations, ...] = tuple(map(durations, job.stages))
        self.sends: tuple[Handover, ...] = tuple(handover(stage, stage.sends, job, links) for stage in job.stages)
        self.returns: tuple[Handover, ...] = tuple(handover(stage, stage.returns, job, links) for stage in job.stages)
        self._last: tuple[Schedule, Walked] | None = None
        self._actions: dict[tuple[int, Letter], Order] = {}

    def actions(self, stage: int, letter: Letter) -> Order:
        """A stage's actions of one kind, by micro-batch: orders are long, and share them."""
        key = (stage, letter)
        if key not in self._actions:
            self._actions[key] = tuple(Action(stage, letter, m) for m in range(self.job.num_microbatches))
        return self._actions[key]

    def run(self, schedule: Schedule, *, apart: bool = False) -> Walked:
        """Starts and ends of every action. Raises InputError where the schedule waits for ever.

        ``apart``: activations and gradients have links of their own, so that the schedule's rows may be more than the
        ranks: one rank's forwards beside its backwards, each row in order. No order of that rank is faster.
        What was walked last is there at once: who looks at its time asks for its memory next.
        """
        if apart:
            return self._run(schedule, apart=True)
        if self._last is None or self._last[0] is not schedule:
            self._last = (schedule, self._run(schedule, apart=False))
        return self._last[1]

    def note(self, schedule: Schedule, walked: Walked) -> None:
        """The times of a schedule, known from making it: none has to be walked for them."""
        self._last = (schedule, walked)

    def _run(self, schedule: Schedule, *, apart: bool) -> Walked:
        kinds = _Kinds(self, apart)
        forward, backward, backward_input, weight = kinds.forward, kinds.backward, kinds.backward_input, kinds.weight
        is_forward, is_backward, is_weight = Letter.FORWARD, Letter.BACKWARD, Letter.BACKWARD_WEIGHT
        starts: list[list[float]] = [[] for _ in schedule]
        ends: list[list[float]] = [[] for _ in schedule]
        clock = [0.0] * len(schedule)
        at = [0] * len(schedule)
        sweep = [*range(len(schedule)), *range(len(schedule) - 2, 0, -1)]
        moved = True
        while moved:
            moved = False
            for rank in sweep:
                order, now, begun, ended = schedule[rank], clock[rank], starts[rank], ends[rank]
                first = position = at[rank]
                last = len(order)
                while position < last:
                    stage, letter, m = order[position]
                    if letter is is_forward:
                        duration, waits, at_once, wires = forward[stage]
                    elif letter is is_backward:
                        duration, waits, at_once, wires = backward[stage]
                    elif letter is is_weight:
                        duration, waits, at_once, wires = weight[stage]
                    else:
                        duration, waits, at_once, wires = backward_input[stage]
                    start = now
                    for arrivals in waits:
                        arrived = arrivals[m]
                        if arrived > start:
                            start = arrived
                        elif arrived < 0.0:
                            break
                    else:
                        now = start + duration
                        begun.append(start)
                        ended.append(now)
                        for arrivals in at_once:
                            arrivals[m] = now
                        for arrivals, departures, busy, latency, riders in wires:
                            gone = departures[-1]
                            gone = (gone if gone > now else now) + busy
                            departures.append(gone)
                            arrivals[m] = gone = gone + latency
                            for riding in riders:
                                riding[m] = gone
                        position += 1
                        continue
                    break
                if position > first:
                    moved = True
                    at[rank] = position
                    clock[rank] = now
        for rank, order in enumerate(schedule):
            if at[rank] < len(order):
                place = f"rank {rank} position {at[rank]}: {order[at[rank]]}"
                raise InputError(f"{place} waits for what never comes", hint="pipeplan check says why")
        return Walked(starts, ends, kinds.departures, kinds.arrivals)


class _Kinds:
    """Of every letter and stage what the loop needs, with empty notes of what has arrived."""

    def __init__(self, walk: Walk, apart: bool) -> None:
        job = walk.job
        num_stages, empty = len(job.stages), [_NOT_YET] * job.num_microbatches
        self.departures: dict[tuple[int, int], list[float]] = {}
        self.arrivals: dict[tuple[bool, int, int], _Arrivals] = {}
        done, input_done = [empty[:] for _ in range(num_stages)], [empty[:] for _ in range(num_stages)]
        before: list[list[_Arrivals]] = [[own] for own in done]
        ahead: list[list[_Arrivals]] = [[] for _ in range(num_stages)]

        def notes(
            stage: int, given: Handover, waits: list[list[_Arrivals]], *, forward: bool
        ) -> tuple[tuple[_Arrivals, ...], tuple[_Wire, ...]]:
            def note(to_stage: int) -> _Arrivals:
                waits[to_stage].append(empty[:])
                return waits[to_stage][-1]

            rank = job.stages[stage].rank
            back = rank + job.num_ranks if apart else rank
            wires = [
                (
                    note(parcel.to_stage),
                    self.departures.setdefault((rank if forward else back, parcel.to_rank), [0.0]),
                    parcel.busy_s,
                    parcel.latency_s,
                    tuple(map(note, parcel.riders)),
                )
                for parcel in given.parcels
            ]
            for place, wire in enumerate(wires):
                self.arrivals[forward, stage, place] = wire[0]
            return tuple(map(note, given.at_once)), tuple(wires)

        sent = [notes(stage, given, ahead, forward=True) for stage, given in enumerate(walk.sends)]
        returned = [notes(stage, given, before, forward=False) for stage, given in enumerate(walk.returns)]
        each = range(num_stages)
        cost, added = walk.durations, [given.added_s for given in walk.returns]
        self.forward: list[_Kind] = [
            (cost[k].forward_s + walk.sends[k].added_s, tuple(ahead[k]), (done[k], *sent[k][0]), sent[k][1])
            for k in each
        ]
        self.backward: list[_Kind] = [(cost[k].backward_s + added[k], tuple(before[k]), *returned[k]) for k in each]
        self.backward_input: list[_Kind] = [
            (
                cost[k].backward_input_s + added[k],
                tuple(before[k]),
                (input_done[k], *returned[k][0]),
                returned[k][1],
            )
            for k in each
        ]
        self.weight: list[_Kind] = [(cost[k].backward_weight_s, (input_done[k],), (), ()) for k in each]
