"""First looks: configurations in order of their bound, the most promising cuts of each timed."""

from __future__ import annotations

import heapq
import itertools
import math
from typing import Final

from planner.search.figures import Figures
from planner.search.incumbent import topological_orders
from planner.search.lattice import along
from planner.search.orders import FUSED, SPLIT
from planner.search.several import Several
from planner.search.space import Configuration
from planner.search.state import EQUAL, Item, Progress, Search
from planner.search.suffix import SuffixBound

LOOK_NODES: Final = 25
"""Begun cuts looked at for each rank, at first sight."""
ACTIONS_A_SECOND: Final = 300_000
"""Simulated actions that surely fit into a second."""
QUICK_CUTS: Final = 2
"""Cuts timed in a configuration at first sight."""
ORDERS: Final = 60
"""Topological orders tried where a graph has too many ideals."""
MOST_NODES: Final = 20_000
"""Begun cuts looked at along one of them."""
PHASES: Final = ((False, True, 0.4), (False, False, 0.5), (True, True, 0.9), (True, False, 1.0))
"""Whether ranks have several stages, whether all GPUs are used, and how much of the effort may be spent by then."""


class Visit:
    """One pass over all configurations."""

    def __init__(self, search: Search) -> None:
        self.search: Final = search
        self.several: Final = Several(search)

    def _items(self) -> list[Item]:
        families = (tuple(name for name in family if name in self.search.asked.schedules) for family in (SPLIT, FUSED))
        asked = [names for names in families if names]
        return [
            Item(c, names)
            # with one stage all orders are alike; among equal bounds more stages a rank first: they fill sooner
            for c in sorted(self.search.configurations, key=lambda c: -c.virtual)
            for names in (asked[-1:] if c.pipeline == 1 and c.virtual == 1 else asked)
        ]

    def visit(self) -> None:
        """Look at configurations in order of their bound until it passes the best time."""
        state, items = self.search.state, self._items()
        most = max(configuration.gpus for configuration in self.search.configurations)
        for several, full, share in PHASES:
            places = [
                place
                for place, item in enumerate(items)
                if (item.configuration.virtual > 1) == several and (item.configuration.gpus == most) == full
            ]
            state.left = max(
                int(share * self.search.effort), self.search.bounds.spent + int(share * self.search.effort) // 10
            )
            for alone in (True, False):  # one rank first: it is soon looked at, and often near the best
                self._visit_some(items, [at for at in places if (items[at].configuration.pipeline == 1) == alone])

    def _visit_some(self, items: list[Item], places: list[int]) -> None:
        state = self.search.state
        waiting = [
            (self.search.bounds.known(items[place].configuration, fused=items[place].fused), 0, place)
            for place in places
        ]
        heapq.heapify(waiting)
        while waiting:
            self._tell(waiting[0][0], waiting, items)
            bound, level, index = heapq.heappop(waiting)
            item = items[index]
            if not math.isfinite(bound) or bound > state.best_s * (1 + EQUAL):
                return
            if self._is_no_better_tie(bound, item.configuration):
                continue
            if self.search.spent() > 0:
                state.open_items += [(bound, item), *((known, items[other]) for known, _, other in waiting)]
                return
            if level == 0:
                exact = self.search.bounds.refine(item.configuration, fused=item.fused, best_s=state.best_s)
                heapq.heappush(waiting, (_rounded(exact) if item.configuration.virtual > 1 else exact, 1, index))
            else:
                if item.look_actions < (self._first_look() if state.best is None else -self.search.spent()):
                    state.solved.add(item.configuration)
                    self._look(item)
                state.open_items.append((bound, item))

    def _first_look(self) -> float:
        """What a look may take, in simulated actions, while there is no plan yet: anything, unless time is short."""
        limit = self.search.asked.max_seconds
        return math.inf if limit is None else ACTIONS_A_SECOND * limit

    def _is_no_better_tie(self, bound: float, configuration: Configuration) -> bool:
        """Whether a configuration can be no faster than the best, nor be preferred to it among equals."""
        best = self.search.state.best
        if best is None or not self.search.state.beats(bound) or best.unevenness > 1 + EQUAL:
            return False
        mine, theirs = best.configuration, configuration
        return (mine.gpus, mine.num_microbatches, mine.virtual) <= (
            theirs.gpus,
            theirs.num_microbatches,
            theirs.virtual,
        )

    def _tell(self, bound: float, waiting: list[tuple[float, int, int]], items: list[Item]) -> None:
        self.search.pulse()
        if self.search.watch is not None:
            left = {items[index].configuration for _, _, index in waiting} - self.search.state.solved
            solved = len(self.search.state.solved)
            self.search.watch(
                Progress(
                    configurations=len(self.search.configurations),
                    solved=solved,
                    pruned=len(self.search.configurations) - solved - len(left),
                    best_s=self.search.state.best_s,
                    bound_s=bound,
                )
            )

    def _look(self, item: Item) -> None:
        """Time a configuration's most promising cuts."""
        suffix = self.search.bounds.suffix(item.configuration, fused=item.fused)
        if item.configuration.virtual > 1:
            self.several.look(item)
        elif suffix is None:
            self._look_along(item)
        else:
            below = min(self.search.state.best_s, 1.5 * suffix.bound_s) * (1 + 2 * EQUAL)
            seen: set[tuple[tuple[int, ...], tuple[bool, ...]]] = set()
            for tables in self.search.bounds.roomy(suffix) if math.isfinite(below) else ():
                nodes = LOOK_NODES * (item.configuration.pipeline + 1)
                for cut in itertools.islice(tables.cuts(below, nodes), QUICK_CUTS if tables is suffix else 1):
                    cut = cut or tables.dive()
                    if cut is not None and (cut.ideals, cut.recompute) not in seen:
                        seen.add((cut.ideals, cut.recompute))
                        names = self.search.between(cut.ideals, suffix.figures.lattice)
                        self.search.time_cut(item, names, cut.recompute, suffix.bound_s, quick=True)
                    if self.search.state.best is not None and self.search.spent() > 0:
                        return

    def _look_along(self, item: Item) -> None:
        """Where a graph has too many ideals: cuts along many topological orders."""
        state, configuration = self.search.state, item.configuration
        layers = self.search.bounds.layers(configuration)
        shape = self.search.bounds.shape(configuration, fused=item.fused)
        for order in topological_orders(self.search.graph, ORDERS):
            lattice = along(order)
            suffix = SuffixBound(Figures(layers, lattice), shape)
            self.search.bounds.spent += len(suffix.step) * configuration.pipeline // 10 + 20 * len(order)
            for cut in itertools.islice(suffix.cuts(min(state.best_s, 1.2 * suffix.bound_s), MOST_NODES), 3):
                if cut is not None:
                    self.search.time_cut(
                        item, self.search.between(cut.ideals, lattice), cut.recompute, cut.bound_s, quick=True
                    )
            if self.search.spent() > 0:
                return


def _rounded(bound_s: float) -> float:
    """A bound that is at most 0.1 % lower, and the same for configurations that a solver's last digits tell apart."""
    if not 0 < bound_s < math.inf:
        return bound_s
    step = 10.0 ** (math.floor(math.log10(bound_s)) - 3)
    return math.floor(bound_s / step) * step
