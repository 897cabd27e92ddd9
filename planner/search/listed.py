"""Every cut of a chain that may be faster than a time, with a bound for each, all at once as arrays over the cuts.

Boundaries are set from the first stage on; what is begun is left as soon as one of its ranks or links is over the time,
what a rank holds at all times does not fit, or the ranks together have too little left for the layers to come. What
bounds a whole cut stands in cut_rows, and in memory_rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np

from planner.search.cut_rows import ChainSums, CutRows
from planner.search.figures import LayerFigures
from planner.search.lattice import Bools, Floats, Ints
from planner.search.memory_rows import memory_row
from planner.search.space import Configuration

MOST_STAGES: Final = 40
"""Stages of a configuration whose cuts are listed: with more of them there are too many."""
MOST_LAYERS: Final = 64
"""Layers of a chain whose cuts are listed, however many there are: most are left early."""
MOST_CUTS: Final = 150_000
"""Cuts, begun or whole, that are looked at; where there are more, there is no list."""
_AT_ONCE: Final = 20_000
"""Cuts in one array."""
_NEARER: Final = 6
"""Steps by which a time is looked for below which there are few enough cuts."""


class Near(NamedTuple):
    """Cuts in order of their bound: ``marks[i]`` the boundaries of cut i, 0 and the number of layers included."""

    marks: Ints
    bounds_s: Floats


class ChainCuts:
    """The cuts of one configuration of a chain. ``spent``: effort so far, in simulated actions."""

    def __init__(self, sums: ChainSums) -> None:
        self.sums: Final = sums
        self.num_layers: Final = len(sums.layers.graph)
        self.num_stages: Final = len(sums.rank_of)
        self.spent = 0
        self._too_many_s = math.inf

    # --- which cuts there are -----------------------------------------------------------------------------------------

    def least(self, floor_s: float, below_s: float) -> float:
        """The least bound of a cut, or what is known to be below it: at least ``floor_s``, at most ``below_s``."""
        if not math.isfinite(below_s):
            return floor_s
        low, high, at = floor_s, below_s, below_s
        for _ in range(_NEARER):
            near = self.below(at)
            if near is None:
                high = at
            elif len(near.marks):
                return max(floor_s, float(near.bounds_s[0]))
            elif at >= below_s:
                return below_s
            else:
                low = at
            at = (low + high) / 2
            if high - low <= 1e-4 * high:
                break
        return low

    def below(self, seconds: float) -> Near | None:
        """All cuts that may be faster than a time; None where too many of them are begun."""
        if seconds >= self._too_many_s:
            return None
        marks, looked_at = np.zeros((1, 1), dtype=np.int64), 0
        for stage in range(self.num_stages):
            ways = self._ways(marks, stage)
            looked_at += int(ways.sum())
            if looked_at > MOST_CUTS:
                self._too_many_s = seconds
                return None
            kept = [begun[self._may_be_faster(begun, seconds)] for begun in self._longer(marks, ways, stage)]
            marks = np.concatenate(kept) if kept else np.zeros((0, stage + 2), dtype=np.int64)
        bounds = self.bounds_s(marks)
        near = np.flatnonzero(bounds < seconds)
        near = near[np.argsort(bounds[near], kind="stable")]
        return Near(marks[near], bounds[near])

    def _ways(self, marks: Ints, stage: int) -> Ints:
        """How many ends the next stage may have after each begun cut; the last stage has one."""
        if stage == self.num_stages - 1:
            return np.ones(len(marks), dtype=np.int64)
        return np.maximum(self.num_layers - (self.num_stages - 1 - stage) - marks[:, -1], 0)

    def _longer(self, marks: Ints, ways: Ints, stage: int) -> Iterator[Ints]:
        """Begun cuts with one more stage, a few at a time."""
        first = marks[:, -1] + 1 if stage < self.num_stages - 1 else np.full(len(marks), self.num_layers)
        total, low = np.concatenate([[0], np.cumsum(ways)]), 0
        while low < len(marks):
            high = max(low + 1, int(np.searchsorted(total, total[low] + _AT_ONCE, side="right")) - 1)
            many = ways[low:high]
            begun = np.repeat(marks[low:high], many, axis=0)
            offset = np.arange(len(begun)) - np.repeat(np.cumsum(many) - many, many)
            ends = np.repeat(first[low:high], many) + offset
            self.spent += len(begun) * (stage + 1) // 5
            yield np.concatenate([begun, ends[:, None]], axis=1)
            low = high

    def _may_be_faster(self, marks: Ints, seconds: float) -> Bools:
        """Whether what is begun leaves its ranks, its links and its memory below a time."""
        sums, cut = self.sums, CutRows(self.sums, marks)
        left = sums.count * (sums.load[-1] - sums.load[marks[:, -1]])
        spare = np.zeros(len(marks))
        fine = np.ones(len(marks), dtype=np.bool_)
        for rank, stages in enumerate(sums.own):
            own = [k for k in stages if k < cut.num_stages]
            row = cut.loads(own) if own else cut.heads[-1] + cut.forward[-1]
            spare += np.maximum(seconds - row, 0.0)
            fine &= row < seconds
            if own:
                fine &= cut.reduced_at_least(rank, own) < seconds
                fine &= cut.fits(own)
        for busy in cut.busy().values():
            fine &= busy < seconds
        kept: Bools = fine & (spare >= left * (1 - 1e-9))
        return kept

    # --- what each cut is bound by ------------------------------------------------------------------------------------

    def bounds_s(self, marks: Ints) -> Floats:
        """A bound for each of some whole cuts: no order of actions is faster."""
        sums, cut = self.sums, CutRows(self.sums, marks)
        bounds: Floats = np.zeros(len(marks))
        if not len(marks):
            return bounds
        cut.follow()
        for rank, own in enumerate(sums.own):
            bounds = np.where(cut.fits(own), bounds, math.inf)
            for row in (*cut.rank_rows(own), cut.reduced(rank, own), memory_row(cut, own)):
                bounds = np.maximum(bounds, row)
        for row in cut.busy((dict(enumerate(cut.tails)), dict(enumerate(cut.tails_back)))).values():
            bounds = np.maximum(bounds, row)
        return bounds


def chain_cuts(
    layers: LayerFigures, configuration: Configuration, recompute: Sequence[bool], *, fused: bool
) -> ChainCuts | None:
    """The cuts of a configuration; None where the graph is no short chain. ``fused``: with whole backwards only."""
    stages, count = configuration.pipeline * configuration.virtual, len(layers.graph)
    few = stages <= MOST_STAGES if count <= MOST_LAYERS else math.comb(count - 1, stages - 1) <= MOST_CUTS
    if not layers.graph.is_chain or not few:
        return None
    return ChainCuts(ChainSums(layers, configuration, recompute, fused=fused))
