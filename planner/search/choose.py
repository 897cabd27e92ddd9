"""The search over configurations: best bound first, until the next bound passes the best simulated time.

    bounds      every configuration gets a cheap bound; the least one is made exact (suffix recursion) and put back,
                until the least is exact
    solve       within it, cuts come in order of their bound; each is timed under every schedule asked for, with the
                warm-up depths climbed, until the next cut's bound passes the best time
    prove       what still lies between a cut's bound and the best is settled by branch and bound over its depths

``proven`` says that every configuration was solved or pruned so: no named schedule asked for, at any warm-up depth, is
faster on any cut. All limits are counts (cuts, nodes, simulated actions), so one input gives one plan; only
``max_seconds`` and an interrupt end a search early, with the best so far and what is proven of it.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from planner.cluster import memory_limit
from planner.graph import LayerGraph
from planner.profile import Profile
from planner.schedules import ScheduleName
from planner.search.baselines import baselines
from planner.search.bound import cut_bound
from planner.search.depth import Depths1F1B, Timed
from planner.search.figures import Figures, LayerFigures
from planner.search.incumbent import topological_orders
from planner.search.job import job_of_cut
from planner.search.lattice import Lattice, along, lattice_of
from planner.search.proof import prove
from planner.search.result import Candidate, Found
from planner.search.shortfall import no_plan_fits
from planner.search.space import Asked, Configuration, cheap_bound, configurations
from planner.search.suffix import BoundedCut, Shape, SuffixBound
from planner.simulate import Job, Walk, simulate

_EQUAL: Final = 1e-9
SCHEDULES: Final = (ScheduleName.GPIPE, ScheduleName.ONE_F_ONE_B)
"""The schedules that are searched."""
MOST_CUTS: Final = 300
"""Cuts timed in one configuration."""
MOST_NODES: Final = 20_000
"""Begun cuts looked at in one configuration."""
MOST_TIES: Final = 24
"""Cuts looked at beyond those that could be faster, for a more even one among equals."""
CLIMB_SIMULATIONS: Final = 35
"""Simulations of one cut's climb over warm-up depths; its starts take about 25 of them."""
POLISH_SIMULATIONS: Final = 400
"""Simulations of the climb of the best cut of all."""
TIMING_ACTIONS: Final = 8_000_000
"""Simulated actions that timing cuts may take in all; after that a configuration's first cut is all that is timed."""
PROOF_ACTIONS: Final = 4_000_000
"""Simulated actions that the proofs over warm-up depths may take in all."""
PROOF_NODES: Final = 2_000
"""Nodes of one ILP's branch and bound."""
MOST_CHOICES: Final = 20_000
"""Binaries of an ILP; a configuration with more keeps the bound of its recursion or LP."""
ILP_ROUNDS: Final = 20
"""Cuts that the ILP may bring, one after another, in a configuration of a graph with many ideals."""
ORDERS: Final = 60
"""Topological orders tried there before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where a search stands."""

    configurations: int
    solved: int
    pruned: int
    best_s: float
    bound_s: float


Watch = Callable[[Progress], None]


@dataclass(slots=True)
class _OpenCut:
    """A cut whose best depths are not proven."""

    configuration: Configuration
    job: Job
    bound_s: float
    timed_s: float


@dataclass(slots=True)
class _State:
    best: Candidate | None = None
    per_configuration: dict[Configuration, Candidate] = field(default_factory=dict)
    open_cuts: list[_OpenCut] = field(default_factory=list)
    solved: set[Configuration] = field(default_factory=set)
    pruned: int = 0
    complete: bool = True
    timing_left: int = TIMING_ACTIONS
    interrupted: bool = False


def solve(profile: Profile, asked: Asked, watch: Watch | None = None) -> Found:
    """The best plan for what is asked, with its proof.

    Raises NoPlanFitsError where no plan fits the memory, and InputError where nothing can be searched.
    """
    return _Search(profile, asked, watch).run()


class _Search:
    def __init__(self, profile: Profile, asked: Asked, watch: Watch | None) -> None:
        self.started = time.monotonic()
        self.profile: Final = profile
        self.asked: Final = asked
        self.watch: Final = watch
        self.graph: Final = LayerGraph.of(profile)
        self.limit: Final = memory_limit(asked.cluster)
        self.configurations: Final = configurations(self.graph, asked)
        self.lattice: Final[Lattice | None] = lattice_of(self.graph)
        self.state = _State()
        self._layers: dict[tuple[int, int], LayerFigures] = {}
        self._figures: dict[tuple[int, int], Figures] = {}
        self._bounds: dict[tuple[Configuration, bool], float] = {}
        self._suffixes: dict[tuple[Configuration, bool], SuffixBound] = {}

    def run(self) -> Found:
        state = self.state
        try:
            self._visit()
            self._polish()
            self._prove_depths()
        except _OutOfTimeError:
            state.complete, state.interrupted = False, True
        except KeyboardInterrupt:
            if state.best is None:
                raise
            state.complete, state.interrupted = False, True
        if state.best is None:
            raise no_plan_fits(self.graph, self.asked)
        bound = min(self._least_bound(), state.best.iteration_s)
        return Found(
            asked=self.asked,
            graph=self.graph,
            best=state.best,
            bound_s=bound,
            proven=state.complete,
            configurations=len(self.configurations),
            solved=len(state.solved),
            pruned=len(self.configurations) - len(state.solved) if state.complete else state.pruned,
            seconds=time.monotonic() - self.started,
            alternatives=tuple(sorted(state.per_configuration.values(), key=lambda found: found.iteration_s)),
            baselines=baselines(self.graph, self.asked, self._sizes()),
            interrupted=state.interrupted,
        )

    def _sizes(self) -> list[int]:
        """The micro-batch sizes that were searched."""
        return sorted({configuration.microbatch_size for configuration in self.configurations})

    # --- bounds -------------------------------------------------------------------------------------------------------

    def layers(self, configuration: Configuration) -> LayerFigures:
        key = (configuration.microbatch_size, configuration.tensor)
        if key not in self._layers:
            self._layers[key] = LayerFigures(
                self.graph, microbatch_size=key[0], tensor=key[1], cluster=self.asked.cluster
            )
        return self._layers[key]

    def suffix(self, configuration: Configuration, *, fused: bool) -> SuffixBound | None:
        """The exact tables of a configuration; None where its graph has too many ideals for them."""
        if self.lattice is None:
            return None
        key = (configuration, fused)
        if key not in self._suffixes:
            sizes = (configuration.microbatch_size, configuration.tensor)
            if sizes not in self._figures:
                self._figures[sizes] = Figures(self.layers(configuration), self.lattice)
            self._suffixes[key] = SuffixBound(self._figures[sizes], self._shape(configuration, fused=fused))
        return self._suffixes[key]

    def _shape(self, configuration: Configuration, *, fused: bool) -> Shape:
        choices = {"none": (False,), "all": (True,), "auto": (False, True)}[self.asked.recompute]
        if self.limit is None and choices == (False, True):
            choices = (False,)
        return Shape(
            num_ranks=configuration.pipeline,
            num_microbatches=configuration.num_microbatches,
            data=configuration.data,
            fused=fused,
            recompute=choices,
            cluster=self.asked.cluster,
        )

    def bound(self, configuration: Configuration, *, fused: bool) -> float:
        """The best bound known of a configuration."""
        key = (configuration, fused)
        if key not in self._bounds:
            self._bounds[key] = cheap_bound(self.layers(configuration), configuration, self.asked.cluster, fused=fused)
        return self._bounds[key]

    def refine(self, configuration: Configuration, *, fused: bool) -> float:
        """The exact bound of a configuration, over every cut (where the graph has too many: the ILP's)."""
        suffix = self.suffix(configuration, fused=fused)
        exact = suffix.bound_s if suffix is not None else self._relaxed(configuration, fused=fused)
        self._bounds[configuration, fused] = max(self.bound(configuration, fused=fused), exact)
        return self._bounds[configuration, fused]

    def _relaxed(self, configuration: Configuration, *, fused: bool) -> float:
        shape = self._shape(configuration, fused=fused)
        return prove(self.layers(configuration), shape, below_s=self._best_s(), relaxed=True).bound

    def _proven(self, configuration: Configuration, *, fused: bool) -> float:
        """What the ILP proves of a configuration.

        Where the recursion knows the bound, the ILP is asked about the cuts within a hair of it, narrowed to the
        windows that those leave; elsewhere about all cuts below the best time.
        """
        suffix = self.suffix(configuration, fused=fused)
        below, windows = self._best_s(), None
        if suffix is not None:
            below = min(below, suffix.bound_s * (1 + 1e-5))
            windows = suffix.windows(below)
            if windows is None:
                return below
        choices = sum(last - first for first, last in windows or ())
        if choices > MOST_CHOICES or len(self.graph) * configuration.pipeline > 4 * MOST_CHOICES:
            return 0.0
        shape = self._shape(configuration, fused=fused)
        solved = prove(self.layers(configuration), shape, windows=windows, below_s=below, most_nodes=PROOF_NODES)
        return min(solved.bound, below)

    def _best_s(self) -> float:
        return self.state.best.iteration_s if self.state.best else math.inf

    def _least_bound(self) -> float:
        """The least bound over all configurations, valid for every order, split backwards included.

        The one that is least under the recursion is proven by the ILP too; the better of the two counts.
        """
        heap = [(self.bound(c, fused=False), 0, index) for index, c in enumerate(self.configurations)]
        heapq.heapify(heap)
        while heap:
            bound, level, index = heapq.heappop(heap)
            if level == 2 or self.state.interrupted:
                return bound
            configuration = self.configurations[index]
            if level == 0:
                better = self.refine(configuration, fused=False)
            else:
                better = max(bound, self._proven(configuration, fused=False))
            heapq.heappush(heap, (better, level + 1, index))
        return math.inf

    # --- configurations -----------------------------------------------------------------------------------------------

    def _visit(self) -> None:
        """Solve configurations in order of their bound until it passes the best time."""
        state = self.state
        waiting = set(range(len(self.configurations)))
        for index, configuration in enumerate(self.configurations):
            if configuration.pipeline == 1:  # cheap, and its time rules out most of the rest
                waiting.remove(index)
                self._solve(configuration)
        heap = [(self.bound(self.configurations[index], fused=True), 0, index) for index in sorted(waiting)]
        heapq.heapify(heap)
        while heap:
            self._tell(heap[0][0], len(heap))
            bound, level, index = heapq.heappop(heap)
            if not math.isfinite(bound) or bound > self._best_s() * (1 + _EQUAL):
                state.pruned += 1 + len(heap)
                return
            configuration = self.configurations[index]
            if level == 0:
                heapq.heappush(heap, (self.refine(configuration, fused=True), 1, index))
            else:
                self._solve(configuration)

    def _tell(self, bound: float, waiting: int) -> None:
        limit = self.asked.max_seconds
        if limit is not None and time.monotonic() - self.started > limit and self.state.best is not None:
            raise _OutOfTimeError
        if self.watch is not None:
            done = len(self.state.solved)
            best = self.state.best.iteration_s if self.state.best else math.inf
            self.watch(
                Progress(
                    configurations=len(self.configurations),
                    solved=done,
                    pruned=len(self.configurations) - done - waiting,
                    best_s=best,
                    bound_s=bound,
                )
            )

    def _solve(self, configuration: Configuration) -> None:
        """Time a configuration's cuts in order of their bound."""
        self.state.solved.add(configuration)
        suffix = self.suffix(configuration, fused=True)
        if suffix is None:
            self._solve_by_orders(configuration)
            return
        below = self._best_s() if self.state.best else 1.5 * suffix.bound_s
        while math.isfinite(below):
            had = self.state.best
            enough = self._time_cuts(configuration, suffix, below)
            if enough or had is not None or configuration in self.state.per_configuration:
                return
            below *= 4  # none of those fits: messages take what memory was left
            if below > 1e3 * suffix.bound_s:
                return

    def _time_cuts(self, configuration: Configuration, suffix: SuffixBound, below_s: float) -> bool:
        """Time all cuts with a bound below that and below the best; True where a limit ended it."""
        ties_seen = 0
        for count, cut in enumerate(suffix.cuts(below_s * (1 + 2 * _EQUAL), MOST_NODES)):
            best = self._best_s()
            spent = count > 0 and self.state.timing_left <= 0
            if cut is None or count >= MOST_CUTS or spent:
                bound = cut.bound_s if cut is not None else suffix.bound_s
                self.state.complete &= bound >= best * (1 - _EQUAL)
                return True
            ties_seen += cut.bound_s >= best * (1 - _EQUAL)
            if cut.bound_s > best * (1 + _EQUAL) or ties_seen > MOST_TIES:
                return False
            self._time_cut(configuration, self._names(cut, suffix.figures.lattice), cut.recompute, cut.bound_s)
            self._tell(cut.bound_s, 0)
        return False

    def _solve_by_orders(self, configuration: Configuration) -> None:
        """Where a graph has too many ideals: cuts along many topological orders, then the ILP below the best of them.

        The ILP's cuts come in order of their bound too, each forbidden once timed, until there is none below the best.
        """
        layers, shape = self.layers(configuration), self._shape(configuration, fused=True)
        for order in topological_orders(self.graph, ORDERS):
            lattice = along(order)
            suffix = SuffixBound(Figures(layers, lattice), shape)
            for cut in itertools.islice(suffix.cuts(min(self._best_s(), 1.2 * suffix.bound_s), MOST_NODES), 3):
                if cut is not None:
                    self._time_cut(configuration, self._names(cut, lattice), cut.recompute, cut.bound_s)
            self._tell(suffix.bound_s, 0)
        seen: list[tuple[int, ...]] = []
        while len(seen) < ILP_ROUNDS:
            solved = prove(layers, shape, below_s=self._best_s(), most_nodes=PROOF_NODES, without=seen)
            if solved.bound >= self._best_s() * (1 - 1e-6):
                return
            if solved.stage_of is None:
                break
            seen.append(solved.stage_of)
            names = [
                [self.graph.names[layer] for layer, home in enumerate(solved.stage_of) if home == stage]
                for stage in range(configuration.pipeline)
            ]
            for again in shape.recompute:
                self._time_cut(configuration, names, (again,) * configuration.pipeline, solved.bound)
            self._tell(solved.bound, 0)
        self.state.complete = False

    def _names(self, cut: BoundedCut, lattice: Lattice) -> list[list[str]]:
        return [
            [self.graph.names[layer] for layer in lattice.layers(start, end)] for start, end in pairwise(cut.ideals)
        ]

    def _time_cut(
        self, configuration: Configuration, cut: list[list[str]], recompute: tuple[bool, ...], bound_s: float
    ) -> None:
        """Time one cut under every schedule asked for."""
        job = job_of_cut(self.graph, self.asked, configuration, cut, recompute)
        walk = Walk(job)
        bound = max(bound_s, cut_bound(walk, fused=True))
        if bound > self._best_s() * (1 + _EQUAL):
            return
        depths = Depths1F1B(walk, self.limit)
        effort = CLIMB_SIMULATIONS * 2 * configuration.num_microbatches * configuration.pipeline
        effort = min(effort, max(self.state.timing_left, 0))
        if ScheduleName.ONE_F_ONE_B in self.asked.schedules:
            timed = depths.climb(bound, effort)
            if timed is None or timed.iteration_s > bound * (1 + _EQUAL):
                seconds = timed.iteration_s if timed is not None else math.inf
                self.state.open_cuts.append(
                    _OpenCut(configuration=configuration, job=job, bound_s=bound, timed_s=seconds)
                )
        else:
            timed = depths.timed((configuration.num_microbatches,) * configuration.pipeline)
        self.state.timing_left -= depths.spent
        if timed is not None:
            self._offer(configuration, job, timed)

    def _offer(self, configuration: Configuration, job: Job, timed: Timed) -> None:
        """Take a timed cut where it is better than what there is."""
        state = self.state
        known = state.per_configuration.get(configuration)
        if known is not None and timed.iteration_s > known.iteration_s * (1 + _EQUAL):
            return
        everything = all(depth == configuration.num_microbatches for depth in timed.depths)
        gpipe = everything and ScheduleName.GPIPE in self.asked.schedules
        candidate = Candidate(
            configuration=configuration,
            job=job,
            schedule=ScheduleName.GPIPE if gpipe else ScheduleName.ONE_F_ONE_B,
            warmup=None if gpipe else timed.depths,
            timeline=simulate(job, Depths1F1B(Walk(job), None).schedule(timed.depths)),
        )
        if candidate.better_than(known):
            state.per_configuration[configuration] = candidate
        if candidate.better_than(state.best):
            state.best = candidate

    def _polish(self) -> None:
        """Climb on from the best cuts, where they do not reach their bound: what is faster now is ruled out below."""
        near = [cut for cut in self.state.open_cuts if cut.timed_s <= self._best_s() * (1 + _EQUAL)]
        for cut in sorted(near, key=lambda cut: cut.bound_s)[:2]:
            count, ranks = cut.configuration.num_microbatches, cut.configuration.pipeline
            depths = Depths1F1B(Walk(cut.job), self.limit)
            timed = depths.climb(cut.bound_s, POLISH_SIMULATIONS * 2 * count * ranks)
            if timed is not None:
                self._offer(cut.configuration, cut.job, timed)

    def _prove_depths(self) -> None:
        """Settle what lies between the bounds of timed cuts and the best time."""
        state = self.state
        left = PROOF_ACTIONS
        for cut in sorted(state.open_cuts, key=lambda cut: cut.bound_s):
            best = state.best.iteration_s if state.best else math.inf
            if cut.bound_s >= best * (1 - _EQUAL):
                continue

            def found(timed: Timed, cut: _OpenCut = cut) -> float:
                self._offer(cut.configuration, cut.job, timed)
                return self.state.best.iteration_s if self.state.best else timed.iteration_s

            depths = Depths1F1B(Walk(cut.job), self.limit)
            pulse = functools.partial(self._tell, cut.bound_s, 0)
            state.complete &= left > 0 and depths.none_faster(best, left, found, pulse)
            left -= depths.spent


class _OutOfTimeError(Exception):
    """The time that was given has run out."""
