"""Every warm-up of a schedule on one cut, and every choice of stages that recompute: branch and bound, rank by rank.

    chosen ranks   run their row of actions at their depth
    open ranks     run all F's, all B's (or I's) and all W's side by side, each in the schedule's own order:
                   never later than at any depth

so the time at which everything ends with some ranks open bounds every way to choose for them. With rows that are fixed
whatever recomputes only takes longer, so that stages recompute only where what a rank holds would not fit otherwise.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

from planner.cluster import memory_limit
from planner.errors import InputError
from planner.graph import Stage
from planner.schedules import Letter, Order, Schedule, ScheduleName, build, default_warmup
from planner.search.bound import Endings
from planner.search.space import Configuration
from planner.simulate import Job, Timeline, Walk, simulate
from planner.simulate.memory import held_by, resident_bytes

DEEPEST: Final = 32
"""Warm-ups of more forwards than this are too many to go through."""
_EQUAL: Final = 1e-9
_SIMULATED: Final = 50
"""What a simulation takes on top of its actions, in simulated actions."""
_BACKWARDS: Final = (Letter.BACKWARD, Letter.BACKWARD_INPUT)


class OutOfEffortError(Exception):
    """What may be spent is spent."""


class Effort:
    """Simulated actions that may still be spent; ``pulse`` is called now and then, and may raise."""

    def __init__(self, left: int, pulse: Callable[[], None]) -> None:
        self.left = left
        self.pulse: Final = pulse

    def spend(self, actions: int) -> None:
        """Take so much, or raise OutOfEffortError."""
        self.left -= actions
        if self.left < 0:
            raise OutOfEffortError
        self.pulse()


class _Row(NamedTuple):
    """A rank's actions at a warm-up depth."""

    depth: int
    order: Order


Parts = tuple[tuple[Order, ...], ...]


class Rows(NamedTuple):
    """What each rank may run, whatever the others do; of the depths chosen the largest must be ``least`` or more.

    ``parts``: each rank's forwards, its backwards, its W's, in an order that its depth does not change.
    """

    ranks: tuple[tuple[_Row, ...], ...]
    parts: Parts
    least: int = 0


def parts_of(name: ScheduleName, configuration: Configuration) -> Parts:
    """Each rank's forwards, its backwards, its W's, in an order that no warm-up changes."""
    return tuple(_parts(order) for order in configuration.schedule(name, None))


def _parts(order: Order) -> tuple[Order, ...]:
    letters = ((Letter.FORWARD,), _BACKWARDS, (Letter.BACKWARD_WEIGHT,))
    return tuple(part for some in letters if (part := tuple(one for one in order if one.letter in some)))


def rows_of(name: ScheduleName, configuration: Configuration) -> list[Rows] | None:
    """All that a schedule lets the ranks of a shape run; None: warm-ups are too many.

    A rank's row depends on its own depth alone in 1F1B; in ZB-H1 on the first rank's too (W's lag by the difference),
    in interleaved 1F1B on the largest depth too: so there are several sets of rows there.
    """
    ranks, virtual, count = configuration.pipeline, configuration.virtual, configuration.num_microbatches
    deepest = virtual * count

    def made_at(warmup: tuple[int, ...] | None) -> Schedule:
        placement = configuration.placement
        return build(name, num_ranks=ranks, virtual=virtual, num_microbatches=count, placement=placement, warmup=warmup)

    def at(first: int, others: int) -> Schedule:
        return made_at((first, *(others for _ in range(ranks - 1))))

    if default_warmup(name, num_ranks=ranks, virtual=virtual, num_microbatches=count) is None:
        return [_rows([[_Row(0, order)] for order in made_at(None)])]
    if deepest > DEEPEST:
        return None
    depths = range(1, deepest + 1)
    if name is ScheduleName.ONE_F_ONE_B or ranks == 1:
        every = [at(depth, depth) for depth in depths]
        return [_rows([[_Row(d, one[rank]) for d, one in zip(depths, every, strict=True)] for rank in range(ranks)])]
    made: list[Rows] = []
    for key in depths:
        if name is ScheduleName.ZB_H1:
            every = [at(key, depth) for depth in depths]
            first, least = [_Row(key, every[0][0])], 0
        else:
            every = [at(key, depth) for depth in range(1, key + 1)]
            first, least = [_Row(depth, at(depth, key)[0]) for depth in range(1, key + 1)], key
        rest = [[_Row(d, one[rank]) for d, one in enumerate(every, start=1)] for rank in range(1, ranks)]
        rows = _rows([first, *rest], least)
        if least and made and _orders(made[-1]) == _orders(_rows([row[: key - 1] for row in (first, *rest)])):
            made[-1] = rows._replace(least=made[-1].least)
        else:
            made.append(rows)
    return made


def _rows(ranks: Sequence[Sequence[_Row]], least: int = 0) -> Rows:
    """Rows without those that are alike: of these the deepest is kept."""
    kept = tuple(tuple({row.order: row for row in own}.values()) for own in ranks)
    parts = tuple(_parts(own[0].order) for own in kept)
    return Rows(kept, parts, least)


def _orders(rows: Rows) -> list[list[Order]]:
    return [[row.order for row in own] for own in rows.ranks]


def with_recompute(job: Job, again: Sequence[bool]) -> Job:
    """The same cut with other stages that recompute."""
    stages = (dataclasses.replace(stage, recompute=flag) for stage, flag in zip(job.stages, again, strict=True))
    return dataclasses.replace(job, stages=tuple(stages))


Plan = tuple[Walk, tuple[int, ...] | None, Timeline]
"""A cut with its choice of stages that recompute, the warm-up, and what the time model says of it."""


class Branching:
    """One cut under all rows of a schedule; ``again``: the choices that each stage has, to recompute or not."""

    def __init__(self, job: Job, again: Sequence[bool], effort: Effort) -> None:
        self.job: Final = job
        self.effort: Final = effort
        self.limit: Final = memory_limit(job.cluster)
        self.own: Final = [[s.stage for s in job.stages if s.rank == rank] for rank in range(job.num_ranks)]
        self.choices: Final = [
            sorted(itertools.product(again, repeat=len(stages)), key=lambda flags: (sum(flags), flags))
            for stages in self.own
        ]
        self.resident: Final = [resident_bytes(job, rank) for rank in range(job.num_ranks)]
        self.endings: Final = Endings(job)
        self.plain: Final = (min(again),) * len(job.stages)
        self.than_s = math.inf
        self._walks: dict[tuple[bool, ...], Walk] = {}

    def faster(self, rows: Rows, than_s: float) -> Iterator[Plan]:
        """Whatever is faster than a time that is reached, and fits: each faster than the one before it."""
        self.than_s = than_s
        fitting = [self._fitting(rank, own) for rank, own in enumerate(rows.ranks)]
        if not all(fitting):
            return
        chosen = tuple(next(iter(own)) if len(own) == 1 else None for own in fitting)
        again = list(self.plain)
        for stages, own in zip(self.own, fitting, strict=True):
            for place, stage in enumerate(stages):  # a stage that has to recompute whatever the rank runs
                again[stage] = all(flags[place] for every in own.values() for flags in every)
        if self._beats(self._bound(rows.parts, chosen, tuple(again))):
            yield from self._descend(rows, fitting, len(chosen) - 1, chosen, tuple(again))

    def may_be_faster(self, parts: Parts, than_s: float) -> bool:
        """Whether at some warm-up a schedule with these parts may be faster, whatever the warm-up."""
        self.than_s = than_s
        return self._beats(self._bound(parts, (None,) * len(parts), self.plain))

    def _beats(self, seconds: float) -> bool:
        return seconds < self.than_s * (1 - _EQUAL)

    def _fitting(self, rank: int, own: Sequence[_Row]) -> dict[_Row, list[tuple[bool, ...]]]:
        """The rows of a rank, each with the choices of its stages to recompute with which it may fit."""
        made = {row: [flags for flags in self.choices[rank] if self._fits(rank, row.order, flags)] for row in own}
        return {row: every for row, every in made.items() if every}

    def _descend(
        self,
        rows: Rows,
        fitting: Sequence[dict[_Row, list[tuple[bool, ...]]]],
        rank: int,
        chosen: tuple[_Row | None, ...],
        again: tuple[bool, ...],
    ) -> Iterator[Plan]:
        """Ranks above ``rank`` are chosen: their rows, and which of their stages recompute."""
        if rank < 0:
            yield from self._timed(rows, [row for row in chosen if row is not None], again)
            return
        tries: list[tuple[float, int, tuple[_Row | None, ...], tuple[bool, ...]]] = []
        for row, every in fitting[rank].items():
            picked = (*chosen[:rank], row, *chosen[rank + 1 :])
            if len(every) > 1 and not self._beats(self._bound(rows.parts, picked, again)):
                continue  # to recompute more takes longer
            for flags in every:
                changed = self._with(rank, flags, again)
                bound = self._bound(rows.parts, picked, changed)
                if self._beats(bound):
                    tries.append((bound, len(tries), picked, changed))
        for bound, _, picked, changed in sorted(tries, key=lambda entry: entry[:2]):
            if self._beats(bound):
                yield from self._descend(rows, fitting, rank - 1, picked, changed)

    def _with(self, rank: int, flags: tuple[bool, ...], again: tuple[bool, ...]) -> tuple[bool, ...]:
        changed = list(again)
        for stage, flag in zip(self.own[rank], flags, strict=True):
            changed[stage] = flag
        return tuple(changed)

    def _timed(self, rows: Rows, chosen: list[_Row], again: tuple[bool, ...]) -> Iterator[Plan]:
        """The one plan that is left, if it fits with its messages."""
        if max(row.depth for row in chosen) < rows.least:
            return
        self.effort.spend(6 * sum(len(row.order) for row in chosen) + 4 * _SIMULATED)
        walk = self._walk(again)
        timeline = simulate(walk, tuple(row.order for row in chosen), levels=False)
        fits = self.limit is None or max(use.peak_memory_bytes for use in timeline.ranks) <= self.limit
        if fits and self._beats(timeline.iteration_s):
            self.than_s = timeline.iteration_s
            yield walk, tuple(row.depth for row in chosen) if chosen[0].depth else None, timeline

    def _walk(self, again: tuple[bool, ...]) -> Walk:
        if again not in self._walks:
            self._walks[again] = Walk(with_recompute(self.job, again))
        return self._walks[again]

    def _fits(self, rank: int, order: Order, flags: tuple[bool, ...]) -> bool:
        """Whether what a rank's row holds while an action runs that lasts some time fits, messages aside."""
        if self.limit is None:
            return True
        walk, held = self._walk(self._with(rank, flags, self.plain)), self.resident[rank]
        stages = [walk.job.stages[stage] for stage in self.own[rank]]
        if held + self.job.num_microbatches * sum(map(_most_held, stages)) + max(map(_most_held, stages)) <= self.limit:
            return True
        self.effort.spend(len(order) // 2)
        for stage, letter, _ in order:
            during, after = held_by(walk.job.stages[stage], letter)
            if held + during > self.limit and _seconds(walk, stage, letter) > 0:
                return False
            held += after
        return True

    def _bound(self, parts: Parts, chosen: tuple[_Row | None, ...], again: tuple[bool, ...]) -> float:
        """No choice for the open ranks ends sooner; where none is open, the iteration's time."""
        walk = self._walk(again)
        closed = [row.order for row in chosen if row is not None]
        self.effort.spend(sum(len(part) for own in parts for part in own) + _SIMULATED)
        try:
            if len(closed) == len(chosen):
                return simulate(walk, tuple(closed), memory=False).iteration_s
            return self._relaxed(walk, parts, chosen)
        except InputError:  # rows that wait for ever
            return math.inf

    def _relaxed(self, walk: Walk, parts: Parts, chosen: tuple[_Row | None, ...]) -> float:
        table = [(row.order,) if row else own for row, own in zip(chosen, parts, strict=True)]
        walked = walk.run(tuple(itertools.chain.from_iterable(table)), apart=True)
        tails = self._tails(walk, split=any(one.letter is Letter.BACKWARD_INPUT for one in parts[0][1]))
        lasts, through, place = [0.0] * len(chosen), 0.0, 0
        for rank, own in enumerate(table):
            ends = [walked.ends_s[place + part][-1] for part in range(len(own))]
            lasts[rank] = max(ends)
            if chosen[rank] is None:
                begun = walked.starts_s[place][0]
                loads = [sum(_seconds(walk, stage, letter) for stage, letter, _ in part) for part in own]
                lasts[rank] = max(lasts[rank], begun + sum(loads))
                through = max(through, begun + loads[0] + loads[1] + tails[own[1][-1].stage])
            place += len(own)
        return max(through, self.endings.iteration_s(lasts))

    def _tails(self, walk: Walk, *, split: bool) -> list[float]:
        """Per stage the least time from the end of a last B or I of it to the end of the iteration."""
        back = Letter.BACKWARD_INPUT if split else Letter.BACKWARD
        tails: list[float] = []
        for stage, given in zip(self.job.stages, walk.returns, strict=True):
            delays = [(low, 0.0) for low in given.at_once]
            delays += [(parcel.to_stage, parcel.busy_s + parcel.latency_s) for parcel in given.parcels]
            own = self.endings.post_s[stage.rank] + (walk.durations[stage.stage].backward_weight_s if split else 0.0)
            tails.append(max([own, *(delay + _seconds(walk, low, back) + tails[low] for low, delay in delays)]))
        return tails


def _most_held(stage: Stage) -> int:
    """More than a micro-batch of a stage, or an action of it, ever holds."""
    return stage.input_bytes + stage.saved_bytes + stage.saved_for_weight_bytes + stage.workspace_bytes


def _seconds(walk: Walk, stage: int, letter: Letter) -> float:
    """How long an action keeps its rank."""
    cost = walk.durations[stage]
    match letter:
        case Letter.FORWARD:
            return cost.forward_s + walk.sends[stage].added_s
        case Letter.BACKWARD:
            return cost.backward_s + walk.returns[stage].added_s
        case Letter.BACKWARD_INPUT:
            return cost.backward_input_s + walk.returns[stage].added_s
        case _:
            return cost.backward_weight_s
