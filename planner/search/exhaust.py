"""Where all there is is little: every cut, every choice of stages that recompute, every named schedule, every warm-up.

What bounds alone cannot settle (several stages a rank, schedules with backwards in two parts) is settled so on small
graphs. ``complete`` says whether everything was looked at; where warm-ups are too many they are climbed instead.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Final

from planner.cluster import memory_limit
from planner.errors import InputError
from planner.graph import LayerGraph
from planner.schedules import Schedule, ScheduleName, build, default_warmup, ranks_of, shape_fault
from planner.search.bound import cut_bound
from planner.search.figures import LayerFigures
from planner.search.job import job_of_cut
from planner.search.lattice import Lattice
from planner.search.result import Candidate
from planner.search.space import Asked, Configuration
from planner.simulate import Walk, simulate

MOST_LAYERS: Final = 12
"""Larger graphs are not tried."""
_MOST_CUTS: Final = 20_000
"""Cuts of a configuration, times its choices of stages that recompute."""
_MOST_WARMUPS: Final = 300
_MOST_ACTIONS: Final = 1_000_000
_LOADS: Final = 30
_READY: Final = 700
_SIMULATED: Final = 80
"""What a look at the loads of a cut takes, what making it ready, what each simulation on top: in simulated actions."""
_EQUAL: Final = 1e-9

_Warmup = tuple[int, ...] | None


class Exhaust:
    """One pass over some configurations; each candidate that is yielded fits, and is faster than those before it."""

    def __init__(self, graph: LayerGraph, asked: Asked, lattice: Lattice) -> None:
        self.graph: Final = graph
        self.asked: Final = asked
        self.lattice: Final = lattice
        self.limit: Final = memory_limit(asked.cluster)
        self.complete = True
        self.left = _MOST_ACTIONS

    def faster(
        self, configurations: Sequence[Configuration], than_s: float, pulse: Callable[[], None]
    ) -> Iterator[Candidate]:
        """Whatever is faster than a time that is reached; ``pulse`` is called now and then, and may raise."""
        for configuration in configurations:
            schedules = _Schedules(configuration, self.asked.schedules)
            self.complete &= schedules.complete
            for cut, again, least_s in self._cuts(configuration):
                if self.left < 0:
                    self.complete = False
                    return
                if least_s >= than_s * (1 - _EQUAL):
                    continue
                pulse()
                self.left -= _READY
                walk = Walk(job_of_cut(self.graph, self.asked, configuration, cut, again))
                if cut_bound(walk, fused=False) >= than_s * (1 - _EQUAL):
                    continue
                for name, every in schedules.warmups.items():
                    for found in self._timed(walk, schedules, name, every, than_s):
                        than_s = found.iteration_s
                        yield found

    def _cuts(self, configuration: Configuration) -> Iterator[tuple[list[list[str]], tuple[bool, ...], float]]:
        """Every cut and choice of stages that recompute, with what its busiest rank takes."""
        stages = configuration.pipeline * configuration.virtual
        choices = {"none": (False,), "all": (True,), "auto": (False, True)}[self.asked.recompute]
        if self.limit is None and len(choices) > 1:
            choices = (False,)  # it only takes time
        cuts = self.lattice.every_cut(stages, _MOST_CUTS // len(choices) ** stages)
        if cuts is None:
            self.complete = False
            return
        layers = LayerFigures(
            self.graph,
            microbatch_size=configuration.microbatch_size,
            tensor=configuration.tensor,
            cluster=self.asked.cluster,
        )
        homes = ranks_of(configuration.pipeline, configuration.virtual, configuration.placement)
        for ideals in cuts:
            members = [self.lattice.layers(*step) for step in pairwise(ideals)]
            cut = [[self.graph.names[layer] for layer in inside] for inside in members]
            loads = [float(layers.load_s[inside].sum()) for inside in members]
            forwards = [float(layers.forward_s[inside].sum()) for inside in members]
            for again in itertools.product(choices, repeat=stages):
                self.left -= _LOADS
                busy = [0.0] * configuration.pipeline
                for home, load, forward, recomputes in zip(homes, loads, forwards, again, strict=True):
                    busy[home] += load + forward * recomputes
                yield cut, again, configuration.num_microbatches * max(busy)

    def _timed(
        self, walk: Walk, schedules: _Schedules, name: ScheduleName, every: Sequence[_Warmup], than_s: float
    ) -> Iterator[Candidate]:
        """The warm-ups that are faster and fit; where not all stand there, those near the best one too."""
        waiting, seen = list(reversed(every)), set(every)
        climbs = name in schedules.climbed
        while waiting and self.left >= 0:
            warmup = waiting.pop()
            seconds = self._seconds(walk, schedules.schedule(name, warmup))
            if seconds >= than_s * (1 - _EQUAL):
                continue
            found = Candidate(
                configuration=schedules.configuration,
                job=walk.job,
                schedule=name,
                warmup=warmup,
                timeline=simulate(walk, schedules.schedule(name, warmup)),
            )
            if self.limit is not None and found.peak_memory_bytes > self.limit:
                continue
            than_s = seconds
            yield found
            if climbs and warmup is not None:
                near = [one for one in schedules.near(warmup) if one not in seen]
                seen.update(near)
                waiting += near

    def _seconds(self, walk: Walk, schedule: Schedule) -> float:
        self.left -= sum(map(len, schedule)) + _SIMULATED
        try:
            return simulate(walk, schedule, memory=False).iteration_s
        except InputError:  # a warm-up that waits for ever
            return float("inf")


class _Schedules:
    """The named schedules of a shape, each at all its warm-ups; ``climbed``: those with too many."""

    def __init__(self, configuration: Configuration, names: Sequence[ScheduleName]) -> None:
        self.configuration: Final = configuration
        self.deepest: Final = configuration.virtual * configuration.num_microbatches
        self.warmups: Final[dict[ScheduleName, Sequence[_Warmup]]] = {}
        self.climbed: Final[set[ScheduleName]] = set()
        self._made: dict[tuple[ScheduleName, _Warmup], Schedule] = {}
        for name in names:
            fault = shape_fault(name, virtual=configuration.virtual, placement=configuration.placement)
            if fault is None and name is not ScheduleName.SYNTHESISED:
                self.warmups[name] = self._of(name)

    @property
    def complete(self) -> bool:
        """Whether every warm-up is there."""
        return not self.climbed

    def _of(self, name: ScheduleName) -> Sequence[_Warmup]:
        shape, deepest = self.configuration, self.deepest
        default = default_warmup(
            name, num_ranks=shape.pipeline, virtual=shape.virtual, num_microbatches=shape.num_microbatches
        )
        if default is None:
            return [None]
        if deepest**shape.pipeline <= _MOST_WARMUPS:
            return list(itertools.product(range(1, deepest + 1), repeat=shape.pipeline))
        self.climbed.add(name)
        return list(dict.fromkeys((default, *self.near(default), *itertools.islice(self._runs(default), 8))))

    def near(self, warmup: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """One or two more or fewer on one rank."""
        for rank, by in itertools.product(range(len(warmup)), (1, -1, 2, -2)):
            if 1 <= warmup[rank] + by <= self.deepest:
                yield (*warmup[:rank], warmup[rank] + by, *warmup[rank + 1 :])

    def _runs(self, warmup: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """So many more or fewer on all ranks."""
        for by in (1, -1, 2, -2, 3, 4, 6, 8):
            yield tuple(min(self.deepest, max(1, depth + by)) for depth in warmup)

    def schedule(self, name: ScheduleName, warmup: _Warmup) -> Schedule:
        """A schedule at a warm-up, made once."""
        if (name, warmup) not in self._made:
            self._made[name, warmup] = build(
                name,
                num_ranks=self.configuration.pipeline,
                virtual=self.configuration.virtual,
                num_microbatches=self.configuration.num_microbatches,
                placement=self.configuration.placement,
                warmup=warmup,
            )
        return self._made[name, warmup]
