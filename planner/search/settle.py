"""What the first looks left open: cuts in order of their bound, timed until the next one's passes the best time."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from planner.schedules import ranks_of
from planner.search.orders import GREEDY_MOST
from planner.search.state import EQUAL, FAR, HOPELESS, Item, Search
from planner.search.suffix import BoundedCut, SuffixBound

MOST_CUTS: Final = 300
"""Cuts timed in one configuration."""
FIRST_CUTS: Final = 40
"""Cuts timed in one configuration before it is counted how many are left below the best."""
FEW_CUTS: Final = 10
"""Cuts timed in one configuration with several stages a rank where no proof will come."""
HOPELESS_CUTS: Final = 2
"""Cuts in a row of one configuration that are far slower than the best, where no proof will come."""
SETTLED_CUTS: Final = 4
"""Cuts that must be within the effort, else a configuration is not settled."""
MOST_NODES: Final = 20_000
"""Begun cuts looked at in one configuration."""
NEAREST: Final = 4
"""Cuts timed in a configuration of one rank, where its stages are buckets of the all-reduce."""
MOST_TIES: Final = 24
"""Cuts looked at beyond those that could be faster, for a more even one among equals."""
ILP_ROUNDS: Final = 20
"""Cuts that the ILP may bring, one after another, in a configuration of a graph with many ideals."""

_NO_CUT: Final = BoundedCut(bound_s=math.inf, ideals=(), recompute=())


class Settle:
    """One pass over what is open."""

    def __init__(self, search: Search) -> None:
        self.search: Final = search
        self.provable = True
        """Whether all that is open may be settled."""

    def all(self) -> None:
        """Go through what lies below the best, if that can be finished; else through what is near."""
        state = self.search.state
        near = sorted(state.open_items, key=lambda entry: (entry[1].configuration.pipeline > 1, entry[0]))
        for tensor in self.search.tensors:  # one rank first: it is soon gone through
            state.left = max(state.left, self.search.bounds.spent) + self.search.effort
            self._some([(bound, item) for bound, item in near if item.configuration.tensor == tensor])

    def _some(self, near: Sequence[tuple[float, Item]]) -> None:
        state = self.search.state
        unproven = self._stays_open(near)
        state.far |= unproven

        def beaten(bound: float, item: Item) -> bool:
            return state.beats(max(bound, self.search.bounds.known(item.configuration, fused=item.fused)))

        self.provable = not unproven
        self.provable &= not any(self._is_beyond_listing(item) for bound, item in near if not beaten(bound, item))
        for place, (bound, item) in enumerate(near):
            if beaten(bound, item):
                continue
            if unproven and self._is_left(item):
                state.complete = False
                continue
            if self.search.spent() > 0:
                state.complete = False
                return
            self.search.tell(functools.partial(self._left, near[place:]), bound)
            if self._settle(item):
                state.settled.add(item)
            else:
                state.complete = False

    def _stays_open(self, near: Sequence[tuple[float, Item]]) -> bool:
        """Whether no proof will come: something far below the best takes more than there is to settle it.

        Then what first looks say hardly more of is left as it is.
        """
        state = self.search.state
        return any(
            FAR * bound < state.best_s and SETTLED_CUTS * item.look_actions > self.search.effort
            for bound, item in near
            if item.configuration.pipeline > 1
        )

    def _is_left(self, item: Item) -> bool:
        """Whether an item is not worth settling where no proof will come.

        What was not even looked at: its bound is above that of all that was. What takes long to simulate: its other
        cuts, looked at as at first sight, would hardly be better. What was seen to be far slower than the best.
        """
        state = self.search.state
        seen = state.per_configuration.get(item.configuration)
        hopeless = seen is not None and seen.iteration_s > HOPELESS * state.best_s
        return hopeless or item.configuration not in state.solved or item.actions > GREEDY_MOST

    def _is_beyond_listing(self, item: Item) -> bool:
        """Whether several stages a rank can be cut in more ways than could all be timed: they stay open for sure."""
        configuration = item.configuration
        stages = configuration.pipeline * configuration.virtual
        if configuration.virtual == 1 or configuration.pipeline == 1 or self.search.bounds.lists_cuts():
            return False
        return math.comb(len(self.search.graph) - 1, stages - 1) > self.search.times * MOST_CUTS

    def _left(self, near: Sequence[tuple[float, Item]]) -> int:
        """The configurations that are looked at from here on."""
        beats = self.search.state.beats
        return len({item.configuration for bound, item in near if not beats(bound)} - self.search.state.solved)

    def _settle(self, item: Item) -> bool:
        """Time all cuts of a configuration that may be faster; False where they are too many."""
        configuration = item.configuration
        stages = configuration.pipeline * configuration.virtual
        if SETTLED_CUTS * item.look_actions > self.search.effort:
            return False  # not even a few of its cuts could be timed
        every, whole = None, True
        if configuration.virtual > 1:
            most, lattice = self.search.times * MOST_CUTS, self.search.bounds.lattice
            every = lattice.every_cut(stages, most) if lattice else None
            if every is None:
                every = self._listed(item, most)
                whole = self.provable or every is None or len(every) <= FEW_CUTS
            if every is None:
                return False
        if configuration not in self.search.state.solved:
            bound = self.search.bounds.refine(configuration, fused=item.fused, best_s=self.search.state.best_s)
            if self.search.state.beats(bound):
                return True
            self.search.state.solved.add(configuration)
        suffix = self.search.bounds.suffix(configuration, fused=item.fused)
        if every is not None:
            return self._settle_each(item, every if whole else every[:FEW_CUTS]) and whole
        if suffix is None:
            return self._settle_by_ilp(item)
        return self._settle_in_order(item, suffix)

    def _listed(self, item: Item, most: int) -> list[tuple[int, ...]] | None:
        """The cuts of a short chain that may be faster than the best; None where they are too many, or unknown."""
        cuts = self.search.bounds.cuts(item.configuration)
        if cuts is None:
            return None
        before = cuts.spent
        near = cuts.below(self.search.state.best_s * (1 - EQUAL))
        self.search.bounds.spent += cuts.spent - before
        if near is not None and item.configuration.pipeline == 1:
            return [tuple(marks) for marks in near.marks[:NEAREST].tolist()]  # the first one mostly reaches its bound
        if near is None or len(near.marks) > most:
            return None
        return [tuple(marks) for marks in near.marks.tolist()]

    def _settle_in_order(self, item: Item, suffix: SuffixBound) -> bool:
        """Time all cuts with a bound below the best.

        Where the first ones leave more than could all be timed, or something else stays open for sure, the rest is
        left: no proof would come of it. Then a few that are far slower than the best are enough, too.
        """
        state, ties_seen, count, hopeless = self.search.state, 0, 0, 0
        cuts = self._charged(suffix)
        while (cut := next(cuts, _NO_CUT)) is not _NO_CUT:
            if cut is None or (count > 0 and self.search.spent() > 0):
                return state.beats(cut.bound_s if cut is not None else suffix.bound_s)
            ties_seen += state.beats(cut.bound_s)
            if cut.bound_s > state.best_s * (1 + EQUAL) or ties_seen > MOST_TIES:
                return True
            order = self.search.time_cut(
                item, self.search.between(cut.ideals, suffix.figures.lattice), cut.recompute, cut.bound_s
            )
            count += 1
            slow = order is None or order.iteration_s > HOPELESS * state.best_s
            hopeless = hopeless + 1 if slow else 0
            if not self.provable and (count == FIRST_CUTS or hopeless == HOPELESS_CUTS):
                return False
            if count == FIRST_CUTS:
                faster = itertools.takewhile(lambda cut: cut is None or cut.bound_s < state.best_s, cuts)
                most = self.search.times * MOST_CUTS
                ahead = list(itertools.islice(faster, most))
                if len(ahead) == most or None in ahead:
                    return False
                cuts = iter(ahead)
        return True

    def _charged(self, suffix: SuffixBound) -> Iterator[BoundedCut | None]:
        """Cuts that may be faster, in order of their bound; what it takes to find them is counted as spent."""
        before = suffix.expanded
        for cut in suffix.cuts(self.search.state.best_s * (1 + 2 * EQUAL), self.search.times * MOST_NODES):
            self.search.bounds.spent += suffix.expanded - before
            before = suffix.expanded
            yield cut
        self.search.bounds.spent += suffix.expanded - before

    def _settle_by_ilp(self, item: Item) -> bool:
        """Where a graph has too many ideals: the ILP's cuts in order of their bound, each forbidden once timed."""
        state, configuration = self.search.state, item.configuration
        shape = self.search.bounds.shape(configuration, fused=item.fused)
        seen: list[tuple[int, ...]] = []
        while len(seen) < self.search.times * ILP_ROUNDS:
            solved = self.search.bounds.solved(configuration, fused=item.fused, below_s=state.best_s, without=seen)
            self.search.bounds.spent += 20 * len(self.search.graph) * configuration.pipeline * (1 + solved.nodes)
            if solved.bound >= state.best_s * (1 - 1e-6):
                return True
            if solved.stage_of is None or self.search.spent() > 0:
                return False
            seen.append(solved.stage_of)
            names = self.search.by_stage(solved.stage_of, configuration.pipeline)
            for again in shape.recompute:
                self.search.time_cut(item, names, (again,) * configuration.pipeline, solved.bound)
        return False

    def _settle_each(self, item: Item, every: list[tuple[int, ...]]) -> bool:
        """Several stages a rank: every cut there is, where they are few."""
        configuration, lattice = item.configuration, self.search.bounds.lattice
        assert lattice is not None, "cuts are listed from it"
        stages = configuration.pipeline * configuration.virtual
        bound = self.search.bounds.known(configuration, fused=item.fused)
        choices = self.search.bounds.shape(configuration, fused=item.fused).recompute
        layers = self.search.bounds.layers(configuration)
        own = np.array(ranks_of(configuration.pipeline, configuration.virtual, configuration.placement))
        own = own[None, :] == np.arange(configuration.pipeline)[:, None]  # rank, stage
        for ideals in every:
            inside = np.diff(lattice.members[list(ideals)].astype(float), axis=0)  # stage, layer
            load_s, forward_s = inside @ layers.load_s, inside @ layers.forward_s
            for again in itertools.product(choices, repeat=stages):
                busy_s = own @ (load_s + np.where(again, forward_s, 0.0))
                if self.search.state.beats(configuration.num_microbatches * float(busy_s.max())):
                    continue
                if self.search.spent() > 0:
                    return False
                self.search.time_cut(item, self.search.between(ideals, lattice), again, bound)
        return True
