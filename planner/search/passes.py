"""Cuts for several stages a rank: all boundaries along one order of the layers, bettered one pass of ranks at a time.

What a rank is to do once its stage of chunk a has its first input, chunks k0 < k1 < ... on it:

    T >= F of all before ka, links included  +  M · (load of the rank - F of its first a)  +  what follows

and where memory is limited, all that its micro-batches hold over time fits into what is left of it (T · room). Greedy
orders nearly reach the largest of these rows, so that is what a cut is judged by. Stages in a row with ranks all
different (a window) can be chosen together, everything else fixed, by a recursion over their boundaries; windows slide
until nothing gets better. Short first chunks shorten the fill, so that is one of the starts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from planner.cluster import link_between, memory_limit, ring_link
from planner.schedules import ranks_of
from planner.search.figures import LayerFigures
from planner.search.lattice import Bools, Floats, Ints
from planner.search.space import Configuration

_POWER: Final = 60
"""Rows count by this power: nearly the largest alone, and yet every rank's."""
_REACH: Final = 6
"""How many layers a boundary moves at once."""
_SWEEPS: Final = 8


class Passes:
    """One configuration's cuts along one topological order of the layers."""

    def __init__(self, layers: LayerFigures, configuration: Configuration, order: Sequence[int]) -> None:
        self.layers: Final = layers
        self.configuration: Final = configuration
        self.order: Final = list(order)
        ranks, virtual = configuration.pipeline, configuration.virtual
        self.rank_of: Final = ranks_of(ranks, virtual, configuration.placement)
        self.num_stages: Final = ranks * virtual
        self.stages_of: Final[Ints] = np.array(
            [[k for k, r in enumerate(self.rank_of) if r == q] for q in range(ranks)]
        )
        place = np.array(self.order)
        self.forward: Final = _prefix(layers.forward_s[place])
        self.inputs: Final = _prefix(layers.input_s[place])
        self.load: Final = _prefix(layers.load_s[place])
        costs = [layers.costs[layer] for layer in self.order]
        self.saved: Final = _prefix(np.array([float(cost.saved_bytes) for cost in costs]))
        self.trainable: Final = _prefix(np.array([float(cost.trainable_bytes) for cost in costs]))
        factor = layers.fixed_factor()
        self.fixed: Final = _prefix(
            np.array([cost.parameter_bytes + factor * cost.trainable_bytes + cost.buffer_bytes for cost in costs])
        )
        self.workspace: Final = max(float(cost.workspace_bytes) for cost in costs)
        self.extra_s: Floats = np.zeros(ranks)
        """What each rank was seen to wait beyond its rows: added to them."""
        self._crossings()
        self._cluster()

    def _crossings(self) -> None:
        """Bytes of all tensors that are alive at each boundary."""
        where = {layer: place for place, layer in enumerate(self.order)}
        change = np.zeros(len(self.order) + 2)
        for made in self.layers.graph.tensors:
            last = max(where[reader.layer] for reader in made.readers)
            change[where[made.source] + 1] += made.bytes(self.layers.microbatch_size, self.layers.tensor)
            change[last + 1] -= made.bytes(self.layers.microbatch_size, self.layers.tensor)
        self.crossing: Floats = np.cumsum(change)[: len(self.order) + 1]

    def _cluster(self) -> None:
        shape, cluster, profile = self.configuration, self.layers.cluster, self.layers.graph.profile
        assert cluster is not None
        self.limit = memory_limit(cluster)
        self.link_s: Floats = np.zeros(len(self.order) + 1)
        if shape.pipeline > 1:
            link = link_between(0, 1, data=shape.data, tensor=shape.tensor, cluster=cluster)
            if link is not None:
                self.link_s = np.where(
                    self.crossing > 0, link.latency_s + self.crossing / link.bandwidth_bytes_per_s, 0.0
                )
        per_byte = 0.0
        ring = ring_link(0, data=shape.data, tensor=shape.tensor, cluster=cluster)
        if shape.data > 1 and ring is not None:
            per_byte = 2 * (shape.data - 1) / shape.data / ring.bandwidth_bytes_per_s
        self.reduce_s: Floats = self.trainable * per_byte * profile.gradient_bytes_per_trainable_byte
        self.step_s: Floats = self.trainable * profile.optimizer.step_s_per_trainable_byte

    # --- what a cut is worth ------------------------------------------------------------------------------------------

    def rows(self, marks: Ints, again: Bools) -> Floats:
        """The largest row of every rank (seconds)."""
        count, stages = self.configuration.num_microbatches, self.stages_of
        forward = np.diff(self.forward[marks])
        load = np.diff(self.load[marks]) + np.where(again, forward, 0.0)
        heads = self.heads(marks)
        mine = load[stages].sum(axis=1)
        done = np.concatenate([np.zeros((len(stages), 1)), np.cumsum(forward[stages], axis=1)[:, :-1]], axis=1)
        rows: Floats = (heads[stages] + count * (mine[:, None] - done)).max(axis=1)
        rows = rows + self.after(marks)
        if self.limit is not None:
            rows = np.maximum(rows, self._held(marks, again, forward))
        return rows

    def after(self, marks: Ints) -> Floats:
        """What follows each rank's last action: the all-reduce of its lowest stage, its step (seconds)."""
        steps = np.diff(self.step_s[marks])[self.stages_of].sum(axis=1)
        reduces = np.diff(self.reduce_s[marks])
        made: Floats = self.extra_s + steps + reduces[self.stages_of[:, 0]]
        if len(steps) == 1:  # one rank: its stages end from the last to the first, each summed beside what remains
            count = self.configuration.num_microbatches
            backward = count * np.diff(self.load[marks] - self.forward[marks])
            left = np.concatenate([[0.0], np.cumsum(backward)[:-1]])
            made = self.extra_s + steps + (np.cumsum(reduces) - left).max()
        return made

    def heads(self, marks: Ints) -> Floats:
        """When each stage may have its first input (seconds)."""
        between = np.where(np.diff(self.rank_of) != 0, self.link_s[marks[1:-1]], 0.0)
        heads: Floats = self.forward[marks[:-1]] + np.concatenate([[0.0], np.cumsum(between)])
        return heads

    def _held(self, marks: Ints, again: Bools, forward: Floats) -> Floats:
        """Per rank, the seconds that its micro-batches need to pass through the memory that is left."""
        limit = float(self.limit or 0)
        stages, count = self.stages_of, self.configuration.num_microbatches
        passes = forward + np.diff(self.inputs[marks]) + np.where(again, forward, 0.0)
        behind = np.cumsum(passes[::-1])[::-1]
        saved = np.diff(self.saved[marks])
        kept = np.where(again, self.crossing[marks[:-1]], saved)
        room = limit - np.diff(self.fixed[marks])[stages].sum(axis=1) - self.workspace
        burst = np.where(again, saved, 0.0)[stages].max(axis=1)
        area = count * (kept * behind)[stages].sum(axis=1)
        with np.errstate(divide="ignore", invalid="ignore"):
            held: Floats = np.where(room - burst > 0, area / np.maximum(room - burst, 1.0), np.inf)
        return held

    def worth(self, marks: Ints, again: Bools) -> float:
        """The largest row of all (seconds)."""
        return float(self.rows(marks, again).max())

    # --- starts -------------------------------------------------------------------------------------------------------

    def start(self, first_pass: float, again: Bools) -> Ints:
        """Even stages, those of the first pass ``first_pass`` times as long as the others."""
        targets = np.ones(self.num_stages)
        targets[: self.configuration.pipeline] = first_pass
        targets /= np.where(again, 1.0 + self.forward[-1] / max(self.load[-1], 1e-300), 1.0)
        return self.at(targets)

    def at(self, targets: Floats) -> Ints:
        """Boundaries nearest to these shares of the load, no stage empty."""
        count, stages = len(self.order), self.num_stages
        goals = np.cumsum(targets)[:-1] / targets.sum() * self.load[-1]
        marks = [0]
        for k, goal in enumerate(goals, start=1):
            near = int(np.searchsorted(self.load, goal))
            if near > 0 and goal - self.load[near - 1] < self.load[min(near, count)] - goal:
                near -= 1
            marks.append(min(max(near, marks[-1] + 1), count - (stages - k)))
        return np.array([*marks, count])

    # --- better, window by window -------------------------------------------------------------------------------------

    def better(self, marks: Ints, again: Bools) -> Ints:
        """The cut after windows have slid over it until none gets better."""
        best = self.worth(marks, again)
        if self.configuration.pipeline == 1:
            return self._one_by_one(marks, again)
        for _ in range(_SWEEPS):
            before = best
            for first, last in self._windows():
                made = self._window(marks, again, first, last)
                worth = self.worth(made, again)
                if worth < best * (1 + 1e-12):
                    marks, best = made, worth
            if best >= before * (1 - 1e-6):
                break
        return marks

    def _one_by_one(self, marks: Ints, again: Bools) -> Ints:
        """One rank: each boundary on its own, by steps that halve."""
        best, reach = self.worth(marks, again), len(self.order) // 2
        while reach:
            moved = False
            for k in range(1, self.num_stages):
                for step in (-reach, reach):
                    made = marks.copy()
                    made[k] += step
                    if made[k - 1] < made[k] < made[k + 1]:
                        worth = self.worth(made, again)
                        if worth < best * (1 - 1e-12):
                            marks, best, moved = made, worth, True
            reach = reach if moved else reach // 2
        return marks

    def _windows(self) -> Iterator[tuple[int, int]]:
        """First and last stage of runs whose ranks are all different, each half over the one before."""
        ranks, step = self.configuration.pipeline, max(1, self.configuration.pipeline // 2)
        for first in range(0, self.num_stages - 1, step):
            last, seen = first, set[int]()
            while last < self.num_stages and self.rank_of[last] not in seen and last - first < ranks:
                seen.add(self.rank_of[last])
                last += 1
            if last - first > 1:
                yield first, last - 1

    def _window(self, marks: Ints, again: Bools, first: int, last: int) -> Ints:
        """The best boundaries inside a window: the least sum of powers of its ranks' rows."""
        now = _Now(self, marks, again)
        low, high = int(marks[first]), int(marks[last + 1])
        spots = [
            np.arange(max(low + k - first, marks[k] - _REACH), min(high - (last + 1 - k), marks[k] + _REACH) + 1)
            if first < k <= last
            else marks[k : k + 1]
            for k in range(first, last + 2)
        ]
        total: Floats = np.zeros(1)
        came: list[Ints] = []
        for stage, before, after in zip(range(first, last + 1), spots, spots[1:], strict=False):
            rows = np.minimum(now.rows(stage, before, after) / now.scale_s, 1e4)
            there = after[None, :] > before[:, None]
            cost = total[:, None] + np.where(there, np.maximum(rows, 0.0) ** _POWER, np.inf)
            choice = np.argmin(cost, axis=0)
            came.append(choice)
            total = cost[choice, np.arange(len(after))]
        if not np.isfinite(total[0]):
            return marks
        made, place = marks.copy(), 0
        for stage in range(last, first, -1):
            place = int(came[stage - first][place])
            made[stage] = spots[stage - first][place]
        return made


class _Now:
    """A cut, ready to say what its rows would be if one stage had other boundaries."""

    def __init__(self, passes: Passes, marks: Ints, again: Bools) -> None:
        self.passes: Final = passes
        self.again: Final = again
        self.forward: Final = np.diff(passes.forward[marks])
        self.load: Final = np.diff(passes.load[marks]) + np.where(again, self.forward, 0.0)
        self.heads: Final = passes.heads(marks)
        self.links: Final = self.heads - passes.forward[marks[:-1]]
        self.after: Final = passes.after(marks)
        worth = passes.worth(marks, again)
        self.scale_s: Final = (
            worth if 0 < worth < np.inf else passes.configuration.num_microbatches * passes.load[-1] + 1e-300
        )

    def rows(self, stage: int, before: Ints, after: Ints) -> Floats:
        """The largest row of the stage's rank, for every pair of a boundary before and one after it."""
        passes, count = self.passes, self.passes.configuration.num_microbatches
        rank = passes.rank_of[stage]
        mine = passes.stages_of[rank]
        own = int(np.flatnonzero(mine == stage)[0])
        passed = passes.forward[after][None, :] - passes.forward[before][:, None]
        works = passes.load[after][None, :] - passes.load[before][:, None] + (passed if self.again[stage] else 0.0)
        works = works + float(self.load[mine].sum() - self.load[stage])
        done = np.concatenate([[0.0], np.cumsum(self.forward[mine])[:-1]])
        rows = np.full(works.shape, -np.inf)
        for place, k in enumerate(mine):
            if place < own:
                row = self.heads[k] + count * (works - done[place])
            elif place == own:
                row = (passes.forward[before] + self.links[stage])[:, None] + count * (works - done[place])
            else:
                row = self.heads[k] + count * (works - (done[place] - self.forward[stage]) - passed)
            rows = np.maximum(rows, row)
        made: Floats = rows + self.after[rank]
        return made


def _prefix(values: Floats) -> Floats:
    return np.concatenate([[0.0], np.cumsum(values)])
