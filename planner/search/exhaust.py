"""Where all there is is little: every cut, every choice of stages that recompute, every named schedule, every warm-up.

    list      every cut of every configuration whose bound is below the best time
    settle    cut by cut, least bound first: branch and bound over warm-ups and recompute (warmups.py)
    climb     where that is too much: warm-ups near the usual ones and near what they lead to
    invent    orders of their own, for the nearest of the cuts that remain: what no schedule has may be faster still

What bounds alone cannot settle (several stages a rank, schedules with backwards in two parts) is settled so on small
graphs. ``complete`` says whether everything was looked at.
"""

from __future__ import annotations

import contextlib
import dataclasses
import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np

from planner.cluster import memory_limit
from planner.errors import InputError
from planner.graph import LayerGraph
from planner.schedules import ScheduleName, default_warmup, ranks_of, shape_fault
from planner.search.bound import cut_bound
from planner.search.figures import LayerFigures
from planner.search.job import job_of_cut
from planner.search.lattice import Floats, Lattice
from planner.search.listed import chain_cuts
from planner.search.orders import FUSED
from planner.search.result import Candidate
from planner.search.space import Asked, Configuration
from planner.search.warmups import Branching, Effort, OutOfEffortError, Parts, Rows, parts_of, rows_of, with_recompute
from planner.simulate import Job, Walk, simulate
from planner.simulate.memory import resident_bytes
from planner.simulate.synthesise import synthesise

MOST_LAYERS: Final = 12
"""Larger graphs are not tried, but for chains whose cuts are listed as arrays, with less effort."""
_LARGER: Final = 0.15
_LIST: Final = 10_000_000
_SETTLE: Final = 6_000_000
_CLIMB: Final = 600_000
_INVENT: Final = 250_000
"""What listing, settling, climbing and inventing may take, in simulated actions (about a microsecond each)."""
_READY: Final = 400
_READY_PAIR: Final = 8
_SIMULATED: Final = 80
"""What making a cut ready takes, at the least and for each pair of stages; what each simulation takes on top."""
_ORDERS, _SWAPS = 150, 40
"""How many times its actions an order of its own takes; swaps on its critical path."""
_SOON: Final = (10, 30, 100)
_OFTEN: Final = 300
"""After so many listed cuts the nearest of them is settled, so that fewer are left to list."""
_EQUAL: Final = 1e-9

_Warmup = tuple[int, ...]


class _Begun(NamedTuple):
    """A cut that may be faster, by its bound."""

    bound_s: float
    place: int
    configuration: Configuration
    ideals: tuple[int, ...]


class Exhaust:
    """One pass over some configurations; each candidate that is yielded fits, and is faster than those before it."""

    def __init__(self, graph: LayerGraph, asked: Asked, lattice: Lattice) -> None:
        self.graph: Final = graph
        self.asked: Final = asked
        self.lattice: Final = lattice
        self.limit: Final = memory_limit(asked.cluster)
        choices = {"none": (False,), "all": (True,), "auto": (False, True)}[asked.recompute]
        self.choices: Final = choices if self.limit is not None else choices[:1]  # it only takes time
        self.effort: Final = asked.effort * (1.0 if len(graph) <= MOST_LAYERS else _LARGER)
        self.complete = True
        self.than_s = math.inf
        self._unlimited: Final = dataclasses.replace(
            asked, cluster=dataclasses.replace(asked.cluster, memory_bytes=None)
        )
        first = np.searchsorted(lattice.start, np.arange(len(lattice) + 1))
        self._ends: Final = [lattice.end[low:high].tolist() for low, high in pairwise(first)]
        self._left: Final = (lattice.size[-1] - lattice.size).tolist()
        self._rows: dict[tuple[ScheduleName, Configuration], list[Rows] | None] = {}
        self._parts: dict[tuple[ScheduleName, Configuration], Parts] = {}
        self._names: dict[tuple[int, int], list[str]] = {}

    def faster(
        self, configurations: Sequence[Configuration], than_s: float, pulse: Callable[[], None]
    ) -> Iterator[Candidate]:
        """Whatever is faster than a time that is reached; ``pulse`` is called now and then, and may raise."""
        self.than_s = than_s
        begun: list[_Begun] = []
        soon: list[_Begun] = []
        small = len(self.graph) <= MOST_LAYERS
        try:
            listing = Effort(int(self.effort * _LIST), pulse)
            for number, one in enumerate(self._listed(configurations, listing)):
                heapq.heappush(begun, one)
                if small and (number in _SOON or number % _OFTEN == _OFTEN - 1):
                    soon.append(heapq.heappop(begun))
                    yield from self._settled(soon[-1], listing)
        except OutOfEffortError:
            self.complete = False
        if not small and not self.complete:
            return  # no proof would come of it
        for pass_, effort in ((self._settled, _SETTLE), (self._climbed, _CLIMB)):
            spent = Effort(int(self.effort * effort), pulse)
            try:
                for one in sorted(begun):
                    if self._beats(one.bound_s):
                        yield from pass_(one, spent)
            except OutOfEffortError:
                self.complete = False
            if self.complete:
                break
        if ScheduleName.SYNTHESISED in self.asked.schedules:
            inventing = Effort(int(self.effort * _INVENT), pulse)
            with contextlib.suppress(OutOfEffortError):
                for one in sorted((*soon, *begun)):
                    if self._beats(one.bound_s):
                        yield from self._invented(one, inventing)

    def _beats(self, seconds: float) -> bool:
        return seconds < self.than_s * (1 - _EQUAL)

    # --- cuts ---------------------------------------------------------------------------------------------------------

    def _listed(self, configurations: Sequence[Configuration], effort: Effort) -> Iterator[_Begun]:
        """Every cut that its busiest rank and its bound leave below the best time."""
        place = itertools.count()
        for configuration in configurations:
            layers = self._layers_of(configuration)
            cuts = chain_cuts(layers, configuration, self.choices, fused=self._is_fused(configuration))
            if cuts is not None:
                near = cuts.below(self.than_s * (1 - _EQUAL))
                effort.spend(cuts.spent)
                if near is None:
                    raise OutOfEffortError
                for bound, marks in zip(near.bounds_s.tolist(), near.marks.tolist(), strict=True):
                    if self._beats(bound):
                        effort.spend(1)
                        yield _Begun(bound, next(place), configuration, tuple(marks))
                continue
            loads = layers.load_s + (layers.forward_s if self.choices[0] else 0.0)
            for ideals in self._light(configuration, loads * configuration.num_microbatches, effort):
                effort.spend(_ready(len(ideals) - 1))
                job = self._job(configuration, ideals)
                if self.limit is not None and any(resident_bytes(job, r) > self.limit for r in range(job.num_ranks)):
                    continue
                bound = cut_bound(Walk(job), fused=False)
                if self._beats(bound):
                    yield _Begun(bound, next(place), configuration, ideals)

    def _layers_of(self, configuration: Configuration) -> LayerFigures:
        return LayerFigures(
            self.graph,
            microbatch_size=configuration.microbatch_size,
            tensor=configuration.tensor,
            cluster=self.asked.cluster,
        )

    def _is_fused(self, configuration: Configuration) -> bool:
        """Whether all schedules asked for run W's right after their I's: those of two parts do so on one rank."""
        named = [name for name in self._suited(configuration) if name is not ScheduleName.SYNTHESISED]
        return configuration.pipeline == 1 or all(name in FUSED for name in named)

    def _light(self, configuration: Configuration, loads: Floats, effort: Effort) -> Iterator[tuple[int, ...]]:
        """The ideals of every cut with no rank that has more to do than the best time."""
        before = (self.lattice.members @ loads).tolist()  # of all layers in an ideal
        homes = ranks_of(configuration.pipeline, configuration.virtual, configuration.placement)
        busy = [0.0] * configuration.pipeline

        def going_on(begun: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
            stage, start = len(begun) - 1, begun[-1]
            if stage == len(homes):
                yield begun
                return
            home, left = homes[stage], len(homes) - stage - 1
            for end in self._ends[start]:
                if self._left[end] < left or (left == 0 and self._left[end]):
                    continue
                effort.spend(1)
                load = before[end] - before[start]
                if self._beats((busy[home] + load) * (1 - _EQUAL)):
                    busy[home] += load
                    yield from going_on((*begun, end))
                    busy[home] -= load

        return going_on((0,))

    def _job(self, configuration: Configuration, ideals: Sequence[int], *, limited: bool = False) -> Job:
        """A cut as it comes: no stage recomputes that need not; ``limited``: in the memory that there is."""
        for step in pairwise(ideals):
            if step not in self._names:
                self._names[step] = [self.graph.names[layer] for layer in self.lattice.layers(*step)]
        cut = [self._names[step] for step in pairwise(ideals)]
        asked = self.asked if limited or len(self.choices) == 1 else self._unlimited
        return job_of_cut(self.graph, asked, configuration, cut, [self.choices[0]] * len(cut))

    # --- orders -------------------------------------------------------------------------------------------------------

    def _settled(self, one: _Begun, effort: Effort) -> Iterator[Candidate]:
        """All warm-ups and choices of what recomputes."""
        effort.spend(_ready(len(one.ideals) - 1))
        if not self._beats(self._bound_of(one)):
            return
        branching = Branching(self._job(one.configuration, one.ideals, limited=True), self.choices, effort)
        for name in self._suited(one.configuration):
            if not branching.may_be_faster(self._parts_of(name, one.configuration), self.than_s):
                continue
            for rows in self._rows_of(name, one.configuration):
                for walk, warmup, timeline in branching.faster(rows, self.than_s):
                    self.than_s = timeline.iteration_s
                    yield Candidate(
                        configuration=one.configuration,
                        job=walk.job,
                        schedule=name,
                        warmup=warmup,
                        timeline=timeline,
                    )

    def _bound_of(self, one: _Begun) -> float:
        """The bound of a cut, ties and all."""
        bound = cut_bound(Walk(self._job(one.configuration, one.ideals)), fused=self._is_fused(one.configuration))
        return max(bound, one.bound_s)

    def _suited(self, shape: Configuration) -> list[ScheduleName]:
        """The schedules asked for that suit a shape, without those that another one has among its warm-ups."""
        names = [
            name
            for name in self.asked.schedules
            if not shape_fault(name, virtual=shape.virtual, placement=shape.placement)
        ]
        if ScheduleName.ZB_H1 in names:
            names = [name for name in names if name is not ScheduleName.ZB_H2]
        if shape.virtual == 1 and ScheduleName.ONE_F_ONE_B in names:
            same = (ScheduleName.GPIPE, ScheduleName.INTERLEAVED, ScheduleName.LOOPED_BFS)
            names = [name for name in names if name not in same]
        return names

    def _parts_of(self, name: ScheduleName, configuration: Configuration) -> Parts:
        key = (name, configuration)
        if key not in self._parts:
            self._parts[key] = parts_of(name, configuration)
        return self._parts[key]

    def _rows_of(self, name: ScheduleName, configuration: Configuration) -> list[Rows]:
        """What the ranks may run; nothing, where warm-ups are too many."""
        key = (name, configuration)
        if key not in self._rows:
            self._rows[key] = rows_of(name, configuration)
        rows = self._rows[key]
        self.complete &= rows is not None
        return rows or []

    def _climbed(self, one: _Begun, effort: Effort) -> Iterator[Candidate]:
        """Usual warm-ups, with no stage or all recomputing, and what is near those that are faster and fit."""
        effort.spend(_ready(len(one.ideals) - 1))
        job, shape = self._job(one.configuration, one.ideals, limited=True), one.configuration
        walks: dict[tuple[bool, ...], Walk] = {}
        starts = [(choice,) * len(job.stages) for choice in self.choices]
        for name in self._suited(shape):
            waiting = list(itertools.product(_usual(name, shape), starts))[::-1]
            seen = set(waiting)
            while waiting:
                warmup, again = waiting.pop()
                if again not in walks:
                    walks[again] = Walk(with_recompute(job, again))
                found = self._timed(walks[again], shape, name, warmup, effort)
                if found is not None:
                    self.than_s = found.iteration_s
                    yield found
                    near = [entry for entry in _near(shape, warmup, again, self.choices) if entry not in seen]
                    seen.update(near)
                    waiting += near

    def _invented(self, one: _Begun, effort: Effort) -> Iterator[Candidate]:
        """An order of its own, with no stage or all recomputing."""
        job = self._job(one.configuration, one.ideals, limited=True)
        for choice in self.choices:
            effort.spend(_ORDERS * 3 * len(job.stages) * job.num_microbatches)
            walk = Walk(with_recompute(job, (choice,) * len(job.stages)))
            order = synthesise(walk, steps=_SWAPS, bound_s=one.bound_s)
            timeline = simulate(walk, order, levels=False) if order is not None else None
            if timeline is not None and self._beats(timeline.iteration_s):
                self.than_s = timeline.iteration_s
                yield Candidate(
                    configuration=one.configuration,
                    job=walk.job,
                    schedule=ScheduleName.SYNTHESISED,
                    warmup=None,
                    timeline=timeline,
                )

    def _timed(
        self,
        walk: Walk,
        shape: Configuration,
        name: ScheduleName,
        warmup: _Warmup | None,
        effort: Effort,
    ) -> Candidate | None:
        """A plan, if it is faster and fits."""
        schedule = shape.schedule(name, warmup)
        effort.spend(sum(map(len, schedule)) + _SIMULATED)
        try:
            if not self._beats(simulate(walk, schedule, memory=False).iteration_s):
                return None
        except InputError:  # a warm-up that waits for ever
            return None
        timeline = simulate(walk, schedule, levels=False)
        if self.limit is not None and max(use.peak_memory_bytes for use in timeline.ranks) > self.limit:
            return None
        return Candidate(configuration=shape, job=walk.job, schedule=name, warmup=warmup, timeline=timeline)


def _ready(stages: int) -> int:
    """What making a cut of so many stages ready takes."""
    return max(_READY, _READY_PAIR * stages**2)


def _usual(name: ScheduleName, shape: Configuration) -> list[_Warmup | None]:
    """The default warm-up, one or two more or fewer on one rank, some more or fewer on all."""
    deepest = shape.virtual * shape.num_microbatches
    usual = default_warmup(
        name, num_ranks=shape.pipeline, virtual=shape.virtual, num_microbatches=shape.num_microbatches
    )
    if usual is None:
        return [None]
    runs = (tuple(min(deepest, max(1, depth + by)) for depth in usual) for by in (1, -1, 2, -2, 3, 4, 6, 8))
    return list(dict.fromkeys((usual, *_changed(usual, deepest), *runs)))


def _changed(warmup: _Warmup, deepest: int) -> Iterator[_Warmup]:
    """One or two more or fewer on one rank."""
    for rank, by in itertools.product(range(len(warmup)), (1, -1, 2, -2)):
        if 1 <= warmup[rank] + by <= deepest:
            yield (*warmup[:rank], warmup[rank] + by, *warmup[rank + 1 :])


def _near(
    shape: Configuration, warmup: _Warmup | None, again: tuple[bool, ...], choices: Sequence[bool]
) -> Iterator[tuple[_Warmup | None, tuple[bool, ...]]]:
    """A little more or less on one rank; one stage more or fewer that recomputes."""
    if warmup is not None:
        for changed in _changed(warmup, shape.virtual * shape.num_microbatches):
            yield changed, again
    for stage in range(len(again)) if len(choices) > 1 else ():
        yield warmup, (*again[:stage], not again[stage], *again[stage + 1 :])
