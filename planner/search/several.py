"""Cuts of configurations with several stages a rank: along one order of the layers, made again with what was seen."""

from __future__ import annotations

import itertools
import math
from itertools import pairwise
from typing import Final

import numpy as np

from planner.schedules import ScheduleName
from planner.search.incumbent import topological_orders
from planner.search.lattice import Bools, Floats, Ints
from planner.search.orders import Order
from planner.search.pairs import paired
from planner.search.passes import Passes
from planner.search.state import CUT_ACTIONS, EQUAL, Cut, Item, Search
from planner.simulate import Walk, simulate

QUICK_CUTS: Final = 4
"""Cuts timed in a configuration at first sight."""
FIRST_PASSES: Final = (1.0, 0.6, 0.5, 0.3)
"""Starts of the cuts with several stages a rank: the first stage of each rank against its others."""
PASS_ACTIONS: Final = 200
"""What sliding the windows over such a cut takes, in simulated actions for each stage."""
PAIR_ROUNDS: Final = 8
"""Pairs of boundaries moved, one after another, in a cut that is timed."""
PAIRED_STAGES: Final = 80
"""With more stages boundaries are not moved in pairs."""
PAIR_ACTIONS: Final = 200
"""What that takes, in simulated actions for each stage."""
FEWER: Final = 1.05
"""By how much a rough cut may look worse that recomputes less, and yet be tried first."""
HOPELESS: Final = 1.04
"""A configuration with a cut so many times slower than the best is left at its first look."""
SEARCH_ON: Final = 1.5
"""Up to how many times the effort of the first looks is spent before and on searching on from random starts."""
STARTS: Final = 12
"""Random starts that one such cut is the best of."""
NEAREST: Final = 3
"""Configurations with several stages a rank that are searched on with the effort that is left."""
FEEDBACKS: Final = 4
"""How often such a cut is made again with what its ranks were seen to wait."""


class Several:
    """Looks at configurations with several stages a rank."""

    def __init__(self, search: Search) -> None:
        self.search: Final = search

    def look(self, item: Item) -> None:
        """Several stages a rank: cuts along one order, made again with what the ranks were seen to wait."""
        state, configuration = self.search.state, item.configuration
        orders = [list(range(len(self.search.graph)))]
        if not self.search.graph.is_chain:
            orders = list(itertools.islice(topological_orders(self.search.graph, 3), 3))
        made: list[tuple[float, int, tuple[int, ...], tuple[bool, ...], Passes]] = []
        for order in orders:
            passes = Passes(self.search.bounds.layers(configuration), configuration, order)
            for turn, again in enumerate(self._recomputing(passes)):
                firsts = FIRST_PASSES if turn == 0 else FIRST_PASSES[:2]
                for first in firsts if configuration.pipeline > 1 else (1.0,):
                    marks = passes.better(passes.start(first, again), again)
                    self.search.bounds.spent += PASS_ACTIONS * passes.num_stages
                    for cut in (marks, self._paired(passes, marks, again)) if turn == 0 else (marks,):
                        worth = passes.worth(cut, again)
                        made.append((worth, len(made), tuple(cut.tolist()), tuple(again.tolist()), passes))
        by_promise = sorted(made, key=lambda entry: (entry[0] + _longest_s(entry[4], entry[2]), entry[1]))
        for worth, _, found, flags, passes in by_promise[:QUICK_CUTS]:
            if worth > state.best_s * (1 + EQUAL) or (self.search.spent() > 0 and state.best is not None):
                return
            seconds = self._feed_back(item, passes, np.array(found), np.array(flags))
            if HOPELESS * state.best_s < seconds < math.inf:
                return

    def search_on(self) -> None:
        """With what effort is left: the nearest configurations with several stages a rank, from random starts."""
        state, rng = self.search.state, np.random.default_rng(0)
        items = {item.configuration: item for _, item in state.open_items if ScheduleName.SYNTHESISED in item.names}
        found = sorted(state.per_configuration.values(), key=lambda one: one.iteration_s)
        near = [one for one in found if one.configuration.virtual > 1 and one.configuration in items][:NEAREST]
        order = list(range(len(self.search.graph)))
        if not self.search.graph.is_chain:
            order = next(iter(topological_orders(self.search.graph, 1)))
        until = max(self.search.bounds.spent, SEARCH_ON * self.search.effort)
        while near and self.search.bounds.spent < until and state.best is not None and not state.complete:
            for one in near:
                item, passes = (
                    items[one.configuration],
                    Passes(self.search.bounds.layers(one.configuration), one.configuration, order),
                )
                again = np.array([stage.recompute for stage in one.stages])
                tries = []
                for turn in range(STARTS):
                    marks = passes.better(passes.at(self._targets(passes, rng)), again)
                    marks = self._paired(passes, marks, again) if turn % 2 else marks
                    self.search.bounds.spent += PASS_ACTIONS * passes.num_stages
                    tries.append((passes.worth(marks, again), tuple(marks.tolist())))
                worth, best = min(tries)
                if worth < state.best_s and item.look_actions < -self.search.spent():
                    self._feed_back(item, passes, np.array(best), again)
                else:
                    self.search.bounds.spent += CUT_ACTIONS + 20 * len(self.search.graph)

    def _paired(self, passes: Passes, marks: Ints, again: Bools) -> Ints:
        """The cut after some rounds of pairs of moves; none where there are too many stages."""
        if passes.num_stages > PAIRED_STAGES or passes.configuration.pipeline == 1:
            return marks
        self.search.bounds.spent += PAIR_ACTIONS * passes.num_stages
        return paired(passes, marks, again, PAIR_ROUNDS)

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
        if self.search.limit is None or self.search.asked.recompute != "auto":
            return [np.full(stages, self.search.asked.recompute == "all")]
        step = max(1, passes.configuration.pipeline // 2)
        choices = [np.arange(stages) < first for first in range(0, stages + step, step)]
        worths = [passes.worth(passes.start(1.0, again), again) for again in choices]
        enough = FEWER * min(worths)  # starts are rough: what recomputes less is taken where it is nearly as good
        best = sorted(range(len(choices)), key=lambda place: (max(worths[place], enough), place))
        return [choices[place] for place in best[:2] if math.isfinite(worths[place])]

    def _feed_back(self, item: Item, passes: Passes, marks: Ints, again: Bools) -> float:
        """Time a cut; then cuts that take from the ranks that waited longer than their rows say; the best time."""
        bound = self.search.bounds.known(item.configuration, fused=item.fused)
        passes.extra_s = passes.extra_s * 0.0
        best = math.inf
        for _ in range(FEEDBACKS):
            order = self.search.time_cut(item, self._along(passes, marks), tuple(again.tolist()), bound, quick=True)
            if order is None or order.iteration_s >= best * (1 - 1e-6) or self.search.spent() > 0:
                return best
            best = order.iteration_s
            if best > HOPELESS * self.search.state.best_s:
                return best
            ends = np.array(self._ends(item, passes, marks, again, order))
            passes.extra_s = np.maximum(ends - (passes.rows(marks, again) - passes.extra_s), 0.0)
            marks = passes.better(marks, again)
            if passes.worth(marks, again) >= best * (1 - 1e-6):
                return best
        return best

    def _ends(self, item: Item, passes: Passes, marks: Ints, again: Bools, order: Order) -> list[float]:
        """When each rank is done with all it has to do."""
        walk = Walk(self.search.job(item, self._along(passes, marks), tuple(again.tolist())))
        timeline = simulate(walk, order.schedule, memory=False)
        ends = [ended[-1] for ended in timeline.ends_s]
        for closing in timeline.closings:
            ends[closing.rank] = max(ends[closing.rank], closing.end_s)
        return ends

    def _along(self, passes: Passes, marks: Ints) -> Cut:
        return [
            [self.search.graph.names[layer] for layer in passes.order[low:high]]
            for low, high in pairwise(marks.tolist())
        ]


def _longest_s(passes: Passes, marks: tuple[int, ...]) -> float:
    """The load of the longest stage: about what others wait for it on top of their rows."""
    return float(np.diff(passes.load[np.array(marks)]).max())
