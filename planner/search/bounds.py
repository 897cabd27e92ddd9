"""Bounds of configurations, from cheap to exact, each made once and kept.

cheap     from totals alone                                   thousands of configurations in a moment
exact     the suffix recursion over every cut (v = 1), or the LP where there are too many ideals or v > 1
proven    the ILP's own bound on top
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from planner.cluster import memory_limit
from planner.graph import LayerGraph
from planner.search.cheap import Totals, cheap_bound
from planner.search.chunks import stages_bound
from planner.search.clock import never
from planner.search.figures import Figures, LayerFigures
from planner.search.ilp import Solved
from planner.search.lattice import Lattice, lattice_of
from planner.search.listed import MOST_LAYERS, ChainCuts, chain_cuts
from planner.search.proof import prove
from planner.search.space import Asked, Configuration
from planner.search.suffix import Shape, SuffixBound

PROOF_NODES: Final = 2_000
"""Nodes of one ILP's branch and bound."""
MOST_RELAXED: Final = 2_000
"""Variables of an LP over layers; a configuration with more keeps its cheap bound."""
ROOMS: Final = ((0, 0), (2, None), (0, 1), (1, None))
"""Where memory is limited, cuts are looked for that leave orders room: ``spare`` and ``deep`` of their recursion."""
MOST_REFINED: Final = 16
"""Configurations that keep no cheap bound once the effort is spent."""
MOST_LISTS: Final = 64
"""Configurations whose cuts are listed for their bound once the effort is spent."""
KEPT: Final = 6
"""Tables of the recursion that are kept at once: they are large."""
MOST_CHOICES: Final = 20_000
"""Binaries of an ILP; a configuration with more keeps the bound of its recursion or LP."""


class Bounds:
    """What is known of how fast configurations can be; ``fused``: with whole backwards, else under any order at all."""

    def __init__(self, graph: LayerGraph, asked: Asked) -> None:
        self.graph: Final = graph
        self.asked: Final = asked
        self.lattice: Final[Lattice | None] = lattice_of(graph)
        self.spent = 0
        """Effort so far, in simulated actions (about a microsecond each)."""
        self._layers: dict[tuple[int, int], LayerFigures] = {}
        self._totals: dict[tuple[int, int], Totals] = {}
        self._figures: dict[tuple[int, int], Figures] = {}
        self._known: dict[tuple[Configuration, bool], float] = {}
        self._suffixes: dict[tuple[Configuration, bool], SuffixBound] = {}
        self._cuts: dict[Configuration, ChainCuts | None] = {}

    def layers(self, configuration: Configuration) -> LayerFigures:
        """The layers at a configuration's micro-batch size and tensor size."""
        key = (configuration.microbatch_size, configuration.tensor)
        if key not in self._layers:
            self._layers[key] = LayerFigures(
                self.graph, microbatch_size=key[0], tensor=key[1], cluster=self.asked.cluster
            )
        return self._layers[key]

    def suffix(self, configuration: Configuration, *, fused: bool) -> SuffixBound | None:
        """The recursion's tables; None where the graph has too many ideals, or ranks have several stages."""
        if self.lattice is None or configuration.virtual > 1:
            return None
        key = (configuration, fused)
        if key not in self._suffixes:
            sizes = (configuration.microbatch_size, configuration.tensor)
            if sizes not in self._figures:
                self._figures[sizes] = Figures(self.layers(configuration), self.lattice)
            if len(self._suffixes) >= KEPT:
                del self._suffixes[next(iter(self._suffixes))]
            self._suffixes[key] = SuffixBound(self._figures[sizes], self.shape(configuration, fused=fused))
            self.spent += len(self._suffixes[key].step) * configuration.pipeline // 10
        return self._suffixes[key]

    def roomy(self, suffix: SuffixBound) -> Iterator[SuffixBound]:
        """The recursion, and where memory is limited those that leave some of it, for cuts that orders do well with."""
        if memory_limit(self.asked.cluster) is not None and bool((suffix.depth < suffix.shape.num_microbatches).any()):
            for spare, deep in ROOMS:
                self.spent += len(suffix.step) * suffix.shape.num_ranks // 10
                yield SuffixBound(suffix.figures, dataclasses.replace(suffix.shape, spare=spare, deep=deep))
        yield suffix

    def shape(self, configuration: Configuration, *, fused: bool) -> Shape:
        """A configuration as the recursion and the ILP take it."""
        choices = {"none": (False,), "all": (True,), "auto": (False, True)}[self.asked.recompute]
        if memory_limit(self.asked.cluster) is None and choices == (False, True):
            choices = (False,)
        return Shape(
            num_ranks=configuration.pipeline,
            num_microbatches=configuration.num_microbatches,
            data=configuration.data,
            fused=fused,
            recompute=choices,
            cluster=self.asked.cluster,
        )

    def _totals_of(self, configuration: Configuration) -> Totals:
        key = (configuration.microbatch_size, configuration.tensor)
        if key not in self._totals:
            self._totals[key] = Totals(self.layers(configuration), self.asked.cluster, self.asked.recompute)
        return self._totals[key]

    def known(self, configuration: Configuration, *, fused: bool) -> float:
        """The best bound known; at first the cheap one."""
        key = (configuration, fused)
        if key not in self._known:
            self._known[key] = cheap_bound(self._totals_of(configuration), configuration, fused=fused)
        return self._known[key]

    def refine(self, configuration: Configuration, *, fused: bool, best_s: float) -> float:
        """The exact bound, over every cut (LP: near it, and no more than ``best_s``, a time that is reached)."""
        totals = self._totals_of(configuration)
        stages = configuration.pipeline * configuration.virtual
        suffix = self.suffix(configuration, fused=fused)
        if suffix is not None:
            exact = suffix.bound_s
        elif configuration.virtual > 1 and totals.chain and totals.returns:
            exact = stages_bound(totals, configuration, fused=fused)
            self.spent += 300 * stages
        elif len(self.graph) * stages <= MOST_RELAXED:
            exact = self.solved(configuration, fused=fused, below_s=best_s, relaxed=True).bound
        else:
            exact = 0.0
        self._known[configuration, fused] = max(self.known(configuration, fused=fused), exact)
        return self._known[configuration, fused]

    def lists_cuts(self) -> bool:
        """Whether the graph is a chain short enough that its cuts can be gone through."""
        return self.graph.is_chain and len(self.graph) <= MOST_LAYERS

    def cuts(self, configuration: Configuration) -> ChainCuts | None:
        """The cuts of a configuration of a short chain, each with its bound; None elsewhere."""
        if configuration not in self._cuts:
            recompute = self.shape(configuration, fused=False).recompute
            self._cuts[configuration] = chain_cuts(self.layers(configuration), configuration, recompute, fused=False)
        return self._cuts[configuration]

    def _least_of_cuts(self, configuration: Configuration, bound: float, best_s: float) -> float:
        """The least bound of a single cut, as far as cuts can be gone through: ``bound`` or more."""
        cuts = self.cuts(configuration)
        if cuts is None:
            return bound
        before = cuts.spent
        least = cuts.least(bound, best_s)
        self.spent += cuts.spent - before
        self._known[configuration, False] = max(self.known(configuration, fused=False), least)
        return least

    def solved(
        self,
        configuration: Configuration,
        *,
        fused: bool,
        below_s: float,
        relaxed: bool = False,
        most_nodes: int = PROOF_NODES,
        windows: Sequence[tuple[int, int]] | None = None,
        without: Sequence[Sequence[int]] = (),
    ) -> Solved:
        """The ILP (or LP) of a configuration."""
        return prove(
            self.layers(configuration),
            self.shape(configuration, fused=fused),
            virtual=configuration.virtual,
            placement=configuration.placement,
            windows=windows,
            below_s=below_s,
            most_nodes=most_nodes,
            relaxed=relaxed,
            without=without,
        )

    def proven(self, configuration: Configuration, *, fused: bool, best_s: float) -> float:
        """What the ILP proves of a configuration.

        Where the recursion knows the bound, the ILP is asked about the cuts within a hair of it, narrowed to the
        windows that those leave; elsewhere about all cuts below the best time.
        """
        suffix = self.suffix(configuration, fused=fused)
        below, windows = best_s, None
        if suffix is not None:
            below = min(below, suffix.bound_s * (1 + 1e-5))
            windows = suffix.windows(below)
            if windows is None:
                return below
        stages = configuration.pipeline * configuration.virtual
        choices = sum(last - first for first, last in windows or ())
        if choices > MOST_CHOICES or len(self.graph) * stages > 4 * MOST_CHOICES:
            return 0.0
        if configuration.virtual > 1:
            return 0.0  # its LP is near, and the ILP takes long
        solved = self.solved(configuration, fused=fused, below_s=below, windows=windows)
        return min(solved.bound, below)

    def _confirmed(self, configuration: Configuration, bound: float, best_s: float) -> float:
        """The bound, raised by the ILP's where there is no recursion (with one it can only confirm it), and by cuts."""
        solved = self.proven(configuration, fused=False, best_s=best_s)
        raised = bound if self.suffix(configuration, fused=False) is not None else max(bound, solved)
        return self._least_of_cuts(configuration, raised, best_s)

    def least(
        self,
        configurations: Sequence[Configuration],
        best_s: float,
        ended: Callable[[], bool] = never,
        is_over: Callable[[], bool] = never,
    ) -> float:
        """The least bound over all configurations, valid for every order of actions.

        The one that is least under the recursion is put to the ILP too. ``ended``: no effort is left but for the bounds
        of a few configurations and for lists of cuts; ``is_over``: no time either.
        """
        heap = [(self.known(c, fused=False), 0, index) for index, c in enumerate(configurations)]
        heapq.heapify(heap)
        lists, refined = MOST_LISTS, 0
        while heap:
            bound, level, index = heapq.heappop(heap)
            configuration = configurations[index]
            if level == 2 or bound >= best_s or is_over():
                return bound
            over = ended()
            refined += over and level == 0
            if over and (level > 0 or refined > MOST_REFINED):
                lists -= 1
                better = self._least_of_cuts(configuration, bound, best_s) if lists >= 0 else bound
                if better <= bound:
                    return bound
                level = 1
            elif level == 0:
                better = self.refine(configuration, fused=False, best_s=best_s)
            else:
                better = self._confirmed(configuration, bound, best_s)
            heapq.heappush(heap, (better, level + 1, index))
        return math.inf
