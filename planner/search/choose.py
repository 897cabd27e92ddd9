"""The search over configurations: best bound first, until the next bound passes the best simulated time.

    bounds      every configuration gets a cheap bound under each family of schedules (fused, split); the least one is
                made exact and put back, until the least is exact
    solve       within it, cuts come in order of their bound; each is timed under every schedule of the family that was
                asked for, until the next cut's bound passes the best time
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

from planner.cluster import memory_limit
from planner.graph import LayerGraph
from planner.profile import Profile
from planner.schedules import ScheduleName
from planner.search.baselines import baselines
from planner.search.bound import cut_bound
from planner.search.bounds import Bounds
from planner.search.depth import Depths1F1B, Timed
from planner.search.figures import Figures
from planner.search.incumbent import moved, topological_orders
from planner.search.job import job_of_cut
from planner.search.lattice import Lattice, along
from planner.search.orders import FUSED, SPLIT, Order, polished, time_cut
from planner.search.result import Candidate, Found
from planner.search.shortfall import no_plan_fits
from planner.search.space import Asked, Configuration, configurations
from planner.search.suffix import BoundedCut, SuffixBound
from planner.simulate import Job, Walk, simulate

_EQUAL: Final = 1e-9
SCHEDULES: Final = (ScheduleName.GPIPE, ScheduleName.ONE_F_ONE_B)
"""The schedules that are searched where none are named."""
MOST_CUTS: Final = 300
"""Cuts timed in one configuration."""
FIRST_CUTS: Final = 40
"""Cuts timed in one configuration before it is counted how many are left below the best."""
MOST_NODES: Final = 20_000
"""Begun cuts looked at in one configuration."""
MOST_TIES: Final = 24
"""Cuts looked at beyond those that could be faster, for a more even one among equals."""
CLIMB_SIMULATIONS: Final = 35
"""Simulations of one cut's climb over warm-up depths; its starts take about 25 of them."""
POLISH_SIMULATIONS: Final = 400
"""Simulations of the climb of the best cut of all."""
POLISH_SWAPS: Final = 40
"""Swaps on the critical path of the best synthesised order."""
TIMING_ACTIONS: Final = 8_000_000
"""Simulated actions that timing cuts may take; then only a configuration's first cut is timed, until as many again."""
PROOF_ACTIONS: Final = 4_000_000
"""Simulated actions that the proofs over warm-up depths may take in all."""
ILP_ROUNDS: Final = 20
"""Cuts that the ILP may bring, one after another, in a configuration of a graph with many ideals."""
ORDERS: Final = 60
"""Topological orders tried there before."""
MOVES: Final = 200
"""Cuts that differ in one layer's stage, timed around the best of a configuration with several stages a rank."""


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
    solved: set[Configuration] = field(default_factory=set)
    pruned: int = 0
    complete: bool = True
    timing_left: int = TIMING_ACTIONS
    interrupted: bool = False

    @property
    def best_s(self) -> float:
        return self.best.iteration_s if self.best else math.inf


def solve(profile: Profile, asked: Asked, watch: Watch | None = None) -> Found:
    """The best plan for what is asked, with its proof.

    Raises NoPlanFitsError where no plan fits the memory, and InputError where nothing can be searched.
    """
    return _Search(profile, asked, watch).run()


class _Search:
    def __init__(self, profile: Profile, asked: Asked, watch: Watch | None) -> None:
        self.started = time.monotonic()
        self.asked: Final = asked
        self.watch: Final = watch
        self.graph: Final = LayerGraph.of(profile)
        self.limit: Final = memory_limit(asked.cluster)
        self.configurations: Final = configurations(self.graph, asked)
        self.bounds: Final = Bounds(self.graph, asked)
        self.state: Final = _State()

    def run(self) -> Found:
        """Visit, polish, prove; what an interrupt leaves is honest too."""
        state = self.state
        try:
            self._visit()
            self._polish()
            self._prove_depths()
            self._trim()
        except _OutOfTimeError:
            state.complete, state.interrupted = False, True
        except KeyboardInterrupt:
            if state.best is None:
                raise
            state.complete, state.interrupted = False, True
        if state.best is None:
            raise no_plan_fits(self.graph, self.asked)
        least = self.bounds.least(self.configurations, state.best_s, lambda: state.interrupted)
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

    def _sizes(self) -> list[int]:
        """The micro-batch sizes that were searched."""
        return sorted({configuration.microbatch_size for configuration in self.configurations})

    # --- configurations -----------------------------------------------------------------------------------------------

    def _items(self) -> list[_Item]:
        families = (tuple(name for name in family if name in self.asked.schedules) for family in (FUSED, SPLIT))
        asked = [names for names in families if names]
        return [_Item(c, names) for c in self.configurations for names in asked]

    def _visit(self) -> None:
        """Solve configurations in order of their bound until it passes the best time."""
        state, items = self.state, self._items()
        waiting = []
        for index, item in enumerate(items):
            if item.configuration.pipeline == 1 and item.configuration.virtual == 1:
                self._solve(item)  # cheap, and its time rules out most of the rest
            else:
                waiting.append((self.bounds.known(item.configuration, fused=item.fused), 0, index))
        heapq.heapify(waiting)
        while waiting:
            self._tell(waiting[0][0], waiting, items)
            bound, level, index = heapq.heappop(waiting)
            if state.best is not None and state.timing_left < -TIMING_ACTIONS and bound < state.best_s * (1 - _EQUAL):
                state.complete = False
                return
            if not math.isfinite(bound) or bound > state.best_s * (1 + _EQUAL):
                left = {items[other].configuration for _, _, other in waiting} | {items[index].configuration}
                state.pruned += len(left - state.solved)
                return
            item = items[index]
            if level == 0:
                exact = self.bounds.refine(item.configuration, fused=item.fused, best_s=state.best_s)
                heapq.heappush(waiting, (exact, 1, index))
            else:
                self._solve(item)

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

    def _solve(self, item: _Item) -> None:
        """Time a configuration's cuts in order of their bound."""
        self.state.solved.add(item.configuration)
        suffix = self.bounds.suffix(item.configuration, fused=item.fused)
        if item.configuration.virtual > 1:
            self._solve_around(item)
        elif suffix is None:
            self._solve_by_orders(item)
        else:
            self._solve_in_order(item, suffix)

    def _solve_in_order(self, item: _Item, suffix: SuffixBound) -> None:
        state = self.state
        below = state.best_s if state.best else 1.5 * suffix.bound_s
        while math.isfinite(below):
            had = state.best
            enough = self._time_cuts(item, suffix, below)
            if enough or had is not None or item.configuration in state.per_configuration:
                return
            below *= 4  # none of those fits: messages take what memory was left
            if below > 1e3 * suffix.bound_s:
                return

    def _time_cuts(self, item: _Item, suffix: SuffixBound, below_s: float) -> bool:
        """Time all cuts with a bound below that and below the best; True where a limit ended it.

        Where the first ones leave more than could all be timed, the rest is left: no proof would come of it.
        """
        state, ties_seen, count = self.state, 0, 0
        cuts = suffix.cuts(below_s * (1 + 2 * _EQUAL), MOST_NODES)
        while (cut := next(cuts, _NO_CUT)) is not _NO_CUT:
            if cut is None or (count > 0 and state.timing_left <= 0):
                bound = cut.bound_s if cut is not None else suffix.bound_s
                state.complete &= bound >= state.best_s * (1 - _EQUAL)
                return True
            ties_seen += cut.bound_s >= state.best_s * (1 - _EQUAL)
            if cut.bound_s > state.best_s * (1 + _EQUAL) or ties_seen > MOST_TIES:
                return False
            self._time_cut(item, self._names(cut, suffix.figures.lattice), cut.recompute, cut.bound_s)
            count += 1
            if count == FIRST_CUTS:
                faster = itertools.takewhile(lambda cut: cut is None or cut.bound_s < state.best_s, cuts)
                ahead = list(itertools.islice(faster, MOST_CUTS))
                if len(ahead) == MOST_CUTS or None in ahead:
                    state.complete = False
                    return True
                cuts = iter(ahead)
        return False

    def _solve_by_orders(self, item: _Item) -> None:
        """Where a graph has too many ideals: cuts along many topological orders, then the ILP below the best of them.

        The ILP's cuts come in order of their bound too, each forbidden once timed, until there is none below the best.
        """
        state, configuration = self.state, item.configuration
        layers, shape = self.bounds.layers(configuration), self.bounds.shape(configuration, fused=item.fused)
        for order in topological_orders(self.graph, ORDERS):
            lattice = along(order)
            suffix = SuffixBound(Figures(layers, lattice), shape)
            for cut in itertools.islice(suffix.cuts(min(state.best_s, 1.2 * suffix.bound_s), MOST_NODES), 3):
                if cut is not None:
                    self._time_cut(item, self._names(cut, lattice), cut.recompute, cut.bound_s)
        seen: list[tuple[int, ...]] = []
        while len(seen) < ILP_ROUNDS:
            solved = self.bounds.solved(configuration, fused=item.fused, below_s=state.best_s, without=seen)
            if solved.bound >= state.best_s * (1 - 1e-6):
                return
            if solved.stage_of is None:
                break
            seen.append(solved.stage_of)
            names = self._by_stage(solved.stage_of, configuration.pipeline)
            for again in shape.recompute:
                self._time_cut(item, names, (again,) * configuration.pipeline, solved.bound)
        state.complete = False

    def _solve_around(self, item: _Item) -> None:
        """Several stages a rank: the short ILP's cut, then one layer at a time to a neighbouring stage."""
        state, configuration = self.state, item.configuration
        stages = configuration.pipeline * configuration.virtual
        bound = self.bounds.known(configuration, fused=item.fused)
        solved = self.bounds.solved(configuration, fused=item.fused, below_s=state.best_s, most_nodes=30)
        if solved.bound >= state.best_s * (1 - 1e-6):
            return
        choices = self.bounds.shape(configuration, fused=item.fused).recompute
        every = self.bounds.lattice.every_cut(stages, MOST_CUTS) if self.bounds.lattice else None
        if every is not None and self.bounds.lattice is not None:
            for ideals in every:
                for again in itertools.product(choices, repeat=stages):
                    self._time_cut(item, self._between(ideals, self.bounds.lattice), again, bound)
            return
        state.complete = False
        recompute = (self.asked.recompute == "all",) * stages
        cuts = [self._names(cut, self.bounds.lattice) for cut in self._balanced(item)] if self.bounds.lattice else []
        if solved.stage_of is not None:
            cuts.insert(0, self._by_stage(solved.stage_of, stages))
        timed = [(self._time_cut(item, cut, recompute, bound), cut) for cut in cuts]
        if not timed:
            return
        reached, cut = min(timed, key=lambda entry: entry[0])
        left, better = MOVES, math.isfinite(reached)
        while better and left > 0 and state.timing_left > 0:
            better = False
            for near in moved(self.graph, cut):
                left -= 1
                seconds = self._time_cut(item, near, recompute, bound)
                if seconds < reached * (1 - _EQUAL):
                    reached, cut, better = seconds, near, True
                    break
                if left <= 0 or state.timing_left <= 0:
                    break

    def _balanced(self, item: _Item) -> list[BoundedCut]:
        """The cut with the best bound if every stage had a rank of its own: near even, and a start at least."""
        configuration = item.configuration
        wide = configuration.with_ranks(configuration.pipeline * configuration.virtual)
        if wide.pipeline > len(self.graph):
            return []
        suffix = self.bounds.suffix(wide, fused=item.fused)
        found = itertools.islice(suffix.cuts(2 * suffix.bound_s, MOST_NODES), 1) if suffix else ()
        return [cut for cut in found if cut is not None]

    def _names(self, cut: BoundedCut, lattice: Lattice) -> Cut:
        return self._between(cut.ideals, lattice)

    def _between(self, ideals: tuple[int, ...], lattice: Lattice) -> Cut:
        return [[self.graph.names[layer] for layer in lattice.layers(start, end)] for start, end in pairwise(ideals)]

    def _by_stage(self, stage_of: tuple[int, ...], stages: int) -> Cut:
        return [
            [self.graph.names[layer] for layer, home in enumerate(stage_of) if home == stage] for stage in range(stages)
        ]

    # --- cuts ---------------------------------------------------------------------------------------------------------

    def _time_cut(self, item: _Item, cut: Cut, recompute: tuple[bool, ...], bound_s: float) -> float:
        """Time one cut under every schedule of the family; its time where it was worth timing, else infinity."""
        self._pulse()
        state, configuration = self.state, item.configuration
        job = job_of_cut(self.graph, self.asked, configuration, cut, recompute)
        walk = Walk(job)
        bound = max(bound_s, cut_bound(walk, fused=item.fused))
        if bound > state.best_s * (1 + _EQUAL):
            return math.inf
        effort = CLIMB_SIMULATIONS * 2 * configuration.num_microbatches * configuration.pipeline
        effort = min(effort, max(state.timing_left, 0))
        timing = time_cut(walk, configuration, item.names, bound_s=bound, effort=effort)
        state.timing_left -= timing.spent
        seconds = timing.best.iteration_s if timing.best else math.inf
        if timing.may_be_beaten:
            state.open_cuts.append(_OpenCut(item=item, job=job, bound_s=bound, timed_s=seconds))
        if timing.best is not None:
            self._offer(configuration, job, timing.best)
        return seconds

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
            timeline=simulate(job, order.schedule),
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
                    Walk(cut.job), configuration, cut.item.names, bound_s=cut.bound_s, effort=min(effort, PROOF_ACTIONS)
                )
                if timing.best is not None:
                    self._offer(configuration, cut.job, timing.best)
        best = state.best
        if best is None or ScheduleName.SYNTHESISED not in self.asked.schedules:
            return
        walk = Walk(best.job)
        bound = cut_bound(walk, fused=False)
        actions = 3 * sum(map(len, best.timeline.schedule))
        if best.iteration_s > bound * (1 + _EQUAL) and actions * 20 < TIMING_ACTIONS:
            order = Order(
                iteration_s=best.iteration_s,
                name=best.schedule,
                warmup=best.warmup,
                schedule=best.timeline.schedule,
            )
            self._offer(best.configuration, best.job, polished(walk, order, bound_s=bound, steps=POLISH_SWAPS))

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
                timeline=simulate(best.job, depths.schedule(made)),
            )
            self.state.best = self.state.per_configuration[best.configuration] = trimmed

    def _prove_depths(self) -> None:
        """Settle what lies between the bounds of timed cuts and the best time."""
        state, left = self.state, PROOF_ACTIONS
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
