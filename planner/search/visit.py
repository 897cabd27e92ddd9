"""First looks: configurations in order of their bound, the most promising cuts of each timed."""

from __future__ import annotations

import heapq
import itertools
import math
from typing import Final, NamedTuple

from planner.schedules import Placement
from planner.search.figures import Figures
from planner.search.incumbent import topological_orders
from planner.search.lattice import along
from planner.search.orders import FUSED, SPLIT
from planner.search.several import Several
from planner.search.space import Configuration
from planner.search.state import EQUAL, FAR, HOPELESS, Item, Search
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
PHASES: Final = ((False, True, 0.4), (False, False, 0.5), (True, True, 1.25), (True, False, 1.3))
"""Whether ranks have several stages, whether all GPUs are used, and how much of the effort may be spent by then."""

PROMISED: Final = 8
"""Configurations with several stages a rank that are begun before the most promising of them is timed."""
MORE_ACTIONS: Final = (600_000, 600_000)
"""Simulated actions for that, each time."""
CRAMPED: Final = {Placement.V: 0.6, Placement.LOOP: 1.0}
"""Of the time to fill the pipeline, what orders take longer for each micro-batch a rank that memory does not hold."""
CRAMPED_FUSED: Final = 0.2
"""How many times longer still they take with whole backwards."""
DEAR: Final = 5
"""How much more an item counts for its actions, over all that may be simulated."""


class _Next(NamedTuple):
    """What is to be visited: when it comes, how far it has got, its place, its bound or what it promises (seconds)."""

    turn_s: float
    level: int
    place: int
    seconds: float


class Visit:
    """Passes over all configurations, each going on where the one before it ended.

    Each number of tensor ranks has an effort of its own, as if it were asked for alone: bounds say little about which
    of them wins.
    """

    def __init__(self, search: Search) -> None:
        self.search: Final = search
        self.several: Final = Several(search)
        self.glances: Final[dict[Item, float]] = {}
        """The time of the first cut that was timed of an item with several stages a rank."""
        self.refined: Final[set[Item]] = set()
        self.looked: Final[set[Item]] = set()

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
        self.search.phase = "first looks"
        self._visit(self._items())

    def go_on(self) -> None:
        """Look at what is open once more, with what effort there is now."""
        state = self.search.state
        self.search.phase = "looking on"
        items = [item for _, item in state.open_items if item not in state.settled]
        state.complete, state.far, state.open_items = True, False, []
        state.open_cuts = [cut for cut in state.open_cuts if cut.item in state.settled]  # others are timed again
        self._visit(items)

    def _visit(self, items: list[Item]) -> None:
        state, bounds, effort = self.search.state, self.search.bounds, self.search.effort
        most = max(configuration.gpus for configuration in self.search.configurations)
        used: dict[int, int] = {}
        for (several, full, share), tensor in itertools.product(PHASES, self.search.tensors):
            places = [
                place
                for place, item in enumerate(items)
                if (item.configuration.virtual > 1) == several
                and (item.configuration.gpus == most) == full
                and item.configuration.tensor == tensor
            ]
            began = bounds.spent
            state.left = began + max(int(share * effort) - used.get(tensor, 0), int(share * effort) // 10)
            self._visit_in_turn(items, places)
            used[tensor] = used.get(tensor, 0) + bounds.spent - began
        for more, tensor in itertools.product(MORE_ACTIONS, self.search.tensors):
            if not self._is_far():
                break
            state.left = max(state.left, bounds.spent) + self.search.times * more
            shapes = [item.configuration for item in items]
            places = [place for place, one in enumerate(shapes) if one.virtual > 1 and one.tensor == tensor]
            self._visit_in_turn(items, places)
        for tensor in self.search.tensors if self._is_far() else ():
            self._look_at_promising([item for item in items if item.configuration.tensor == tensor])
        state.open_items = [(bound, item) for item, bound in {item: bound for bound, item in state.open_items}.items()]

    def _is_far(self) -> bool:
        """Whether what was timed is far from what is thinkable: memory is short."""
        state = self.search.state
        open_s = min((bound for bound, _ in state.open_items), default=math.inf)
        return state.best is not None and state.best_s > FAR * open_s

    def _look_at_promising(self, items: list[Item]) -> None:
        """Look at what promises most of all that the effort did not reach: others had lower bounds, and came first."""
        begun, state = self.several.begun, self.search.state
        worths = {
            item: self._slower(item) * min((one.worth_s for one in begun.get(item.configuration, ())), default=math.inf)
            for item in items
            if item not in self.glances and item.look_actions < self.search.effort
        }
        item = min(worths, key=worths.__getitem__, default=None)
        if item is not None and worths[item] < state.best_s:
            state.left = self.search.bounds.spent + self.search.effort
            self._look(item)

    def _visit_in_turn(self, items: list[Item], places: list[int]) -> None:
        """Visit items, one rank first: it is soon looked at, and often near the best."""
        for alone in (True, False):
            self._visit_some(items, [at for at in places if (items[at].configuration.pipeline == 1) == alone])

    def _visit_some(self, items: list[Item], places: list[int]) -> None:
        state = self.search.state

        def following(seconds: float, level: int, place: int) -> _Next:
            return _Next(seconds * self._slower(items[place]) * self._dearer(items[place]), level, place, seconds)

        bounds = [self.search.bounds.known(items[place].configuration, fused=items[place].fused) for place in places]
        waiting = [
            following(bound, int(items[place] in self.refined), place)
            for bound, place in zip(bounds, places, strict=True)
        ]
        heapq.heapify(waiting)
        promised: list[_Next] = []
        while waiting or promised:
            first = promised and (len(promised) >= PROMISED or not waiting or promised[0] < waiting[0])
            now = heapq.heappop(promised if first else waiting)
            item, level = items[now.place], now.level
            bound = self.search.bounds.known(item.configuration, fused=item.fused)
            most_s = state.best_s * (HOPELESS if level == 3 else 1 + EQUAL)
            if not math.isfinite(now.seconds) or now.seconds > most_s:
                if level == 2:  # what only looks slower than the best stays open; others their bound rules out
                    state.open_items.append((bound, item))
                continue
            self._tell(now, (waiting, promised), items)
            if self._is_no_better_tie(bound, item.configuration):
                continue
            if self.search.spent() > 0:
                left = [items[other.place] for other in (now, *waiting, *promised) if other.level < 3]
                state.open_items += [
                    (self.search.bounds.known(one.configuration, fused=one.fused), one) for one in left
                ]
                return
            if level == 0:
                exact = self.search.bounds.refine(item.configuration, fused=item.fused, best_s=state.best_s)
                self.refined.add(item)
                rounded = _rounded(exact) if item.configuration.virtual > 1 else exact
                heapq.heappush(waiting, following(rounded, 1, now.place))
            elif level == 1 and item.configuration.virtual > 1:
                heapq.heappush(promised, following(max(now.seconds, self.several.promise(item)), 2, now.place))
            elif level < 3:
                state.open_items.append((bound, item))
                if self._look(item):
                    seconds = self.glances[item] * self._dearer(item)
                    heapq.heappush(waiting, _Next(seconds, 3, now.place, seconds))
            elif item not in self.looked and self._may_look(item):
                self.several.look(item)
                self.looked.add(item)

    def _slower(self, item: Item) -> float:
        """By how many times orders of an item are slower than its bound, or what it promises, as a rule."""
        shape = item.configuration
        if shape.virtual == 1 or shape.pipeline == 1:
            return 1.0
        lacking = self.search.bounds.layers(shape).lacking(shape.pipeline, shape.num_microbatches)
        filling = shape.pipeline / shape.num_microbatches
        return 1 + lacking * (CRAMPED[shape.placement] * filling + (CRAMPED_FUSED if item.fused else 0.0))

    def _dearer(self, item: Item) -> float:
        """By how many times more an item of several stages a rank counts: of those alike what takes little is first."""
        return 1 + DEAR * item.actions / self.search.effort if item.configuration.virtual > 1 else 1.0

    def _look(self, item: Item) -> bool:
        """Look at a configuration, if that is within the effort; with several stages a rank: at one cut at first."""
        if item in self.glances:
            return True
        if item in self.looked or not self._may_look(item):
            return False
        self.search.state.solved.add(item.configuration)
        if item.configuration.virtual == 1:
            self.looked.add(item)
            self._look_at_cuts(item)
            return False
        self.glances[item] = self.several.glance(item)
        return True

    def _may_look(self, item: Item) -> bool:
        """Whether a look is within the effort; while there is no plan yet any look is, unless time is short."""
        if self.search.state.best is not None:
            return item.look_actions < -self.search.spent()
        limit = self.search.asked.max_seconds
        return limit is None or item.look_actions < ACTIONS_A_SECOND * limit

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

    def _tell(self, now: _Next, queues: tuple[list[_Next], ...], items: list[Item]) -> None:
        def left() -> int:
            waiting = itertools.chain((now,), *queues)
            return len({items[one.place].configuration for one in waiting} - self.search.state.solved)

        item = items[now.place]
        self.search.tell(left, self.search.bounds.known(item.configuration, fused=item.fused))

    def _look_at_cuts(self, item: Item) -> None:
        """Time a configuration's most promising cuts."""
        suffix = self.search.bounds.suffix(item.configuration, fused=item.fused)
        if suffix is None:
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
