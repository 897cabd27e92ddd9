"""What all parts of one search share: what is asked, what is known, what may still be spent, and how cuts are timed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, NamedTuple

from planner.cluster import memory_limit
from planner.graph import LayerGraph
from planner.profile import Profile
from planner.schedules import ScheduleName
from planner.search.bound import cut_bound
from planner.search.bounds import Bounds
from planner.search.clock import Clock, OutOfTimeError, Progress, Watch
from planner.search.job import job_of_cut
from planner.search.lattice import Lattice
from planner.search.orders import FUSED, LONG, Order, time_cut
from planner.search.result import Candidate
from planner.search.space import Asked, Configuration, configurations
from planner.simulate import Job, Walk, simulate

EQUAL: Final = 1e-9
FAR: Final = 1.06
"""A best time above so many times the least bound that is open is far from proven."""
HOPELESS: Final = 1.04
"""A configuration with a cut so many times slower than the best is left at its first look."""
CLIMB_SIMULATIONS: Final = 35
"""Simulations of one cut's climb over warm-up depths; its starts take about 25 of them."""
BASE_ACTIONS: Final = 150_000
ACTIONS: Final = 15_000
"""Simulated actions (about a microsecond each) that a search may take: the base, and so many times
sqrt(layers · GPUs that some configuration uses); then as many again to settle what is left, and to prove."""
CUT_ACTIONS: Final = 500
"""What making a cut ready to be timed takes, in simulated actions, and for each layer a few more."""

MOST_KEPT: Final = 8
"""Orders of cuts looked at for the first time that are kept: who looks on begins with them."""

Cut = list[list[str]]


class Item(NamedTuple):
    """One configuration under one family of schedules."""

    configuration: Configuration
    names: tuple[ScheduleName, ...]

    @property
    def fused(self) -> bool:
        """Whether the family has whole backwards only."""
        return self.names[0] in FUSED

    @property
    def actions(self) -> int:
        """How many actions one of its orders has, whole backwards counted as two."""
        return 3 * self.configuration.pipeline * self.configuration.virtual * self.configuration.num_microbatches

    @property
    def look_actions(self) -> int:
        """About what it takes to look at it, in simulated actions: a few greedy orders, each several times its own."""
        return (4 * self.actions) // 3 if self.fused else 5 * self.actions


@dataclass(slots=True)
class OpenCut:
    """A cut whose best depths are not proven."""

    item: Item
    job: Job
    bound_s: float
    timed_s: float


@dataclass(slots=True)
class State:
    """What has been found, and what is still open."""

    best: Candidate | None = None
    per_configuration: dict[Configuration, Candidate] = field(default_factory=dict)
    per_schedule: dict[ScheduleName, Candidate] = field(default_factory=dict)
    open_cuts: list[OpenCut] = field(default_factory=list)
    open_items: list[tuple[float, Item]] = field(default_factory=list)
    solved: set[Configuration] = field(default_factory=set)
    """Looked at."""
    settled: set[Item] = field(default_factory=set)
    """All cuts that could be faster were timed."""
    complete: bool = True
    far: bool = False
    """Something far below the best takes more than there is to settle it: no proof will come."""
    left: int = 0
    """Simulated actions that may still be spent."""
    interrupted: bool = False

    @property
    def best_s(self) -> float:
        """The best time found; infinite where there is none."""
        return self.best.iteration_s if self.best else math.inf

    def beats(self, bound_s: float) -> bool:
        """Whether nothing with this bound can be faster than the best."""
        return bound_s >= self.best_s * (1 - EQUAL)


class Search:
    """One search: its question, its state, and the timing of cuts."""

    def __init__(self, profile: Profile, asked: Asked, clock: Clock, watch: Watch | None) -> None:
        self.asked: Final = asked
        self.clock: Final = clock
        self.watch: Final = watch
        self.phase = ""
        self._waiting: Callable[[], int] = lambda: len(self.configurations) - len(self.state.solved)
        self._bound_s = 0.0
        self.times = asked.effort
        """How many times the usual number of cuts and orders may be looked at."""
        self.least_s = 0.0
        """No configuration is faster, as far as that was proven while there was time."""
        self.before = 0
        """Effort spent when they were last made more."""
        self.graph: Final = LayerGraph.of(profile)
        self.limit: Final = memory_limit(asked.cluster)
        self.configurations: Final = configurations(self.graph, asked)
        self.tensors: Final = tuple(sorted({configuration.tensor for configuration in self.configurations}))
        self._gpus: Final = max(configuration.gpus for configuration in self.configurations)
        self.bounds: Final = Bounds(self.graph, asked)
        self._looked: Final[dict[tuple[Item, tuple[tuple[str, ...], ...], tuple[bool, ...]], Order | None]] = {}
        self.state: Final = State(left=self.effort)

    @property
    def effort(self) -> int:
        """Simulated actions that each part of the search may take."""
        return self.times * (BASE_ACTIONS + int(ACTIONS * math.sqrt(len(self.graph) * self._gpus)))

    def spent(self) -> float:
        """By how much the effort is over what it may be."""
        return self.bounds.spent - self.state.left

    def is_over(self) -> bool:
        """Whether the time that was given has run out; half of it, where there is no plan: one has to be made then."""
        return self.clock.is_over(1.0 if self.state.best is not None else 0.5)

    def say(self) -> None:
        """Say where the search stands."""
        if self.watch is not None:
            self.watch(
                Progress(
                    phase=self.phase,
                    configurations=len(self.configurations),
                    solved=len(self.state.solved),
                    left=self._waiting,
                    best_s=self.state.best_s,
                    bound_s=self._bound_s,
                )
            )

    def pulse(self) -> None:
        """Say where the search stands, and end where the time that was given has run out."""
        self.say()
        if self.is_over():
            raise OutOfTimeError

    def tell(self, left: Callable[[], int], bound_s: float) -> None:
        """Say what is looked at now, and how many configurations are left with it."""
        self._waiting, self._bound_s = left, bound_s
        self.pulse()

    def job(self, item: Item, cut: Cut, recompute: tuple[bool, ...]) -> Job:
        """A cut as the time model takes it."""
        return job_of_cut(self.graph, self.asked, item.configuration, cut, recompute)

    def look_at(self, item: Item, cut: Cut, recompute: tuple[bool, ...], bound_s: float) -> Order | None:
        """Time one cut quickly; what was seen lately, and not taken up yet, is there at once."""
        key = (item, tuple(map(tuple, cut)), recompute)
        if key in self._looked:
            return self._looked.pop(key)
        order = self.time_cut(item, cut, recompute, bound_s, quick=True)
        if item.actions <= LONG:
            if len(self._looked) >= MOST_KEPT:
                del self._looked[next(iter(self._looked))]
            self._looked[key] = order
        return order

    def time_cut(
        self, item: Item, cut: Cut, recompute: tuple[bool, ...], bound_s: float, *, quick: bool = False
    ) -> Order | None:
        """Time one cut under every schedule of the family; its best order where it was worth timing."""
        self.pulse()
        state, configuration = self.state, item.configuration
        job = self.job(item, cut, recompute)
        walk = Walk(job)
        self.bounds.spent += CUT_ACTIONS + 20 * len(self.graph)
        bound = max(bound_s, cut_bound(walk, fused=item.fused))
        if bound > state.best_s * (1 + EQUAL):
            return None
        effort = CLIMB_SIMULATIONS * 2 * configuration.num_microbatches * configuration.pipeline
        effort = max(min(effort, -int(self.spent())), 0)
        timing = time_cut(
            walk, configuration, item.names, bound_s=bound, effort=effort, quick=quick, is_over=self.is_over
        )
        self.bounds.spent += timing.spent
        if timing.may_be_beaten and not quick:  # a first look is no more: what is settled is timed again
            seconds = timing.best.iteration_s if timing.best else math.inf
            state.open_cuts.append(OpenCut(item=item, job=job, bound_s=bound, timed_s=seconds))
        if timing.best is not None:
            self.offer(configuration, job, timing.best)
        return timing.best

    def offer(self, configuration: Configuration, job: Job, order: Order) -> None:
        """Take a timed cut where it is better than what there is."""
        state = self.state
        known, alike = state.per_configuration.get(configuration), state.per_schedule.get(order.name)
        if all(one is not None and order.iteration_s > one.iteration_s * (1 + EQUAL) for one in (known, alike)):
            return
        candidate = Candidate(
            configuration=configuration,
            job=job,
            schedule=order.name,
            warmup=order.warmup,
            timeline=simulate(job, order.schedule, levels=False),
        )
        if candidate.better_than(alike):
            state.per_schedule[order.name] = candidate
        if candidate.better_than(known):
            state.per_configuration[configuration] = candidate
        if candidate.better_than(state.best):
            state.best = candidate

    def between(self, ideals: tuple[int, ...], lattice: Lattice) -> Cut:
        """The layers of the stages between ideals."""
        return [[self.graph.names[layer] for layer in lattice.layers(start, end)] for start, end in pairwise(ideals)]

    def by_stage(self, stage_of: tuple[int, ...], stages: int) -> Cut:
        """The layers of each stage, where each layer's stage is given."""
        return [
            [self.graph.names[layer] for layer, home in enumerate(stage_of) if home == stage] for stage in range(stages)
        ]
