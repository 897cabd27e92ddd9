"""An order of its own for a job: the best of list scheduling under several rules, and of local search on top of it.

named schedules of the job's shape ─┐
list scheduling, rule by rule ──────┴▶ simulated ─▶ those that fit ─▶ the fastest ─swaps─▶ faster still

So it is never slower than the named schedules, at their default warm-up, that fit the same memory. List scheduling
does not know when messages are held: where its order turns out not to fit, it is made again with less to spend.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, product
from typing import Final, NamedTuple

from planner.cluster import memory_limit
from planner.schedules import Letter, Placement, Schedule, ScheduleName, build, ranks_of, shape_fault
from planner.simulate.greedy import Rule, Turn, greedy
from planner.simulate.improve import improve, longest_rank, span_s
from planner.simulate.memory import resident_bytes
from planner.simulate.model import simulate
from planner.simulate.timeline import Timeline
from planner.simulate.walk import Walk

_STARTS: Final = 3
_WAITING: Final = 2
"""Messages of each kind that wait at a rank, where nothing is known of its order yet."""
_SAME: Final = 1e-9
_MANNERS: Final = ((False, 0.0), (True, 0.0), (False, 0.15), (False, 0.5), (False, 1.0))
"""Alternate, patience."""


class _Found(NamedTuple):
    iteration_s: float
    span_s: float
    schedule: Schedule


def synthesise(
    walk: Walk,
    *,
    split: bool = True,
    others: Sequence[Schedule] = (),
    steps: int = 50,
    bound_s: float = 0.0,
) -> Schedule | None:
    """The fastest order found for a job, within its memory; None where none is found that fits.

    ``split``: with I and W where that helps, else with whole backwards only. ``others``: orders to start from beside
    the named ones. ``steps``: how many swaps to try; none are where an order reaches ``bound_s``. Among equally fast
    orders that with the shortest span, from first start to last end, of its longest rank. Deterministic.
    """
    limit = memory_limit(walk.job.cluster)
    rules = _rules(walk, split, _budgets(walk, limit))
    orders = [*others, *_named(walk, split)]
    named = (_timed(walk, schedule, limit) for schedule in orders)
    found = [_found(timeline) for timeline in named if _fits(timeline, limit)]
    found += [_found(timeline) for rule in rules if (timeline := within(walk, rule, limit))]
    if not found:
        return None
    best, budgets = _best(found), _budgets(walk, limit)
    if steps and best.iteration_s > bound_s * (1 + _SAME):
        for start in _starts(found):
            found += _better(walk, start, limit, steps, budgets, spans=False)
        best = _best(found)
    if steps:
        found += _better(walk, best, limit, steps, budgets, spans=True)
    return _best(found).schedule


def _better(
    walk: Walk, start: _Found, limit: int | None, steps: int, budgets: tuple[float | None, ...], *, spans: bool
) -> list[_Found]:
    """The best that swaps make of an order, if it fits."""
    better = improve(walk, start.schedule, steps=steps, budget_bytes=budgets, spans=spans)
    timelines = (_timed(walk, schedule, limit) for schedule in better)
    fitting = (_found(timeline) for timeline in timelines if _fits(timeline, limit))
    return list(islice(fitting, 1))


def _rules(walk: Walk, split: bool, budgets: tuple[float | None, ...]) -> Iterator[Rule]:
    several = len(walk.job.stages) > walk.job.num_ranks
    for halves, turn, (alternate, patience) in product(
        (True, False) if split else (False,), Turn if several else (Turn.DEEPEST,), _MANNERS
    ):
        yield Rule(split=halves, turn=turn, alternate=alternate, patience=patience, budget_bytes=budgets)


def _named(walk: Walk, split: bool) -> Iterator[Schedule]:
    """The named schedules of the job's shape, without I and W unless asked for."""
    job = walk.job
    virtual = len(job.stages) // job.num_ranks
    ranks = tuple(stage.rank for stage in job.stages)
    for placement in (Placement.LOOP, Placement.V):
        if placement is Placement.V and virtual != 2:
            continue
        for name in ScheduleName:
            if ranks == ranks_of(job.num_ranks, virtual, placement) and not shape_fault(
                name, virtual=virtual, placement=placement
            ):
                schedule = build(
                    name,
                    num_ranks=job.num_ranks,
                    virtual=virtual,
                    num_microbatches=job.num_microbatches,
                    placement=placement,
                )
                if split or all(action.letter in (Letter.FORWARD, Letter.BACKWARD) for action in schedule[0]):
                    yield schedule


def _budgets(walk: Walk, limit: int | None) -> tuple[float | None, ...]:
    """What each rank may hold beyond what it always holds."""
    ranks = range(walk.job.num_ranks)
    return tuple(None if limit is None else limit - resident_bytes(walk.job, rank) for rank in ranks)


def within(walk: Walk, rule: Rule, limit: int | None, *, tries: int = 6) -> Timeline | None:
    """The order that a rule makes, its budgets cut where messages take memory, until it fits."""
    whole = rule
    for turn in range(tries):
        if turn == 0 and limit is not None:
            rule = dataclasses.replace(rule, budget_bytes=less_messages(walk, rule.budget_bytes))
        schedule = greedy(walk, rule)
        if turn == 0 and schedule is None:  # so little room that even they must not be counted on
            rule = whole
            schedule = greedy(walk, rule)
        if schedule is None:
            return None
        timeline = _timed(walk, schedule, limit)
        if _fits(timeline, limit):
            return timeline
        less = tuple(
            None if budget is None else budget - max(0, use.peak_memory_bytes - (limit or 0))
            for budget, use in zip(rule.budget_bytes, timeline.ranks, strict=True)
        )
        rule = dataclasses.replace(rule, budget_bytes=less)
    return None


def less_messages(walk: Walk, budgets: tuple[float | None, ...]) -> tuple[float | None, ...]:
    """What each rank may spend beside a few messages of each kind that wait there to be taken in or to leave."""
    waiting = [0] * walk.job.num_ranks
    for stage, given in (*enumerate(walk.sends), *enumerate(walk.returns)):
        for parcel in given.parcels:
            waiting[walk.job.stages[stage].rank] += _WAITING * parcel.bytes
            waiting[parcel.to_rank] += _WAITING * parcel.bytes
    return tuple(None if one is None else one - size for one, size in zip(budgets, waiting, strict=True))


def _timed(walk: Walk, schedule: Schedule, limit: int | None) -> Timeline:
    """An order's times, with the ranks' peaks where memory is limited."""
    return simulate(walk, schedule, memory=limit is not None, levels=False)


def _fits(timeline: Timeline, limit: int | None) -> bool:
    return limit is None or all(use.peak_memory_bytes <= limit for use in timeline.ranks)


def _found(timeline: Timeline) -> _Found:
    return _Found(timeline.iteration_s, span_s(timeline, longest_rank(timeline)), timeline.schedule)


def _best(found: Iterable[_Found]) -> _Found:
    """The fastest; among equals the one with the shortest span."""
    fastest = min(entry.iteration_s for entry in found)
    equal = [entry for entry in found if entry.iteration_s <= fastest * (1 + _SAME)]
    return min(equal, key=lambda entry: entry.span_s)


def _starts(found: Sequence[_Found]) -> list[_Found]:
    """Where to look for better orders: from the best few that differ."""
    different = {entry.schedule: entry for entry in found}
    return sorted(different.values(), key=lambda entry: (entry.iteration_s, entry.span_s))[:_STARTS]
