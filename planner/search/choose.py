"""The search over configurations: best bound first, until the next bound passes the best simulated time.

    bounds      every configuration gets a cheap bound under each family of schedules (fused, split); the least one is
                made exact and put back, until the least is exact
    visit       its most promising cuts are timed under the family's schedules: the best time of all rules out most of
                the rest by their bounds alone
    settle      what lies below the best then: cuts in order of their bound, each timed, until the next one's bound
                passes the best time
    finish      what still lies between a cut's bound and the best is settled by branch and bound over its depths

``proven`` says that every configuration was solved or pruned so: no named schedule asked for, at any warm-up depth, is
faster on any cut. All limits are counts (cuts, nodes, simulated actions), so one input gives one plan; only an
interrupt ends a search early, with the best so far and what is proven of it. With ``max_seconds`` that time is the
limit: counts are doubled, and what is open is gone on with, until all is proven or time has run out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from collections.abc import Callable, Iterator
from typing import Final

from planner.errors import InputError
from planner.graph import LayerGraph
from planner.profile import Profile
from planner.search.baselines import baselines
from planner.search.clock import Clock, OutOfTimeError, Progress, Watch
from planner.search.exhaust import MOST_LAYERS, Exhaust
from planner.search.finish import Finish
from planner.search.lean import leanest
from planner.search.result import Candidate, Found
from planner.search.settle import Settle
from planner.search.shortfall import no_plan_fits, no_schedule_suits
from planner.search.smaller import on_the_original, smaller
from planner.search.space import Asked, Configuration
from planner.search.state import EQUAL, Search
from planner.search.visit import Visit

__all__ = ["Progress", "solve"]

MOST_TIMES: Final = 2**16
"""With a time given: effort is doubled up to so many times the usual; a search so small is through."""

_BETWEEN_COLLECTIONS: Final = 200_000
"""New objects between two looks for cycles."""


def solve(profile: Profile, asked: Asked, watch: Watch | None = None) -> Found:
    """The best plan for what is asked, with its proof.

    Raises NoPlanFitsError where no plan fits the memory, and InputError where nothing can be searched.
    """
    clock = Clock(asked.max_seconds)
    with _rare_collections():
        return _solved(profile, asked, clock, watch)


@contextlib.contextmanager
def _rare_collections() -> Iterator[None]:
    """Orders are hundreds of thousands of small tuples: to look for cycles among them takes a tenth of a search."""
    usual = gc.get_threshold()
    gc.set_threshold(_BETWEEN_COLLECTIONS, *usual[1:])
    try:
        yield
    finally:
        gc.set_threshold(*usual)


def _solved(profile: Profile, asked: Asked, clock: Clock, watch: Watch | None) -> Found:
    if asked.zero1:
        profile = dataclasses.replace(profile, optimizer=profile.optimizer.sharded(_replicas(asked)))
    made = smaller(LayerGraph.of(profile), asked)
    if made is None:
        return _Course(profile, asked, clock, watch).run()
    return on_the_original(_Course(made.graph.profile, asked, clock, watch).run(), made)


def _replicas(asked: Asked) -> int:
    """The number of replicas that share the optimizer."""
    if asked.data is None or len(asked.data) != 1:
        raise InputError("--zero1 shards the optimizer over D replicas: D must be known", hint="name it: --data 2, say")
    if asked.data[0] == 1:
        raise InputError("--zero1 shards the optimizer over D replicas, and there is one", hint="leave --zero1 out")
    return asked.data[0]


class _Course(Search):
    """A search from its first look to its proof."""

    def run(self) -> Found:
        """Visit, settle, polish, prove; what an interrupt leaves is honest too."""
        state, visit = self.state, Visit(self)
        try:
            self._first(visit)
            self._go_on(visit)
            while self.clock.max_seconds is not None and not self._is_proven() and self.times < MOST_TIMES:
                self.times, self.before = 2 * self.times, self.bounds.spent
                visit.go_on()
                self._go_on(visit)
            Finish(self).trim()
        except OutOfTimeError:
            state.complete, state.interrupted = False, True
        except KeyboardInterrupt:
            if state.best is None:
                raise
            state.complete, state.interrupted = False, True
        assert state.best is not None, "a search that finds no plan raises"
        least = max(self.least_s, self._least())
        state.complete |= state.best_s <= least * (1 + EQUAL)
        left = set() if state.complete else self._left()
        state.complete = not left
        solved = len(state.solved - left)
        return Found(
            asked=self.asked,
            graph=self.graph,
            best=state.best,
            bound_s=min(least, state.best_s),
            proven=state.complete,
            configurations=len(self.configurations),
            solved=solved,
            pruned=len(self.configurations) - solved - len(left),
            seconds=self.clock.seconds,
            alternatives=tuple(sorted(state.per_configuration.values(), key=lambda found: found.iteration_s)),
            by_schedule=tuple(sorted(state.per_schedule.values(), key=lambda found: found.iteration_s)),
            baselines=baselines(self.graph, self.asked, self._sizes()),
            interrupted=state.interrupted,
        )

    def _go_on(self, visit: Visit) -> None:
        """What first looks leave open: settled, bettered, proven, as far as the effort goes."""
        state, finish = self.state, Finish(self)
        self.phase = "settling what may be faster"
        Settle(self).all()
        self.phase = "searching on from random starts"
        visit.several.search_on()
        self.phase = "polishing the best"
        finish.polish()
        finish.prove_depths()
        if not state.complete:
            self.phase = "going through what is left"
            state.complete = self._exhaust()

    def _is_proven(self) -> bool:
        """Whether what bounds say by now is enough; they are kept, as there may be no time for them at the end."""
        state = self.state
        self.least_s = max(self.least_s, self._least_now())
        return state.complete or state.best_s <= self.least_s * (1 + EQUAL)

    def _least(self) -> float:
        """The least bound of all."""
        state = self.state
        try:
            if not state.interrupted:
                return self._least_now()
        except KeyboardInterrupt:
            state.complete, state.interrupted = False, True
        return min(self.bounds.known(one, fused=False) for one in self.configurations)

    def _least_now(self) -> float:
        best_s = self.state.best_s
        return self.bounds.least(self.configurations, best_s, lambda: self.spent() > 0, self.clock.is_over)

    def _first(self, visit: Visit) -> None:
        """First looks; where they find nothing in time, or nothing that fits, the leanest plan will do."""
        state = self.state
        try:
            visit.visit()
        except OutOfTimeError:
            if state.best is None:
                state.best = self._leanest()
            raise
        if state.best is None:
            state.best = self._leanest()

    def _left(self) -> set[Configuration]:
        """The configurations of which something may be faster than the best."""
        state, known = self.state, self.bounds.known
        near = {one for one in self.configurations if not state.beats(known(one, fused=False))}
        if state.interrupted:
            return near
        left = near - state.solved
        for bound, item in state.open_items:
            if item not in state.settled and not state.beats(max(bound, known(item.configuration, fused=item.fused))):
                left.add(item.configuration)
        return left | {cut.item.configuration for cut in state.open_cuts if not state.beats(cut.bound_s)}

    def _exhaust(self, pulse: Callable[[], None] | None = None) -> bool:
        """Where there is little, all of what may be faster; whether that was all."""
        state, lattice = self.state, self.bounds.lattice
        if lattice is None or (len(self.graph) > MOST_LAYERS and not self.bounds.lists_cuts()):
            return False
        known = {one: self.bounds.known(one, fused=False) for one in self.configurations}
        near = sorted((one for one in known if not state.beats(known[one])), key=known.__getitem__)
        exhaust = Exhaust(self.graph, dataclasses.replace(self.asked, effort=self.times), lattice)
        for found in exhaust.faster(near, state.best_s, pulse or self.pulse):
            state.best = state.per_configuration[found.configuration] = state.per_schedule[found.schedule] = found
        return exhaust.complete

    def _leanest(self) -> Candidate:
        """What is left to try where no cut that was timed fits."""
        self.phase = "looking for what needs the least memory"

        def is_over() -> bool:
            self.say()
            return self.clock.is_over()

        def pulse() -> None:
            if is_over():
                raise OutOfTimeError

        found = leanest(self.graph, self.asked, enough_bytes=self.limit or 0, is_over=is_over)
        if found is None:
            raise no_schedule_suits(self.asked)
        if self.limit is not None and found.peak_memory_bytes > self.limit:
            with contextlib.suppress(OutOfTimeError):
                self._exhaust(pulse)  # a small graph is gone through before it is said that nothing fits
            if self.state.best is None:
                raise no_plan_fits(self.graph, self.asked, found, is_over)
            return self.state.best
        self.state.per_configuration[found.configuration] = found
        return found

    def _sizes(self) -> list[int]:
        """The micro-batch sizes that were searched."""
        return sorted({configuration.microbatch_size for configuration in self.configurations})
