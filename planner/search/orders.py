"""One cut under every schedule of a family that was asked for: the fastest that fits, and whether it may be beaten.

fused   gpipe, 1f1b (depths climbed), interleaved-1f1b, looped-bfs
split   zb-h1 (at several depths), zb-h2, zb-v, dualpipe-v, v-half, v-min, synthesised
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from planner.cluster import memory_limit
from planner.errors import InputError
from planner.schedules import Schedule, ScheduleName, default_warmup, shape_fault
from planner.search.buckets import in_buckets
from planner.search.depth import Depths1F1B
from planner.search.space import Configuration
from planner.search.stretch import STRETCHES, stretched
from planner.simulate import Timeline, Walk, simulate
from planner.simulate.blocks import Placed, block, busiest_s, held, repeated
from planner.simulate.greedy import Rule, Turn
from planner.simulate.memory import resident_bytes
from planner.simulate.synthesise import less_messages, synthesise, within

FUSED: Final = (
    ScheduleName.GPIPE,
    ScheduleName.ONE_F_ONE_B,
    ScheduleName.INTERLEAVED,
    ScheduleName.LOOPED_BFS,
)
SPLIT: Final = (
    ScheduleName.ZB_H1,
    ScheduleName.ZB_H2,
    ScheduleName.ZB_V,
    ScheduleName.DUALPIPE_V,
    ScheduleName.V_HALF,
    ScheduleName.V_MIN,
    ScheduleName.SYNTHESISED,
)
_EQUAL: Final = 1e-9
NEAR: Final = 0.03
"""At first sight an order this near to its bound is not tried to be bettered by letting in fewer micro-batches."""
GAPS: Final = (2.0, 1.0, 0.75, 0.5, 0.25, 0.0)
"""By how many times its length what an F of a block hands on is put off, where memory lets it."""
LONG: Final = 300_000
"""Actions from which on list scheduling takes too long where repeating a block will do."""
BLOCK_ACTIONS: Final = 20
"""What placing an action of a block takes, in simulated actions."""
GREEDY_MOST: Final = 100_000
"""Actions up to which greedy orders are made under several rules; above, under one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One order of a cut that fits, and its time. ``warmup`` where the schedule has one and it is not the default."""

    iteration_s: float
    name: ScheduleName
    warmup: tuple[int, ...] | None
    schedule: Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """The best order found of a cut, the simulated actions it took, and whether named ones may be faster still."""

    best: Order | None
    spent: int
    may_be_beaten: bool


def time_cut(
    walk: Walk,
    configuration: Configuration,
    names: tuple[ScheduleName, ...],
    *,
    bound_s: float,
    effort: int,
    quick: bool = False,
    is_over: Callable[[], bool] = lambda: False,
) -> Timing:
    """The best order of a cut under schedules of one family; ``bound_s``: no order of that family is faster.

    ``quick``: named schedules only as they come, list scheduling under its best rules. Ends where ``is_over`` says so.
    """
    if configuration.virtual == 1 and names[0] in FUSED:  # looped-bfs is GPipe there
        return _one_stage_fused(walk, configuration, names, bound_s, effort)
    trial = _Trial(walk)
    quick = quick or 3 * len(walk.job.stages) * configuration.num_microbatches > GREEDY_MOST
    for name, warmup, schedule in _named(configuration, names, quick=quick):
        if is_over():
            break
        if trial.best is None or trial.best.iteration_s > bound_s * (1 + _EQUAL):
            trial.look(name, warmup, schedule)
    if ScheduleName.SYNTHESISED in names:
        buckets = in_buckets(walk) if configuration.pipeline == 1 else ()
        timed = (simulate(walk, schedule, memory=False) for schedule in buckets)
        for timeline in itertools.chain(timed, _greedy(walk, bound_s, trial, quick=quick)):
            if is_over():
                break
            trial.take(ScheduleName.SYNTHESISED, None, timeline)
    named = [name for name in names if name is not ScheduleName.SYNTHESISED]
    reached = trial.best is not None and trial.best.iteration_s <= bound_s * (1 + _EQUAL)
    return Timing(best=trial.best, spent=trial.spent, may_be_beaten=bool(named) and not reached)


def polished(walk: Walk, order: Order, *, bound_s: float, steps: int) -> Order:
    """The order, or a faster one: list scheduling under all rules, and swaps on the critical path."""
    made = synthesise(walk, others=(order.schedule,), steps=steps, bound_s=bound_s)
    if made is None:
        return order
    seconds = simulate(walk, made, memory=False).iteration_s
    if seconds >= order.iteration_s * (1 - _EQUAL):
        return order
    return Order(iteration_s=seconds, name=ScheduleName.SYNTHESISED, warmup=None, schedule=made)


def _one_stage_fused(
    walk: Walk, configuration: Configuration, names: tuple[ScheduleName, ...], bound_s: float, effort: int
) -> Timing:
    """GPipe and 1F1B with one stage a rank: GPipe is 1F1B at the full depth."""
    depths = Depths1F1B(walk, memory_limit(walk.job.cluster))
    everything = (configuration.num_microbatches,) * configuration.pipeline
    name = next((n for n in (ScheduleName.ONE_F_ONE_B, ScheduleName.INTERLEAVED) if n in names), None)  # one at v = 1
    searched = name is not None
    timed = depths.climb(bound_s, effort) if searched else depths.timed(everything)
    if timed is None:
        return Timing(best=None, spent=depths.spent, may_be_beaten=searched)
    gpipe = timed.depths == everything and ScheduleName.GPIPE in names
    best = Order(
        iteration_s=timed.iteration_s,
        name=ScheduleName.GPIPE if gpipe or name is None else name,
        warmup=None if gpipe else timed.depths,
        schedule=depths.schedule(timed.depths),
    )
    beaten = searched and timed.iteration_s > bound_s * (1 + _EQUAL)
    return Timing(best=best, spent=depths.spent, may_be_beaten=beaten)


class _Trial:
    """Orders of one job looked at in turn: the fastest that fits."""

    def __init__(self, walk: Walk) -> None:
        self.walk: Final = walk
        self.limit: Final = memory_limit(walk.job.cluster)
        self.best: Order | None = None
        self.spent = 0

    def look(self, name: ScheduleName, warmup: tuple[int, ...] | None, schedule: Schedule) -> None:
        """Take an order where it is faster than what there is, and fits."""
        try:
            timeline = simulate(self.walk, schedule, memory=False)
        except InputError:  # a warm-up that waits for ever
            self.spent += sum(map(len, schedule))
            return
        self.take(name, warmup, timeline)

    def take(self, name: ScheduleName, warmup: tuple[int, ...] | None, timeline: Timeline) -> None:
        """The same of an order that was simulated, with its memory or without."""
        schedule, actions = timeline.schedule, sum(map(len, timeline.schedule))
        self.spent += actions
        if self.best is not None and timeline.iteration_s >= self.best.iteration_s * (1 - _EQUAL):
            return
        if self.limit is not None:
            self.spent += 2 * actions
            most = max(use.peak_memory_bytes for use in timeline.ranks)
            if not most:
                most = max(use.peak_memory_bytes for use in simulate(self.walk, schedule, levels=False).ranks)
            if most > self.limit:
                return
        self.best = Order(iteration_s=timeline.iteration_s, name=name, warmup=warmup, schedule=schedule)


def _named(
    configuration: Configuration, names: tuple[ScheduleName, ...], *, quick: bool
) -> Iterator[tuple[ScheduleName, tuple[int, ...] | None, Schedule]]:
    """The named schedules that this shape allows, at their default and at some other depths."""
    shape = {
        "num_ranks": configuration.pipeline,
        "virtual": configuration.virtual,
        "num_microbatches": configuration.num_microbatches,
    }
    for name in names:
        if name is ScheduleName.SYNTHESISED:
            continue
        if shape_fault(name, virtual=configuration.virtual, placement=configuration.placement):
            continue
        for warmup in (None, *(() if quick else _depths(name, configuration))):
            made = configuration.schedule(name, warmup)
            yield name, warmup if warmup is not None else default_warmup(name, **shape), made


def _depths(name: ScheduleName, configuration: Configuration) -> Iterator[tuple[int, ...]]:
    """Deeper warm-ups than the default: a little more on every rank but the last, and more the further from it."""
    ranks, most = configuration.pipeline, configuration.virtual * configuration.num_microbatches
    default = default_warmup(
        name, num_ranks=ranks, virtual=configuration.virtual, num_microbatches=configuration.num_microbatches
    )
    if default is None:
        return
    seen = {default}
    for slope, step in ((0, 1), (0, 2), (0.5, 0), (1, 0), (2, 0)):
        made = tuple(
            min(most, depth + math.ceil(slope * (ranks - 1 - rank)) + (step if rank < ranks - 1 else 0))
            for rank, depth in enumerate(default)
        )
        if made not in seen:
            seen.add(made)
            yield made


def _greedy(walk: Walk, bound_s: float, trial: _Trial, *, quick: bool) -> Iterator[Timeline]:
    """Orders by list scheduling, until one reaches the bound."""
    job = walk.job
    limit = memory_limit(job.cluster)
    budgets = tuple(None if limit is None else limit - resident_bytes(job, rank) for rank in range(job.num_ranks))
    actions = 3 * len(job.stages) * job.num_microbatches
    turns = tuple(Turn) if len(job.stages) > job.num_ranks else (Turn.DEEPEST,)
    rules = [(True, turn, alternate) for turn in turns for alternate in (False, True)]
    rules += [(False, turn, True) for turn in turns]
    if quick:
        rules = rules[:1]
    if actions > LONG:
        repeats = False
        for order in _blocks(walk, trial):
            repeats = True
            yield simulate(walk, order, memory=False)
        if repeats:
            return
    windows: tuple[int | None, ...] = (None,)
    aheads: tuple[tuple[int, ...] | None, ...] = (None,)
    several = limit is not None and len(job.stages) > job.num_ranks
    if several:
        windows = (None,) if quick else (None, *_windows(walk))
    elif limit is not None:
        aheads = tuple(_aheads(walk, slack) for slack in ((1,) if quick else (0, 1, 2)))
    for (split, turn, alternate), window, ahead in itertools.product(rules, windows, aheads):
        if trial.best is not None and trial.best.iteration_s <= bound_s * (1 + _EQUAL):
            return
        rule = Rule(
            split=split,
            turn=turn,
            alternate=alternate,
            patience=0.0,
            budget_bytes=budgets,
            window=window,
            ahead=ahead,
        )
        trial.spent += 5 * actions
        timeline = within(walk, rule, limit, tries=2 if quick else 6)
        if timeline is not None:
            yield timeline
    if several:
        yield from _shared(walk, budgets, rules, bound_s, trial, quick=quick)


def _blocks(walk: Walk, trial: _Trial) -> Iterator[Schedule]:
    """Orders that repeat one block: of each kind that which holds most and fits, for it fills the pipeline soonest."""
    job, limit, period_s = walk.job, trial.limit, busiest_s(walk)
    if job.num_ranks == 1 or not period_s:
        return
    for split in (True, False):
        for gap in GAPS:
            made = block(walk, period_s, split=split, gap=gap)
            trial.spent += BLOCK_ACTIONS * len(made)
            if limit is not None and any(over > 0 for over in missing_bytes(walk, made, period_s, limit)):
                trial.spent += job.num_microbatches * len(made) // 4
                continue
            trial.spent += job.num_microbatches * len(made) // 2
            yield repeated(walk, made, period_s)
            break


def missing_bytes(walk: Walk, made: Sequence[Placed], period_s: float, limit: int) -> list[int]:
    """By how much each rank that repeats a block holds more than there is; negative: less."""
    most = enumerate(held(walk, made, period_s))
    return [resident_bytes(walk.job, rank) + size - limit for rank, size in most]


def _shared(
    walk: Walk,
    budgets: tuple[float | None, ...],
    rules: list[tuple[bool, Turn, bool]],
    bound_s: float,
    trial: _Trial,
    *,
    quick: bool,
) -> Iterator[Timeline]:
    """Orders whose stages share each rank's memory by the length of their round trips."""
    spare, limit = less_messages(walk, budgets), memory_limit(walk.job.cluster)
    seen: set[tuple[tuple[int, ...], bool, Turn, bool]] = set()
    stretches, near = (STRETCHES[:2], NEAR) if quick else (STRETCHES, _EQUAL)
    if len(rules) == 1:
        rules = [(rules[0][0], rules[0][1], True)]
    for stretch, (split, turn, alternate) in itertools.product(stretches, rules):
        if trial.best is not None and trial.best.iteration_s <= bound_s * (1 + near):
            return
        depths = stretched(walk, spare, stretch, 1.0, split=split)
        if depths is None or (depths, split, turn, alternate) in seen:
            continue
        seen.add((depths, split, turn, alternate))
        rule = Rule(split=split, turn=turn, alternate=alternate, budget_bytes=budgets, depths=depths)
        trial.spent += 5 * 3 * len(walk.job.stages) * walk.job.num_microbatches
        timeline = within(walk, rule, limit, tries=1 if quick else 3)
        if timeline is not None:
            yield timeline


def _aheads(walk: Walk, slack: int) -> tuple[int, ...]:
    """Forwards that each rank of one stage may be ahead: what its round trip takes, so that no rank floods the next."""
    ranks = walk.job.num_ranks
    loads = [cost.forward_s + cost.backward_s for cost in walk.durations]
    trip_s, made = 0.0, [0] * ranks
    for rank in range(ranks - 1, -1, -1):
        cost = walk.durations[rank]
        trip_s += cost.forward_s + cost.backward_input_s
        trip_s += sum(parcel.busy_s + parcel.latency_s for parcel in walk.sends[rank].parcels)
        trip_s += sum(parcel.busy_s + parcel.latency_s for parcel in walk.returns[rank].parcels)
        made[rank] = max(math.ceil(trip_s / max(loads)) if max(loads) > 0 else 1, ranks - rank) + slack
    return tuple(made)


def _windows(walk: Walk) -> tuple[int, ...]:
    """How many micro-batches to let in at once where memory is limited: what keeps all ranks busy, and a few more.

    One takes its round trip through all stages and back; a rank is ready for the next after its load. More would fill
    the first stages' memory, and leave none to bring the oldest through the later ones.
    """
    trip_s = sum(cost.forward_s + cost.backward_input_s for cost in walk.durations)
    loads = [0.0] * walk.job.num_ranks
    for stage, cost in zip(walk.job.stages, walk.durations, strict=True):
        loads[stage.rank] += cost.forward_s + cost.backward_s
    least = math.ceil(trip_s / max(loads)) if max(loads) > 0 else 1
    return least, least + 2
