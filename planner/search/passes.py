"""Cuts for several stages a rank: all boundaries along one order of the layers, bettered one pass of ranks at a time.

What a rank is to do once its stage of chunk a has its first input, chunks k0 < k1 < ... on it:

    T >= F of all before ka, links included  +  M · (load of the rank - F of its first a)  +  what follows

and where memory is limited, all that its micro-batches hold over time fits into what is left of it (T · room), each
of them held somewhat longer than its round trip, the stretch. Greedy orders nearly reach the largest of these rows, so
that is what a cut is judged by. Stages in a row with ranks all
different (a window) can be chosen together, everything else fixed, by a recursion over their boundaries; windows slide
until nothing gets better. Short first chunks shorten the fill, so that is one of the starts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from planner.cluster import link_between, memory_limit, ring_link
from planner.schedules import Placement, ranks_of
from planner.search.figures import LayerFigures
from planner.search.lattice import Bools, Floats, Ints
from planner.search.space import Configuration
from planner.search.waves import Waves, waves

_Scalar = TypeVar("_Scalar", bound=np.generic)

_POWER: Final = 60
"""Rows count by this power: nearly the largest alone, and yet every rank's."""
_STEPS: Final = np.arange(-6, 7)
"""By how many layers a boundary moves at once."""
_SWEEPS: Final = 8
_STRETCH: Final = {Placement.LOOP: 1.8, Placement.V: 1.2}
"""How much longer than its round trip a micro-batch is held, about, where memory is just enough."""
_OVER: Final = 10.0
"""By how much a rank counts for each share of its least need that it does not hold."""


class Passes:
    """One configuration's cuts along one topological order of the layers."""

    def __init__(self, layers: LayerFigures, configuration: Configuration, order: Sequence[int]) -> None:
        self.layers: Final = layers
        self.configuration: Final = configuration
        self.order: Final = list(order)
        self.stretch: float = _STRETCH[configuration.placement]
        ranks, virtual = configuration.pipeline, configuration.virtual
        self.rank_of: Final = ranks_of(ranks, virtual, configuration.placement)
        self.num_stages: Final = ranks * virtual
        self.stages_of: Final[Ints] = np.array(
            [[k for k, r in enumerate(self.rank_of) if r == q] for q in range(ranks)]
        )
        self.sends: Final[Bools] = np.diff(self.rank_of) != 0
        """Whether each boundary lies between two ranks."""
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
        self.extra_bytes: Floats = np.zeros(ranks)
        """What each rank was seen to hold beyond its memory: taken from it."""
        self._crossings()
        self._cluster()
        self.in_waves: Final = (
            configuration.placement is Placement.LOOP
            and ranks > 1
            and virtual > 1
            and not layers.lacking(ranks, configuration.num_microbatches)
        )
        """Whether ranks wait in the fill as planner.search.waves says."""

    def _crossings(self) -> None:
        """Bytes of all tensors that are alive at each boundary, and of those that a backward behind it needs."""
        where = {layer: place for place, layer in enumerate(self.order)}
        change, again = np.zeros(len(self.order) + 2), np.zeros(len(self.order) + 2)
        for made in self.layers.graph.tensors:
            size, first = made.bytes(self.layers.microbatch_size, self.layers.tensor), where[made.source] + 1
            change[first] += size
            change[max(where[reader.layer] for reader in made.readers) + 1] -= size
            needed = [where[reader.layer] for reader in made.readers if reader.saved]
            if needed:
                again[first] += size
                again[max(needed) + 1] -= size
        self.crossing: Floats = np.cumsum(change)[: len(self.order) + 1]
        self.saved_again: Floats = np.cumsum(again)[: len(self.order) + 1]

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
        forward = _spans(self.forward, marks)
        load = _spans(self.load, marks) + np.where(again, forward, 0.0)
        mine = load[stages].sum(axis=1)
        done = np.concatenate([np.zeros((len(stages), 1)), np.cumsum(forward[stages], axis=1)[:, :-1]], axis=1)
        starts = self.heads(marks)[stages]
        if self.in_waves:
            starts[:, 0] = self.filling(marks).waited[0, -1]
        rows: Floats = (starts + count * (mine[:, None] - done)).max(axis=1)
        rows = rows + self.after(marks)
        if self.limit is not None:
            rows = np.maximum(rows, self._held(marks, again, forward))
        return rows

    def after(self, marks: Ints) -> Floats:
        """What follows each rank's last action: the all-reduce of its lowest stage, its step (seconds)."""
        steps = _spans(self.step_s, marks)[self.stages_of].sum(axis=1)
        reduces = _spans(self.reduce_s, marks)
        made: Floats = self.extra_s + steps + reduces[self.stages_of[:, 0]]
        if len(steps) == 1:  # one rank: its stages end from the last to the first, each summed beside what remains
            count = self.configuration.num_microbatches
            backward = count * (_spans(self.load, marks) - _spans(self.forward, marks))
            left = np.concatenate([[0.0], np.cumsum(backward)[:-1]])
            made = self.extra_s + steps + (np.cumsum(reduces) - left).max()
        return made

    def heads(self, marks: Ints) -> Floats:
        """When each stage may have its first input (seconds)."""
        between = np.where(self.sends, self.link_s[marks[1:-1]], 0.0)
        heads: Floats = self.forward[marks[:-1]] + np.concatenate([[0.0], np.cumsum(between)])
        return heads

    def filling(self, marks: Ints) -> Waves:
        """What ranks wait while the pipeline fills, of one cut or (a row each) of some."""
        shape, cuts = self.configuration, np.atleast_2d(marks)
        sends = np.zeros((len(cuts), self.num_stages))
        sends[:, :-1] = np.where(self.sends, self.link_s[cuts[:, 1:-1]], 0.0)
        each = (-1, shape.virtual, shape.pipeline)
        count = min(shape.pipeline, shape.num_microbatches)
        return waves(np.diff(self.forward[cuts], axis=1).reshape(each), sends.reshape(each), count)

    def _held(self, marks: Ints, again: Bools, forward: Floats) -> Floats:
        """Per rank, the seconds that its micro-batches need to pass through the memory that is left."""
        stages = self.stages_of
        return self.memory_row(
            room=self.room(marks)[stages].sum(axis=1),
            burst=np.where(again, _spans(self.saved, marks), 0.0)[stages].max(axis=1),
            kept=self.kept(marks, again)[stages].sum(axis=1),
            area=(self.kept(marks, again) * self.behind(marks, again, forward))[stages].sum(axis=1),
        )

    def kept(self, marks: Ints, again: Bools) -> Floats:
        """What each stage keeps of a micro-batch from F to B."""
        made: Floats = np.where(
            again, self.crossing[marks[:-1]], _spans(self.saved, marks) + self.saved_again[marks[:-1]]
        )
        return made

    def behind(self, marks: Ints, again: Bools, forward: Floats) -> Floats:
        """Seconds from each stage's F to the end of its B (or I), of a lone micro-batch over free links."""
        passes = forward + _spans(self.inputs, marks) + np.where(again, forward, 0.0)
        made: Floats = np.cumsum(passes[::-1])[::-1]
        return made

    def room(self, marks: Ints) -> Floats:
        """What each stage takes of its rank's memory whatever is in flight, negative: layers, waiting messages."""
        made: Floats = -_spans(self.fixed, marks)
        made[self.stages_of[:, 0]] -= self.extra_bytes
        if self.configuration.pipeline > 1:
            made = made - 2 * (self.crossing[marks[:-1]] + self.crossing[marks[1:]])
        return made

    def memory_row(self, *, room: Floats, burst: Floats, kept: Floats, area: Floats) -> Floats:
        """Seconds for M micro-batches of so many byte-seconds to pass; growing on where not even one of them fits."""
        left = float(self.limit or 0) - self.workspace + room - burst
        least = np.maximum(kept, 1.0)
        short = np.maximum(least - left, 0.0) / least
        made: Floats = self.stretch * self.configuration.num_microbatches * area / np.maximum(left, least)
        return made * (1 + _OVER * short)

    def fits(self, marks: Ints, again: Bools) -> bool:
        """Whether each rank's memory holds a micro-batch of each of its stages, messages left aside."""
        if self.limit is None:
            return True
        stages = self.stages_of
        burst = np.where(again, _spans(self.saved, marks), 0.0)[stages].max(axis=1)
        always = _spans(self.fixed, marks)[stages].sum(axis=1) + self.workspace
        return bool((always + np.maximum(burst, self.kept(marks, again)[stages].sum(axis=1)) <= self.limit).all())

    def worth(self, marks: Ints, again: Bools) -> float:
        """About what orders of the cut come to: its largest row (seconds); infinite where it cannot fit."""
        return self._largest(marks, again) if self.fits(marks, again) else np.inf

    def _largest(self, marks: Ints, again: Bools) -> float:
        """The largest row of all, of cuts that do not fit too."""
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
        best = self._largest(marks, again)
        if self.configuration.pipeline == 1:
            return self._one_by_one(marks, again)
        windows, same, now = list(self._windows()), 0, _Now(self, marks, again)
        for _ in range(_SWEEPS):
            before = best
            for first, last in windows:
                if same == len(windows):  # all were tried on these very boundaries
                    return marks
                made = self._window(now, first, last)
                same += 1
                if np.array_equal(made, marks):
                    continue
                worth = self._largest(made, again)
                if worth < best * (1 + 1e-12):
                    marks, best, same, now = made, worth, 0, _Now(self, made, again)
            if best >= before * (1 - 1e-6):
                break
        return marks

    def _one_by_one(self, marks: Ints, again: Bools) -> Ints:
        """One rank: each boundary on its own, by steps that halve."""
        best, reach = self._largest(marks, again), len(self.order) // 2
        while reach:
            moved = False
            for k in range(1, self.num_stages):
                for step in (-reach, reach):
                    made = marks.copy()
                    made[k] += step
                    if made[k - 1] < made[k] < made[k + 1]:
                        worth = self._largest(made, again)
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

    def _window(self, now: _Now, first: int, last: int) -> Ints:
        """The best boundaries inside a window of a cut: the least sum of powers of its ranks' rows."""
        marks = now.marks
        inner = np.arange(last + 2 - first)[:, None]
        spots = marks[first : last + 2, None] + _STEPS
        allowed = (spots >= marks[first] + inner) & (spots <= marks[last + 1] - inner[::-1])
        allowed[[0, -1]] = _STEPS == 0
        spots = np.clip(spots, 0, len(self.order))
        rows = np.minimum(now.rows(np.arange(first, last + 1), spots[:-1], spots[1:]) / now.scale_s, 1e4)
        there = allowed[1:, None, :] & (spots[1:, None, :] > spots[:-1, :, None])
        costs = np.where(there, np.maximum(rows, 0.0) ** _POWER, np.inf)
        total: Floats = np.where(allowed[0], 0.0, np.inf)
        came: list[Ints] = []
        for each in costs:
            cost = total[:, None] + each
            came.append(np.argmin(cost, axis=0))
            total = cost[came[-1], np.arange(len(total))]
        place = int(np.argmin(total))
        if not np.isfinite(total[place]):
            return marks
        made = marks.copy()
        for stage in range(last, first, -1):
            place = int(came[stage - first][place])
            made[stage] = spots[stage - first, place]
        return made


class _Now:
    """A cut, ready to say what its rows would be if one stage had other boundaries."""

    def __init__(self, passes: Passes, marks: Ints, again: Bools) -> None:
        self.passes: Final = passes
        self.marks: Final = marks
        self.again: Final = again
        self.forward: Final = _spans(passes.forward, marks)
        self.load: Final = _spans(passes.load, marks) + np.where(again, self.forward, 0.0)
        self.heads: Final = passes.heads(marks)
        self.links: Final = self.heads - passes.forward[marks[:-1]]
        self.after: Final = passes.after(marks)
        worth = passes.rows(marks, again).max()
        self.scale_s: Final[float] = worth if worth > 0 else 1.0
        self.kept: Final = passes.kept(marks, again)
        self.behind: Final = passes.behind(marks, again, self.forward)
        self.room: Final = passes.room(marks)
        self.saved: Final = np.where(again, _spans(passes.saved, marks), 0.0)
        self.works: Final = self.load[passes.stages_of].sum(axis=1)
        each = self.forward[passes.stages_of]
        self.done: Final = np.cumsum(each, axis=1) - each
        """F's of the rank's stages before each, (rank, stage)."""
        self.filling: Final = passes.filling(marks) if passes.in_waves else None

    def rows(self, stages: Ints, before: Ints, after: Ints) -> Floats:
        """The largest row of each stage's rank, for every pair of a boundary before and one after the stage.

        ``before`` and ``after`` have a row of boundaries for each stage; what comes back has their pairs, [b, a].
        """
        passes, count = self.passes, self.passes.configuration.num_microbatches
        ranks = np.array(passes.rank_of)[stages]
        mine = passes.stages_of[ranks]
        earlier, later = mine < stages[:, None], mine > stages[:, None]  # chunks of a rank are in the order of stages
        own = earlier.sum(axis=1)
        passed = passes.forward[after][:, None, :] - passes.forward[before][:, :, None]
        works = passes.load[after][:, None, :] - passes.load[before][:, :, None]
        works = works + np.where(self.again[stages, None, None], passed, 0.0)
        works = count * (works + _each(self.works[ranks] - self.load[stages]))
        begun = self.heads[mine] - count * self.done[ranks]
        starts = passes.forward[before] + (self.links[stages] - count * self.done[ranks, own])[:, None]
        rows = works + starts[:, :, None]
        if self.filling is not None:
            filled = works + self._waited(self.filling, stages, before, passed)
            rows = np.where(_each(own == 0), filled, np.maximum(rows, filled))
            earlier[:, 0] = False
        rows = np.maximum(rows, works + _each(np.where(earlier, begun, -np.inf).max(axis=1)))
        behind = np.where(later, begun, -np.inf).max(axis=1) + count * self.forward[stages]
        rows = np.maximum(rows, works - count * passed + _each(behind))
        made: Floats = rows + _each(self.after[ranks])
        return made if passes.limit is None else np.maximum(made, self._held(stages, before, after, passed))

    def _waited(self, filling: Waves, stages: Ints, before: Ints, passed: Floats) -> Floats:
        """What each stage's rank waits in the fill, for every pair; other ranks are taken to wait as they do."""
        ranks = self.passes.configuration.pipeline
        own, rank = np.divmod(stages, ranks)
        count = min(ranks, self.passes.configuration.num_microbatches)
        longer = count * (passed - _each(self.forward[stages]))
        later = (self.passes.forward[before] + (self.links[stages] - self.heads[stages])[:, None])[:, :, None]
        waited: Floats = np.full(passed.shape, -np.inf)
        for chunk in range(self.passes.configuration.virtual):
            moved = np.where(_each(own == chunk), later, 0.0) - np.where(_each(own < chunk), longer, 0.0)
            level = filling.level[0, chunk, rank] + (filling.before[0, chunk, rank] if chunk else 0.0)
            waited = np.maximum(waited, _each(level) + moved)
        return waited

    def _held(self, stages: Ints, before: Ints, after: Ints, passed: Floats) -> Floats:
        """Each rank's row of memory, for every pair; stages behind its own are taken to stay as they are."""
        passes = self.passes
        mine = passes.stages_of[np.array(passes.rank_of)[stages]]
        others = mine != stages[:, None]
        low, high, again = before[:, :, None], after[:, None, :], self.again[stages, None, None]
        saved, crossing = passes.saved[high] - passes.saved[low], passes.crossing
        kept = np.where(again, crossing[low], saved + passes.saved_again[low])
        trip = passed + passes.inputs[high] - passes.inputs[low] + np.where(again, passed, 0.0)
        room = passes.fixed[low] - passes.fixed[high] - 2 * (crossing[low] + crossing[high])
        room = room - _each(np.where(stages == mine[:, 0], passes.extra_bytes[np.array(passes.rank_of)[stages]], 0.0))

        def besides(values: Floats) -> Floats:
            return _each(np.where(others, values[mine], 0.0).sum(axis=1))

        return passes.memory_row(
            room=room + besides(self.room),
            burst=np.maximum(np.where(again, saved, 0.0), _each(np.where(others, self.saved[mine], 0.0).max(axis=1))),
            kept=kept + besides(self.kept),
            area=kept * (trip + _each(np.append(self.behind, 0.0)[stages + 1])) + besides(self.kept * self.behind),
        )


def _each(values: npt.NDArray[_Scalar]) -> npt.NDArray[_Scalar]:
    """One value a stage, for all pairs of its boundaries."""
    return values[:, None, None]


def _prefix(values: Floats) -> Floats:
    return np.concatenate([[0.0], np.cumsum(values)])


def _spans(prefix: Floats, marks: Ints) -> Floats:
    """What each stage sums to."""
    ends = prefix[marks]
    made: Floats = ends[1:] - ends[:-1]
    return made
