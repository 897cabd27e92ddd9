"""The search over configurations: best bound first, until the next bound passes the best simulated time.

    bounds      every configuration gets a cheap bound under each family of schedules (fused, split); the least one is
                made exact and put back, until the least is exact
    look        its most promising cuts are timed under the family's schedules: the best time of all rules out most of
                the rest by their bounds alone
    settle      what lies below the best then: cuts in order of their bound, each timed, until the next one's bound
                passes the best time
    prove       what still lies between a cut's bound and the best is settled by branch and bound over its depths

``proven`` says that every configuration was solved or pruned so: no named schedule asked for, at any warm-up depth, is
faster on any cut. All limits are counts (cuts, nodes, simulated actions), so one input gives one plan; only
``max_seconds`` and an interrupt end a search early, with the best so far and what is proven of it.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np

from planner.cluster import memory_limit
from planner.graph import LayerGraph
from planner.profile import Profile
from planner.schedules import ScheduleName
from planner.search.baselines import baselines
from planner.search.bound import cut_bound
from planner.search.bounds import Bounds
from planner.search.depth import Depths1F1B, Timed
from planner.search.exhaust import MOST_LAYERS, Exhaust
from planner.search.figures import Figures
from planner.search.incumbent import topological_orders
from planner.search.job import job_of_cut
from planner.search.lattice import Bools, Floats, Ints, Lattice, along
from planner.search.lean import leanest
from planner.search.orders import FUSED, SPLIT, Order, polished, time_cut
from planner.search.passes import Passes
from planner.search.result import Candidate, Found
from planner.search.shortfall import no_plan_fits, no_schedule_suits
from planner.search.smaller import on_the_original, smaller
from planner.search.space import Asked, Configuration, configurations
from planner.search.suffix import BoundedCut, SuffixBound
from planner.simulate import Job, Walk, simulate

_EQUAL: Final = 1e-9
MOST_CUTS: Final = 300
"""Cuts timed in one configuration."""
FIRST_CUTS: Final = 40
"""Cuts timed in one configuration before it is counted how many are left below the best."""
SETTLED_CUTS: Final = 4
"""Cuts that must be within the effort, else a configuration is not settled."""
MOST_NODES: Final = 20_000
"""Begun cuts looked at in one configuration."""
MOST_TIES: Final = 24
"""Cuts looked at beyond those that could be faster, for a more even one among equals."""
LOOK_NODES: Final = 25
"""Begun cuts looked at for each rank, at first sight."""
QUICK_CUTS: Final = 2
"""Cuts timed in a configuration at first sight."""
CLIMB_SIMULATIONS: Final = 35
"""Simulations of one cut's climb over warm-up depths; its starts take about 25 of them."""
POLISH_SIMULATIONS: Final = 400
"""Simulations of the climb of the best cut of all."""
POLISH_SWAPS: Final = 40
"""Swaps on the critical path of the best synthesised order."""
BASE_ACTIONS: Final = 150_000
ACTIONS: Final = 15_000
"""Simulated actions (about a microsecond each) that a search may take: the base, and so many times sqrt(layers · GPUs);
then as many again to settle what is left, and to prove."""
CUT_ACTIONS: Final = 500
"""What making a cut ready to be timed takes, in simulated actions, and for each layer a few more."""
ILP_ROUNDS: Final = 20
"""Cuts that the ILP may bring, one after another, in a configuration of a graph with many ideals."""
ORDERS: Final = 60
"""Topological orders tried there before."""
PHASES: Final = ((False, True, 0.4), (False, False, 0.5), (True, True, 0.9), (True, False, 1.0))
"""Whether ranks have several stages, whether all GPUs are used, and how much of the effort may be spent by then."""
FIRST_PASSES: Final = (1.0, 0.6, 0.3)
"""Starts of the cuts with several stages a rank: the first stage of each rank against its others."""
PASS_ACTIONS: Final = 200
"""What sliding the windows over such a cut takes, in simulated actions for each stage."""
SEARCH_ON: Final = 1.5
"""Up to how many times the effort of the first looks is spent before and on searching on from random starts."""
STARTS: Final = 12
"""Random starts that one such cut is the best of."""
NEAREST: Final = 3
"""Configurations with several stages a rank that are searched on with the effort that is left."""
FEEDBACKS: Final = 4
"""How often such a cut is made again with what its ranks were seen to wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where a search stands."""

    configurations: int
    solved: int
    pruned: int
    best_s: float
    bound_s: float


_NO_CUT: Final = BoundedCut(bound_s=math.inf, ideals=(), recompute=())

Watch = Callable[[Progress], None]
Cut = list[list[str]]


class _Item(NamedTuple):
    """One configuration under one family of schedules."""

    configuration: Configuration
    names: tuple[ScheduleName, ...]

    @property
    def fused(self) -> bool:
        return self.names[0] in FUSED


@dataclass(slots=True)
class _OpenCut:
    """A cut whose best depths are not proven."""

    item: _Item
    job: Job
    bound_s: float
    timed_s: float


@dataclass(slots=True)
class _State:
    best: Candidate | None = None
    per_configuration: dict[Configuration, Candidate] = field(default_factory=dict)
    open_cuts: list[_OpenCut] = field(default_factory=list)
    open_items: list[tuple[float, _Item]] = field(default_factory=list)
    solved: set[Configuration] = field(default_factory=set)
    pruned: int = 0
    complete: bool = True
    left: int = 0
    """Simulated actions that may still be spent."""
    interrupted: bool = False

    @property
    def best_s(self) -> float:
        return self.best.iteration_s if self.best else math.inf

    def beats(self, bound_s: float) -> bool:
        """Whether nothing with this bound can be faster than the best."""
        return bound_s >= self.best_s * (1 - _EQUAL)


def solve(profile: Profile, asked: Asked, watch: Watch | None = None) -> Found:
    """The best plan for what is asked, with its proof.

    Raises NoPlanFitsError where no plan fits the memory, and InputError where nothing can be searched.
    """
    made = smaller(LayerGraph.of(profile), asked)
    if made is None:
        return _Search(profile, asked, watch).run()
    return on_the_original(_Search(made.graph.profile, asked, watch).run(), made)


class _Search:
    def __init__(self, profile: Profile, asked: Asked, watch: Watch | None) -> None:
        self.started = time.monotonic()
        self.asked: Final = asked
        self.watch: Final = watch
        self.graph: Final = LayerGraph.of(profile)
        self.limit: Final = memory_limit(asked.cluster)
        self.configurations: Final = configurations(self.graph, asked)
        self.bounds: Final = Bounds(self.graph, asked)
        self.effort: Final = BASE_ACTIONS + int(ACTIONS * math.sqrt(len(self.graph) * asked.gpus))
        self.state: Final = _State(left=self.effort)

    def run(self) -> Found:
        """Visit, settle, polish, prove; what an interrupt leaves is honest too."""
        state = self.state
        try:
            self._visit()
            if state.best is None:
                state.best = self._leanest()
            self._settle_all()
            self._search_on()
            self._polish()
            self._prove_depths()
            if not state.complete:
                state.complete = self._exhaust()
            self._trim()
        except _OutOfTimeError:
            state.complete, state.interrupted = False, True
        except KeyboardInterrupt:
            if state.best is None:
                raise
            state.complete, state.interrupted = False, True
        assert state.best is not None, "a search that finds no plan raises"
        least = self.bounds.least(self.configurations, state.best_s, lambda: state.interrupted or self._spent() > 0)
        state.complete |= state.best_s <= least * (1 + _EQUAL)
        return Found(
            asked=self.asked,
            graph=self.graph,
            best=state.best,
            bound_s=min(least, state.best_s),
            proven=state.complete,
            configurations=len(self.configurations),
            solved=len(state.solved),
            pruned=len(self.configurations) - len(state.solved) if state.complete else state.pruned,
            seconds=time.monotonic() - self.started,
            alternatives=tuple(sorted(state.per_configuration.values(), key=lambda found: found.iteration_s)),
            baselines=baselines(self.graph, self.asked, self._sizes()),
            interrupted=state.interrupted,
        )

    def _exhaust(self) -> bool:
        """Where there is little, all of what may be faster; whether that was all."""
        state, lattice = self.state, self.bounds.lattice
        if lattice is None or len(self.graph) > MOST_LAYERS:
            return False
        known = {one: self.bounds.known(one, fused=False) for one in self.configurations}
        near = sorted((one for one in known if not state.beats(known[one])), key=known.__getitem__)
        exhaust = Exhaust(self.graph, self.asked, lattice)
        for found in exhaust.faster(near, state.best_s, self._pulse):
            state.best = state.per_configuration[found.configuration] = found
        return exhaust.complete

    def _leanest(self) -> Candidate:
        """What is left to try where no cut that was timed fits."""
        found = leanest(self.graph, self.asked, enough_bytes=self.limit or 0)
        if found is None:
            raise no_schedule_suits(self.asked)
        if self.limit is not None and found.peak_memory_bytes > self.limit:
            raise no_plan_fits(self.graph, self.asked, found)
        self.state.per_configuration[found.configuration] = found
        return found

    def _sizes(self) -> list[int]:
        """The micro-batch sizes that were searched."""
        return sorted({configuration.microbatch_size for configuration in self.configurations})

    def _spent(self) -> float:
        """By how much the effort is over what it may be."""
        return self.bounds.spent - self.state.left

    # --- configurations -----------------------------------------------------------------------------------------------

    def _items(self) -> list[_Item]:
        families = (tuple(name for name in family if name in self.asked.schedules) for family in (SPLIT, FUSED))
        asked = [names for names in families if names]
        return [
            _Item(c, names)
            for c in self.configurations
            for names in (
                asked[-1:] if c.pipeline == 1 and c.virtual == 1 else asked
            )  # one stage: all orders are alike
        ]

    def _visit(self) -> None:
        """Look at configurations in order of their bound until it passes the best time."""
        state, items = self.state, self._items()
        most = max(configuration.gpus for configuration in self.configurations)
        for several, full, share in PHASES:
            places = [
                place
                for place, item in enumerate(items)
                if (item.configuration.virtual > 1) == several and (item.configuration.gpus == most) == full
            ]
            state.left = max(int(share * self.effort), self.bounds.spent + int(share * self.effort) // 10)
            self._visit_some(items, places)

    def _visit_some(self, items: list[_Item], places: list[int]) -> None:
        state = self.state
        waiting = [
            (self.bounds.known(items[place].configuration, fused=items[place].fused), 0, place) for place in places
        ]
        heapq.heapify(waiting)
        while waiting:
            self._tell(waiting[0][0], waiting, items)
            bound, level, index = heapq.heappop(waiting)
            item = items[index]
            if not math.isfinite(bound) or bound > state.best_s * (1 + _EQUAL):
                left = {items[other].configuration for _, _, other in waiting} | {item.configuration}
                state.pruned += len(left - state.solved)
                return
            if self._is_no_better_tie(bound, item.configuration):
                continue
            if self._spent() > 0:
                state.open_items += [(bound, item), *((known, items[other]) for known, _, other in waiting)]
                return
            if level == 0:
                exact = self.bounds.refine(item.configuration, fused=item.fused, best_s=state.best_s)
                heapq.heappush(waiting, (exact, 1, index))
            else:
                if state.best is None or self._look_actions(item) < -self._spent():
                    state.solved.add(item.configuration)
                    self._look(item)
                state.open_items.append((bound, item))

    def _is_no_better_tie(self, bound: float, configuration: Configuration) -> bool:
        """Whether a configuration can be no faster than the best, nor be preferred to it among equals."""
        best = self.state.best
        if best is None or not self.state.beats(bound) or best.unevenness > 1 + _EQUAL:
            return False
        mine, theirs = best.configuration, configuration
        return (mine.gpus, mine.num_microbatches, mine.virtual) <= (
            theirs.gpus,
            theirs.num_microbatches,
            theirs.virtual,
        )

    def _tell(self, bound: float, waiting: list[tuple[float, int, int]], items: list[_Item]) -> None:
        self._pulse()
        if self.watch is not None:
            left = {items[index].configuration for _, _, index in waiting} - self.state.solved
            solved = len(self.state.solved)
            self.watch(
                Progress(
                    configurations=len(self.configurations),
                    solved=solved,
                    pruned=len(self.configurations) - solved - len(left),
                    best_s=self.state.best_s,
                    bound_s=bound,
                )
            )

    def _pulse(self) -> None:
        """End where the time that was given has run out and there is a plan."""
        limit = self.asked.max_seconds
        if limit is not None and time.monotonic() - self.started > limit and self.state.best is not None:
            raise _OutOfTimeError

    # --- first looks --------------------------------------------------------------------------------------------------

    @staticmethod
    def _look_actions(item: _Item) -> int:
        """About what it takes to look at a configuration: a few greedy orders, each several times its actions."""
        configuration = item.configuration
        stages = configuration.pipeline * configuration.virtual
        return (4 if item.fused else 24) * stages * configuration.num_microbatches

    def _look(self, item: _Item) -> None:
        """Time a configuration's most promising cuts."""
        suffix = self.bounds.suffix(item.configuration, fused=item.fused)
        if item.configuration.virtual > 1:
            self._look_around(item)
        elif suffix is None:
            self._look_along(item)
        else:
            below = min(self.state.best_s, 1.5 * suffix.bound_s) * (1 + 2 * _EQUAL)
            seen: set[tuple[tuple[int, ...], tuple[bool, ...]]] = set()
            for tables in self.bounds.roomy(suffix) if math.isfinite(below) else ():
                nodes = LOOK_NODES * (item.configuration.pipeline + 1)
                for cut in itertools.islice(tables.cuts(below, nodes), QUICK_CUTS if tables is suffix else 1):
                    cut = cut or tables.dive()
                    if cut is not None and (cut.ideals, cut.recompute) not in seen:
                        seen.add((cut.ideals, cut.recompute))
                        names = self._names(cut, suffix.figures.lattice)
                        self._time_cut(item, names, cut.recompute, suffix.bound_s, quick=True)
                    if self.state.best is not None and self._spent() > 0:
                        return

    def _look_around(self, item: _Item) -> None:
        """Several stages a rank: cuts along one order, made again with what the ranks were seen to wait."""
        state, configuration = self.state, item.configuration
        orders = [list(range(len(self.graph)))]
        if not self.graph.is_chain:
            orders = list(itertools.islice(topological_orders(self.graph, 3), 3))
        made: list[tuple[float, int, tuple[int, ...], tuple[bool, ...], Passes]] = []
        for order in orders:
            passes = Passes(self.bounds.layers(configuration), configuration, order)
            for again in self._recomputing(passes):
                for first in FIRST_PASSES if configuration.pipeline > 1 else (1.0,):
                    marks = passes.better(passes.start(first, again), again)
                    self.bounds.spent += PASS_ACTIONS * passes.num_stages
                    worth = passes.worth(marks, again)
                    made.append((worth, len(made), tuple(marks.tolist()), tuple(again.tolist()), passes))
        for worth, _, found, flags, passes in sorted(made, key=lambda entry: entry[:2])[:QUICK_CUTS]:
            if worth > state.best_s * (1 + _EQUAL) or (self._spent() > 0 and state.best is not None):
                return
            self._feed_back(item, passes, np.array(found), np.array(flags))

    def _search_on(self) -> None:
        """With what effort is left: the nearest configurations with several stages a rank, from random starts."""
        state, rng = self.state, np.random.default_rng(0)
        items = {item.configuration: item for _, item in state.open_items if ScheduleName.SYNTHESISED in item.names}
        found = sorted(state.per_configuration.values(), key=lambda one: one.iteration_s)
        near = [one for one in found if one.configuration.virtual > 1 and one.configuration in items][:NEAREST]
        order = list(range(len(self.graph)))
        if not self.graph.is_chain:
            order = next(iter(topological_orders(self.graph, 1)))
        until = max(self.bounds.spent, SEARCH_ON * self.effort)
        while near and self.bounds.spent < until and state.best is not None and not state.complete:
            for one in near:
                item, passes = (
                    items[one.configuration],
                    Passes(self.bounds.layers(one.configuration), one.configuration, order),
                )
                again = np.array([stage.recompute for stage in one.stages])
                tries = []
                for _ in range(STARTS):
                    marks = passes.better(passes.at(self._targets(passes, rng)), again)
                    self.bounds.spent += PASS_ACTIONS * passes.num_stages
                    tries.append((passes.worth(marks, again), tuple(marks.tolist())))
                worth, best = min(tries)
                if worth < state.best_s and self._look_actions(item) < -self._spent():
                    self._feed_back(item, passes, np.array(best), again)
                else:
                    self.bounds.spent += CUT_ACTIONS + 20 * len(self.graph)

    @staticmethod
    def _targets(passes: Passes, rng: np.random.Generator) -> Floats:
        """Shares of the load at random: each pass over the ranks, and each stage of it, a little shorter or longer."""
        shape = passes.configuration
        each = rng.uniform(0.3, 1.2, shape.virtual).repeat(shape.pipeline)
        targets: Floats = each * rng.uniform(0.8, 1.2, passes.num_stages)
        return targets

    def _recomputing(self, passes: Passes) -> list[Bools]:
        """Which stages recompute: none or all as asked; where memory is short, the first so many, as it looks best."""
        stages = passes.num_stages
        if self.limit is None or self.asked.recompute != "auto":
            return [np.full(stages, self.asked.recompute == "all")]
        step = max(1, passes.configuration.pipeline // 2)
        choices = [np.arange(stages) < first for first in range(0, stages + step, step)]
        worths = [passes.worth(passes.start(1.0, again), again) for again in choices]
        best = sorted(range(len(choices)), key=lambda place: (worths[place], place))
        return [choices[place] for place in best[:2] if math.isfinite(worths[place])]

    def _feed_back(self, item: _Item, passes: Passes, marks: Ints, again: Bools) -> None:
        """Time a cut; then cuts that take from the ranks that waited longer than their rows say."""
        bound = self.bounds.known(item.configuration, fused=item.fused)
        passes.extra_s = passes.extra_s * 0.0
        best = math.inf
        for _ in range(FEEDBACKS):
            order = self._time_cut(item, self._along(passes, marks), tuple(again.tolist()), bound, quick=True)
            if order is None or order.iteration_s >= best * (1 - 1e-6) or self._spent() > 0:
                return
            best = order.iteration_s
            ends = np.array(self._ends(item, passes, marks, again, order))
            passes.extra_s = np.maximum(ends - (passes.rows(marks, again) - passes.extra_s), 0.0)
            marks = passes.better(marks, again)
            if passes.worth(marks, again) >= best * (1 - 1e-6):
                return

    def _ends(self, item: _Item, passes: Passes, marks: Ints, again: Bools, order: Order) -> list[float]:
        """When each rank is done with all it has to do."""
        walk = Walk(self._job(item, self._along(passes, marks), tuple(again.tolist())))
        timeline = simulate(walk, order.schedule, memory=False)
        ends = [ended[-1] for ended in timeline.ends_s]
        for closing in timeline.closings:
            ends[closing.rank] = max(ends[closing.rank], closing.end_s)
        return ends

    def _along(self, passes: Passes, marks: Ints) -> Cut:
        return [[self.graph.names[layer] for layer in passes.order[low:high]] for low, high in pairwise(marks.tolist())]

    def _look_along(self, item: _Item) -> None:
        """Where a graph has too many ideals: cuts along many topological orders."""
        state, configuration = self.state, item.configuration
        layers, shape = self.bounds.layers(configuration), self.bounds.shape(configuration, fused=item.fused)
        for order in topological_orders(self.graph, ORDERS):
            lattice = along(order)
            suffix = SuffixBound(Figures(layers, lattice), shape)
            self.bounds.spent += len(suffix.step) * configuration.pipeline // 10 + 20 * len(order)
            for cut in itertools.islice(suffix.cuts(min(state.best_s, 1.2 * suffix.bound_s), MOST_NODES), 3):
                if cut is not None:
                    self._time_cut(item, self._names(cut, lattice), cut.recompute, cut.bound_s, quick=True)
            if self._spent() > 0:
                return

    # --- settling what is left ----------------------------------------------------------------------------------------

    def _settle_all(self) -> None:
        """Go through what lies below the best, if that can be finished; else through what is near."""
        state = self.state
        state.left = max(state.left, self.bounds.spent) + self.effort
        order = sorted(range(len(state.open_items)), key=lambda place: (state.open_items[place][0], place))
        for place in order:
            bound, item = state.open_items[place]
            if state.beats(bound):
                continue
            bound = max(bound, self.bounds.known(item.configuration, fused=item.fused))
            if state.beats(bound):
                continue
            if self._spent() > 0:
                state.complete = False
                return
            if not self._settle(item):
                state.complete = False

    def _settle(self, item: _Item) -> bool:
        """Time all cuts of a configuration that may be faster; False where they are too many."""
        configuration = item.configuration
        stages = configuration.pipeline * configuration.virtual
        if SETTLED_CUTS * self._look_actions(item) > self.effort:
            return False  # not even a few of its cuts could be timed
        every = None
        if configuration.virtual > 1:
            every = self.bounds.lattice.every_cut(stages, MOST_CUTS) if self.bounds.lattice else None
            if every is None:
                return False
        if configuration not in self.state.solved:
            bound = self.bounds.refine(configuration, fused=item.fused, best_s=self.state.best_s)
            if self.state.beats(bound):
                return True
            self.state.solved.add(configuration)
        suffix = self.bounds.suffix(configuration, fused=item.fused)
        if every is not None:
            return self._settle_each(item, every)
        if suffix is None:
            return self._settle_by_ilp(item)
        return self._settle_in_order(item, suffix)

    def _settle_in_order(self, item: _Item, suffix: SuffixBound) -> bool:
        """Time all cuts with a bound below the best.

        Where the first ones leave more than could all be timed, the rest is left: no proof would come of it.
        """
        state, ties_seen, count = self.state, 0, 0
        cuts = suffix.cuts(state.best_s * (1 + 2 * _EQUAL), MOST_NODES)
        while (cut := next(cuts, _NO_CUT)) is not _NO_CUT:
            if cut is None or (count > 0 and self._spent() > 0):
                return state.beats(cut.bound_s if cut is not None else suffix.bound_s)
            ties_seen += state.beats(cut.bound_s)
            if cut.bound_s > state.best_s * (1 + _EQUAL) or ties_seen > MOST_TIES:
                return True
            self._time_cut(item, self._names(cut, suffix.figures.lattice), cut.recompute, cut.bound_s)
            count += 1
            if count == FIRST_CUTS:
                faster = itertools.takewhile(lambda cut: cut is None or cut.bound_s < state.best_s, cuts)
                ahead = list(itertools.islice(faster, MOST_CUTS))
                if len(ahead) == MOST_CUTS or None in ahead:
                    return False
                cuts = iter(ahead)
        return True

    def _settle_by_ilp(self, item: _Item) -> bool:
        """Where a graph has too many ideals: the ILP's cuts in order of their bound, each forbidden once timed."""
        state, configuration = self.state, item.configuration
        shape = self.bounds.shape(configuration, fused=item.fused)
        seen: list[tuple[int, ...]] = []
        while len(seen) < ILP_ROUNDS:
            solved = self.bounds.solved(configuration, fused=item.fused, below_s=state.best_s, without=seen)
            self.bounds.spent += 20 * len(self.graph) * configuration.pipeline * (1 + solved.nodes)
            if solved.bound >= state.best_s * (1 - 1e-6):
                return True
            if solved.stage_of is None or self._spent() > 0:
                return False
            seen.append(solved.stage_of)
            names = self._by_stage(solved.stage_of, configuration.pipeline)
            for again in shape.recompute:
                self._time_cut(item, names, (again,) * configuration.pipeline, solved.bound)
        return False

    def _settle_each(self, item: _Item, every: list[tuple[int, ...]]) -> bool:
        """Several stages a rank: every cut there is, where they are few."""
        configuration, lattice = item.configuration, self.bounds.lattice
        assert lattice is not None, "cuts are listed from it"
        stages = configuration.pipeline * configuration.virtual
        bound = self.bounds.known(configuration, fused=item.fused)
        choices = self.bounds.shape(configuration, fused=item.fused).recompute
        for ideals in every:
            for again in itertools.product(choices, repeat=stages):
                if self._spent() > 0:
                    return False
                self._time_cut(item, self._between(ideals, lattice), again, bound)
        return True

    def _names(self, cut: BoundedCut, lattice: Lattice) -> Cut:
        return self._between(cut.ideals, lattice)

    def _between(self, ideals: tuple[int, ...], lattice: Lattice) -> Cut:
        return [[self.graph.names[layer] for layer in lattice.layers(start, end)] for start, end in pairwise(ideals)]

    def _by_stage(self, stage_of: tuple[int, ...], stages: int) -> Cut:
        return [
            [self.graph.names[layer] for layer, home in enumerate(stage_of) if home == stage] for stage in range(stages)
        ]

    # --- cuts ---------------------------------------------------------------------------------------------------------

    def _job(self, item: _Item, cut: Cut, recompute: tuple[bool, ...]) -> Job:
        return job_of_cut(self.graph, self.asked, item.configuration, cut, recompute)

    def _time_cut(
        self, item: _Item, cut: Cut, recompute: tuple[bool, ...], bound_s: float, *, quick: bool = False
    ) -> Order | None:
        """Time one cut under every schedule of the family; its best order where it was worth timing."""
        self._pulse()
        state, configuration = self.state, item.configuration
        job = self._job(item, cut, recompute)
        walk = Walk(job)
        self.bounds.spent += CUT_ACTIONS + 20 * len(self.graph)
        bound = max(bound_s, cut_bound(walk, fused=item.fused))
        if bound > state.best_s * (1 + _EQUAL):
            return None
        effort = CLIMB_SIMULATIONS * 2 * configuration.num_microbatches * configuration.pipeline
        effort = max(min(effort, -int(self._spent())), 0)
        timing = time_cut(walk, configuration, item.names, bound_s=bound, effort=effort, quick=quick)
        self.bounds.spent += timing.spent
        if timing.may_be_beaten and not quick:  # a first look is no more: what is settled is timed again
            seconds = timing.best.iteration_s if timing.best else math.inf
            state.open_cuts.append(_OpenCut(item=item, job=job, bound_s=bound, timed_s=seconds))
        if timing.best is not None:
            self._offer(configuration, job, timing.best)
        return timing.best

    def _offer(self, configuration: Configuration, job: Job, order: Order) -> None:
        """Take a timed cut where it is better than what there is."""
        state = self.state
        known = state.per_configuration.get(configuration)
        if known is not None and order.iteration_s > known.iteration_s * (1 + _EQUAL):
            return
        candidate = Candidate(
            configuration=configuration,
            job=job,
            schedule=order.name,
            warmup=order.warmup,
            timeline=simulate(job, order.schedule, levels=False),
        )
        if candidate.better_than(known):
            state.per_configuration[configuration] = candidate
        if candidate.better_than(state.best):
            state.best = candidate

    # --- the best of all ----------------------------------------------------------------------------------------------

    def _polish(self) -> None:
        """Go on from the best cuts, where they do not reach their bound: what is faster now is ruled out below."""
        state = self.state
        near = [cut for cut in state.open_cuts if cut.timed_s <= state.best_s * (1 + _EQUAL) and cut.item.fused]
        for cut in sorted(near, key=lambda cut: cut.bound_s)[:2]:
            configuration = cut.item.configuration
            if configuration.virtual == 1:
                effort = POLISH_SIMULATIONS * 2 * configuration.num_microbatches * configuration.pipeline
                timing = time_cut(
                    Walk(cut.job), configuration, cut.item.names, bound_s=cut.bound_s, effort=min(effort, self.effort)
                )
                if timing.best is not None:
                    self._offer(configuration, cut.job, timing.best)
        best = state.best
        if best is None or ScheduleName.SYNTHESISED not in self.asked.schedules:
            return
        walk = Walk(best.job)
        bound = cut_bound(walk, fused=False)
        actions = 3 * sum(map(len, best.timeline.schedule))
        swaps = min(POLISH_SWAPS, int(self.effort / actions / 20) - 5)
        if best.iteration_s > bound * (1 + _EQUAL) and swaps > 0:
            order = Order(
                iteration_s=best.iteration_s,
                name=best.schedule,
                warmup=best.warmup,
                schedule=best.timeline.schedule,
            )
            self._offer(best.configuration, best.job, polished(walk, order, bound_s=bound, steps=swaps))

    def _trim(self) -> None:
        """Take off the warm-ups what costs no time: the best plan then holds less."""
        best = self.state.best
        if best is None or ScheduleName.ONE_F_ONE_B not in self.asked.schedules or best.configuration.virtual > 1:
            return
        count, ranks = best.configuration.num_microbatches, best.configuration.pipeline
        warmup = (count,) * ranks if best.schedule is ScheduleName.GPIPE else best.warmup
        if best.schedule not in FUSED or warmup is None:
            return
        depths = Depths1F1B(Walk(best.job), self.limit)
        made = depths.trimmed(warmup, POLISH_SIMULATIONS * 2 * count * ranks)
        if made != warmup:
            trimmed = dataclasses.replace(
                best,
                schedule=ScheduleName.ONE_F_ONE_B,
                warmup=made,
                timeline=simulate(best.job, depths.schedule(made), levels=False),
            )
            self.state.best = self.state.per_configuration[best.configuration] = trimmed

    def _prove_depths(self) -> None:
        """Settle what lies between the bounds of timed cuts and the best time."""
        state, left = self.state, self.effort
        for cut in sorted(state.open_cuts, key=lambda cut: cut.bound_s):
            if cut.bound_s >= state.best_s * (1 - _EQUAL):
                continue
            if not cut.item.fused or cut.item.configuration.virtual > 1 or left <= 0:
                state.complete = False
                continue
            depths = Depths1F1B(Walk(cut.job), self.limit)

            def found(timed: Timed, cut: _OpenCut = cut, depths: Depths1F1B = depths) -> float:
                order = Order(
                    iteration_s=timed.iteration_s,
                    name=ScheduleName.ONE_F_ONE_B,
                    warmup=timed.depths,
                    schedule=depths.schedule(timed.depths),
                )
                self._offer(cut.item.configuration, cut.job, order)
                return min(self.state.best_s, timed.iteration_s)

            state.complete &= depths.none_faster(state.best_s, left, found, self._pulse)
            left -= depths.spent


class _OutOfTimeError(Exception):
    """The time that was given has run out."""
