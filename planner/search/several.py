"""Cuts of configurations with several stages a rank: along one order of the layers, made again with what was seen."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np

from planner.schedules import ScheduleName
from planner.search.incumbent import topological_orders
from planner.search.lattice import Bools, Floats, Ints
from planner.search.orders import LONG, Order, missing_bytes
from planner.search.pairs import paired
from planner.search.passes import Passes
from planner.search.space import Configuration
from planner.search.state import CUT_ACTIONS, HOPELESS, Cut, Item, Search
from planner.simulate import Walk, simulate
from planner.simulate.blocks import block, busiest_s

QUICK_CUTS: Final = 4
"""Cuts timed in a configuration at first sight."""
FIRST_PASSES: Final = (1.0, 0.6, 0.5, 0.3)
"""Starts of the cuts with several stages a rank: the first stage of each rank against its others."""
WAVES: Final = (1.0, 0.8, 0.6, 0.4)
"""The same where ranks then wait for the second."""
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
SEARCH_ON: Final = 1.5
"""Up to how many times the effort of the first looks is spent before and on searching on from random starts."""
STARTS: Final = 12
"""Random starts that one such cut is the best of."""
FRUITLESS: Final = 2
"""Rounds in a row that find nothing better after which it ends."""
NEAREST: Final = 3
"""Configurations with several stages a rank that are searched on with the effort that is left."""
FEEDBACKS: Final = 4
"""How often such a cut is made again with what its ranks were seen to wait."""
ROOMY: Final = 1.6
"""How much longer than its round trip a micro-batch is held where its rank repeats a block, about."""
ROUNDS: Final = 8
"""How often a cut is made again with what its ranks lacked for that."""


class _Begun(NamedTuple):
    """A cut that was made for a configuration and not timed yet; ``turn``: how promising who recomputes is, 0 most."""

    worth_s: float
    marks: Ints
    again: Bools
    passes: Passes
    turn: int

    @property
    def key(self) -> bytes:
        """The same for the same cut."""
        return self.marks.tobytes() + self.again.tobytes()


class Several:
    """Looks at configurations with several stages a rank."""

    def __init__(self, search: Search) -> None:
        self.search: Final = search
        self.begun: Final[dict[Configuration, list[_Begun]]] = {}
        """Cuts of configurations, the first few or all that are made at first."""
        self.whole: Final[set[Configuration]] = set()
        """Where it is all."""
        self._rng: Final = np.random.default_rng(0)

    def promise(self, item: Item) -> float:
        """About what a configuration's cuts will come to (seconds), from the rows of a few of them: no bound."""
        if item.configuration not in self.begun:
            self.begun[item.configuration] = list(self._begin(item))
        return min((entry.worth_s for entry in self.begun[item.configuration]), default=math.inf)

    def glance(self, item: Item) -> float:
        """The time of a configuration's most promising cut so far, under a few orders (seconds)."""
        begun = min(self.begun[item.configuration], key=lambda entry: entry.worth_s)
        bound = self.search.bounds.known(item.configuration, fused=item.fused)
        if self.search.limit is not None and item.actions > LONG and ScheduleName.SYNTHESISED in item.names:
            seconds = self._with_room(item, begun)
            if seconds < math.inf:
                return seconds
        cut, again = self._along(begun.passes, begun.marks), tuple(begun.again.tolist())
        order = self.search.look_at(item, cut, again, bound)
        return math.inf if order is None else order.iteration_s

    def _begin(self, item: Item) -> Iterator[_Begun]:
        """A configuration's first cuts: along one order of the layers (a few, where there are forks)."""
        configuration, graph = item.configuration, self.search.graph
        orders = [list(range(len(graph)))]
        if not graph.is_chain:
            orders = list(itertools.islice(topological_orders(graph, 3), 3))
        for order in orders:
            passes = Passes(self.search.bounds.layers(configuration), configuration, order)
            for turn, again in enumerate(self._recomputing(passes)):
                for first in self._firsts(passes, turn)[:2]:
                    yield self._made(passes, first, again, pairs=True, turn=turn)

    @staticmethod
    def _firsts(passes: Passes, turn: int) -> tuple[float, ...]:
        """The first pass of each start against its others; fewer where others that recompute look better."""
        if passes.configuration.pipeline == 1:
            return (1.0,)
        firsts = WAVES if passes.in_waves else FIRST_PASSES
        return firsts if turn == 0 else firsts[1:2]

    def _made(self, passes: Passes, first: float, again: Bools, *, pairs: bool, turn: int) -> _Begun:
        """The cut that one start leads to."""
        marks = passes.better(passes.start(first, again), again)
        self.search.bounds.spent += PASS_ACTIONS * passes.num_stages
        if pairs:
            marks = self._paired(passes, marks, again)
        return _Begun(passes.worth(marks, again), marks, again, passes, turn)

    def look(self, item: Item) -> None:
        """Several stages a rank: the most promising cuts, each made again with what its ranks were seen to wait."""
        state = self.search.state
        self.promise(item)
        made = self.begun[item.configuration]
        for begun in () if item.configuration in self.whole else tuple(made):
            for first in self._firsts(begun.passes, begun.turn)[2:]:
                made.append(self._made(begun.passes, first, begun.again, pairs=True, turn=begun.turn))
        self.whole.add(item.configuration)
        by_promise = sorted(enumerate(made), key=lambda entry: (entry[1].worth_s, entry[0]))
        seen: set[bytes] = set()
        for _, begun in by_promise[:QUICK_CUTS]:
            if begun.worth_s > HOPELESS * state.best_s or (self.search.spent() > 0 and state.best is not None):
                return
            if begun.key in seen:
                continue
            seen.add(begun.key)
            seconds = self._feed_back(item, begun.passes, begun.marks, begun.again)
            if HOPELESS * state.best_s < seconds < math.inf:
                return

    def search_on(self) -> None:
        """With what effort is left: the nearest configurations with several stages a rank, from random starts."""
        state, rng = self.search.state, self._rng
        items = {item.configuration: item for _, item in state.open_items if ScheduleName.SYNTHESISED in item.names}
        found = sorted(state.per_configuration.values(), key=lambda one: one.iteration_s)
        near = [one for one in found if one.configuration.virtual > 1 and one.configuration in items]
        near = [one for one in near if one.iteration_s <= HOPELESS * state.best_s][:NEAREST]
        order = list(range(len(self.search.graph)))
        if not self.search.graph.is_chain:
            order = next(iter(topological_orders(self.search.graph, 1)))
        share = int(SEARCH_ON * self.search.effort) * len(self.search.tensors)
        until = max(self.search.bounds.spent, self.search.before + share)
        if self.search.before:
            state.left = max(state.left, until)
        fruitless = 0
        while near and fruitless < FRUITLESS and self.search.bounds.spent < until and not state.complete:
            best_s, fruitless = state.best_s, fruitless + 1
            for one in near:
                self.search.pulse()
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
            if state.best_s < best_s:
                fruitless = 0

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
        worths = [float(passes.rows(passes.start(1.0, again), again).max()) for again in choices]
        enough = FEWER * min(worths)  # starts are rough: what recomputes less is taken where it is nearly as good
        best = sorted(range(len(choices)), key=lambda place: (max(worths[place], enough), place))
        return [choices[place] for place in dict.fromkeys((*best[:2], 0))]

    def _feed_back(self, item: Item, passes: Passes, marks: Ints, again: Bools) -> float:
        """Time a cut; then cuts that take from the ranks that waited longer than their rows say; the best time."""
        bound = self.search.bounds.known(item.configuration, fused=item.fused)
        passes.extra_s = passes.extra_s * 0.0
        best = math.inf
        for _ in range(FEEDBACKS):
            order = self.search.look_at(item, self._along(passes, marks), tuple(again.tolist()), bound)
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

    def _with_room(self, item: Item, begun: _Begun) -> float:
        """The time of a cut whose ranks hold what repeating one block takes: shaped by what they were seen to lack."""
        passes, marks, limit = begun.passes, begun.marks, self.search.limit
        assert limit is not None
        bound, seconds = self.search.bounds.known(item.configuration, fused=item.fused), math.inf
        before, passes.stretch = passes.stretch, ROOMY
        for _ in range(ROUNDS):
            marks = passes.better(marks, begun.again)
            self.search.bounds.spent += PASS_ACTIONS * passes.num_stages
            if passes.worth(marks, begun.again) > self.search.state.best_s or self.search.spent() > 0:
                break
            cut, again = self._along(passes, marks), tuple(begun.again.tolist())
            walk = Walk(self.search.job(item, cut, again))
            period_s = busiest_s(walk)
            made = block(walk, period_s, split=True)
            missing = np.array(missing_bytes(walk, made, period_s, limit), dtype=float)
            self.search.bounds.spent += item.configuration.num_microbatches * len(made) // 4
            if missing.max() <= 0:
                order = self.search.time_cut(item, cut, again, bound, quick=True)
                seconds = math.inf if order is None else order.iteration_s
                break
            passes.extra_bytes = passes.extra_bytes + np.maximum(missing, 0.0) / 2
        passes.stretch, passes.extra_bytes = before, passes.extra_bytes * 0.0
        return seconds

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
