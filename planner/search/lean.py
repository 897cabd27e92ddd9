"""The plan that needs the least memory on its fullest rank: what is left to try where nothing else fits.

cuts        for one stage a rank the cut whose largest stage is least, with as few micro-batches in flight as the
            schedules allow; for several a rank boundaries are moved, layer by layer, while that takes from the fullest
orders      the leanest of each schedule asked for, and one micro-batch after another
simulated   with all that the estimate leaves out (messages, what runs at one instant): the least peak wins
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Final, NamedTuple

import numpy as np

from planner.errors import InputError
from planner.graph import LayerGraph
from planner.schedules import Action, Letter, Schedule, ScheduleName, default_warmup, ranks_of, shape_fault
from planner.search.bound import in_flight_limits
from planner.search.clock import never
from planner.search.figures import Figures, LayerFigures
from planner.search.job import job_of_cut
from planner.search.lattice import Floats, along, lattice_of
from planner.search.result import Candidate
from planner.search.space import Asked, Configuration, configurations
from planner.simulate import Job, Walk, simulate
from planner.simulate.memory import resident_bytes

_ALL_AT_ONCE: Final = (ScheduleName.GPIPE, ScheduleName.LOOPED_BFS)
_LEAN: Final = (ScheduleName.ONE_F_ONE_B, ScheduleName.SYNTHESISED)
_MOST_LOOKS: Final = 16
"""Configurations whose cut is simulated."""
_MOST_ACTIONS: Final = 600_000
_FEW_ACTIONS: Final = 3_000
"""From so many on only the schedules that are known to be lean are simulated."""
_MOST_MOVES: Final = 20_000
"""Stages of which the needs are added up while boundaries are moved."""
_MANY: Final = 60
"""From so many shapes on only the widest of each kind are looked at."""
_SMALL: Final = 3_000
"""Up to so many cuts of a configuration are all looked at."""
_LEANEST: Final = 12
"""So many of them are simulated."""


_FOLLOWING: Final = 8
"""Micro-batches that are simulated beyond those of two rounds through all stages, where they are many."""

KnownFigures = dict[tuple[int, int], Figures]
"""By micro-batch size and tensor size."""


class _Estimate(NamedTuple):
    need_bytes: float
    place: int
    configuration: Configuration
    cut: list[list[str]]


def leanest(
    graph: LayerGraph,
    asked: Asked,
    *,
    enough_bytes: int = 0,
    known: KnownFigures | None = None,
    whole: bool = True,
    is_over: Callable[[], bool] = never,
) -> Candidate | None:
    """The plan with the least peak that is found over all that is asked for; None: no schedule suits its shapes.

    Once ``is_over`` says so, the best so far: of one plan at least.

    The first one with a peak of ``enough_bytes`` or less will do. Where micro-batches are many, one that holds more has
    but the first few: those that follow hold what they do; so has one that will do, unless it is to be ``whole``.
    ``known``: figures made before, and kept for later.
    """
    suited = [c for c in configurations(graph, asked) if next(_names(asked, c), None) is not None]
    estimator = _Estimator(graph, asked, known, is_over)
    estimates = sorted(estimator.estimates(_distinct(asked, suited)), key=lambda one: _promise(one, enough_bytes))
    best: Candidate | None = None
    spent = 0
    for estimate in estimates[:_MOST_LOOKS]:
        configuration = estimate.configuration
        stages = configuration.pipeline * configuration.virtual
        few = configuration
        if enough_bytes and 2 * stages * configuration.num_microbatches > _FEW_ACTIONS and not _at_once(asked):
            few = dataclasses.replace(few, num_microbatches=min(few.num_microbatches, 2 * stages + _FOLLOWING))
        for cut, again in itertools.product(estimator.cuts(estimate), _recomputing(asked, stages)):
            job = job_of_cut(graph, asked, few, cut, again)
            if best is not None and spent > _MOST_ACTIONS:
                return best
            if best is not None and _surely_held(job) >= best.peak_memory_bytes:
                continue
            if best is not None and is_over():
                return best
            for candidate in _timed(Walk(job), asked, few):
                spent += 2 * stages * few.num_microbatches
                if best is None or candidate.peak_memory_bytes < best.peak_memory_bytes:
                    best = candidate
                if best.peak_memory_bytes <= enough_bytes:
                    if whole and few != configuration:
                        best = _with_all(graph, asked, configuration, best)
                    if best.peak_memory_bytes <= enough_bytes:
                        return best
                if is_over():
                    return best
    return best


def _promise(estimate: _Estimate, enough_bytes: int) -> tuple[float, ...]:
    """What is looked at first: of what is thought to fit that with the fewest actions, else what needs the least."""
    shape, fits = estimate.configuration, estimate.need_bytes <= enough_bytes
    actions = shape.pipeline * shape.virtual * shape.num_microbatches
    return (0, actions, estimate.place) if fits else (1, estimate.need_bytes, estimate.place)


def _with_all(graph: LayerGraph, asked: Asked, configuration: Configuration, few: Candidate) -> Candidate:
    """The same plan with all of its micro-batches."""
    cut, again = [list(stage.layers) for stage in few.stages], [stage.recompute for stage in few.stages]
    walk = Walk(job_of_cut(graph, asked, configuration, cut, again))
    if few.schedule is ScheduleName.SYNTHESISED:
        schedule = _one_by_one(walk)
    else:
        schedule = configuration.schedule(few.schedule, few.warmup)
    timeline = simulate(walk, schedule, levels=False)
    return dataclasses.replace(few, configuration=configuration, job=walk.job, timeline=timeline)


def _at_once(asked: Asked) -> bool:
    """Whether all micro-batches are in flight at once under every schedule asked for."""
    return set(asked.schedules) <= set(_ALL_AT_ONCE)


def _surely_held(job: Job) -> int:
    """No order leaves the fullest rank with less than what is always there, and one stage's saved bytes at its end."""
    held = [resident_bytes(job, rank) for rank in range(job.num_ranks)]
    most = list(held)
    for stage in job.stages:
        if stage.backward_input_s > 0 and stage.backward_weight_s > 0:  # what lasts no time holds nothing
            most[stage.rank] = max(most[stage.rank], held[stage.rank] + stage.saved_bytes + stage.workspace_bytes)
    return max(most)


def fewest_ranks(graph: LayerGraph, asked: Asked, limit: int, known: KnownFigures | None = None) -> float:
    """About how many ranks of one stage it takes so that each holds no more than so much; infinite: none are enough."""
    try:
        shapes = configurations(graph, asked)
    except InputError:
        return math.inf
    estimator = _Estimator(graph, asked, known)
    one_of_each = {(one.microbatch_size, one.tensor): one for one in shapes}
    return min(
        (estimator.fewest(one, limit) * one.tensor for one in one_of_each.values()),
        default=math.inf,
    )


def _names(asked: Asked, configuration: Configuration) -> Iterator[ScheduleName]:
    """The schedules asked for that suit a shape."""
    for name in asked.schedules:
        suits = not shape_fault(name, virtual=configuration.virtual, placement=configuration.placement)
        if suits or name is ScheduleName.SYNTHESISED:
            yield name


def _distinct(asked: Asked, every: Sequence[Configuration]) -> list[Configuration]:
    """One number of replicas for each shape of a pipeline: the fewest; the most, where all micro-batches go at once."""
    made: dict[tuple[object, ...], Configuration] = {}
    at_once = _at_once(asked)
    for one in sorted(every, key=lambda one: -one.data if at_once else one.data):
        made.setdefault((one.pipeline, one.tensor, one.virtual, one.placement, one.microbatch_size), one)
    return sorted(made.values(), key=lambda one: (-one.pipeline, one.virtual, one.microbatch_size, one.placement))


def _recomputing(asked: Asked, stages: int) -> list[tuple[bool, ...]]:
    """Which stages recompute: as asked; else none, all, and all but the last ones."""
    if asked.recompute != "auto":
        return [(asked.recompute == "all",) * stages]
    firsts = dict.fromkeys((0, stages, stages - 1, stages // 2))
    return [tuple(stage < first for stage in range(stages)) for first in firsts]


class _Estimator:
    """Lean cuts of each configuration."""

    def __init__(
        self, graph: LayerGraph, asked: Asked, known: KnownFigures | None, is_over: Callable[[], bool] = never
    ) -> None:
        self.graph: Final = graph
        self.is_over: Final = is_over
        self.asked: Final = asked
        self._figures: Final = known if known is not None else {}
        some = next(iter(self._figures.values()), None)
        self.lattice: Final = some.lattice if some is not None else lattice_of(graph) or along(range(len(graph)))
        self._first: Final = np.searchsorted(self.lattice.start, np.arange(len(self.lattice) + 1))

    def estimates(self, shapes: Iterable[Configuration]) -> Iterator[_Estimate]:
        """Per shape its leanest cut; shapes come widest first. One at least, however little time there is."""
        seen: dict[tuple[object, ...], int] = {}
        every = list(shapes)
        for place, shape in enumerate(every):
            key = (shape.tensor, shape.virtual, shape.placement, shape.microbatch_size)
            seen[key] = seen.get(key, 0) + 1
            if len(every) > _MANY and seen[key] > 1:
                continue  # more ranks, which came before, need less
            if place and self.is_over():
                return
            need, steps = self._narrowest(shape)
            cut = [self.lattice.layers(*step) for step in steps]
            if shape.virtual > 1:
                need, cut = self._moved(shape, cut)
            yield _Estimate(need, place, shape, [[self.graph.names[layer] for layer in layers] for layers in cut])

    def cuts(self, estimate: _Estimate) -> Iterator[list[list[str]]]:
        """The estimate's cut; where they are few, the leanest of all the cuts there are, with one or more in flight."""
        yield estimate.cut
        shape = estimate.configuration
        every = self.lattice.every_cut(shape.pipeline * shape.virtual, _SMALL) or []
        cuts = [[self.lattice.layers(*step) for step in pairwise(ideals)] for ideals in every]
        seen: set[int] = set()
        for flying in (1, 3):
            needs = [
                _RankNeeds(self._of(shape), shape, list(itertools.chain.from_iterable(cut)), flying)(
                    [0, *accumulate(map(len, cut))]
                )
                for cut in cuts
            ]
            seen.update(sorted(range(len(cuts)), key=lambda place: (needs[place], place))[:_LEANEST])
        for place in sorted(seen):
            yield [[self.graph.names[layer] for layer in layers] for layers in cuts[place]]

    def _of(self, shape: Configuration) -> Figures:
        key = (shape.microbatch_size, shape.tensor)
        if key not in self._figures:
            layers = LayerFigures(self.graph, microbatch_size=key[0], tensor=key[1], cluster=self.asked.cluster)
            self._figures[key] = Figures(layers, self.lattice)
        return self._figures[key]

    def _narrowest(self, shape: Configuration) -> tuple[float, list[tuple[int, int]]]:
        """The cut into that many stages whose largest is least, and what that needs."""
        stages, need = shape.pipeline * shape.virtual, self._needs(shape)
        levels = np.unique(need)
        low, high = 0, len(levels) - 1
        while low < high:
            middle = (low + high) // 2
            path = self._fewest(need, float(levels[middle]))
            low, high = (low, middle) if path is not None and len(path) <= stages else (middle + 1, high)
        steps = self._fewest(need, float(levels[low])) or [(0, len(self.lattice) - 1)]
        while len(steps) < stages:
            steps = self._with_one_more(need, steps)
        return float(levels[low]), steps

    def fewest(self, shape: Configuration, limit: int) -> float:
        """The fewest stages that each need no more than so much; infinite where a layer alone needs more."""
        steps = self._fewest(self._needs(shape), limit)
        return math.inf if steps is None else len(steps)

    def _needs(self, shape: Configuration) -> Floats:
        """What each step needs as a rank's only stage, with as few micro-batches in flight as the schedules allow."""
        figures = self._of(shape)
        flying = shape.num_microbatches if _at_once(self.asked) else 1
        kept: Floats = flying * figures.saved_bytes
        again: Floats = np.maximum(
            flying * figures.input_bytes, (flying - 1) * figures.input_bytes + figures.saved_bytes
        )
        held = {"none": kept, "all": again, "auto": np.minimum(kept, again)}[self.asked.recompute]
        need: Floats = figures.fixed_bytes + figures.workspace_bytes + held
        return need

    def _fewest(self, need: Floats, limit: float) -> list[tuple[int, int]] | None:
        """The fewest steps from nothing to the whole that are each within a limit."""
        lattice = self.lattice
        first = self._first
        if self._is_single:  # as far as it goes, every time
            reached = np.where(need <= limit, lattice.end, 0)
            furthest = np.maximum.reduceat(reached, first[:-2]).tolist()
            steps = [(0, furthest[0])]
            while steps[-1][1] < len(furthest):
                if not steps[-1][1] or furthest[steps[-1][1]] == 0:
                    return None
                steps.append((steps[-1][1], furthest[steps[-1][1]]))
            return steps
        count = np.full(len(lattice), len(lattice) + 1)
        came = np.zeros(len(lattice), dtype=np.int64)
        count[0] = 0
        for ideal in range(len(lattice) - 1):
            options = slice(int(first[ideal]), int(first[ideal + 1]))
            ends = lattice.end[options][need[options] <= limit]
            ends = ends[count[ends] > count[ideal] + 1]
            count[ends] = count[ideal] + 1
            came[ends] = ideal
        if count[-1] > len(lattice):
            return None
        at, made = len(lattice) - 1, []
        while at:
            made.append((int(came[at]), at))
            at = int(came[at])
        return made[::-1]

    def _with_one_more(self, need: Floats, steps: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """The largest step of more than one layer in two, so that the larger of them is least."""
        lattice = self.lattice
        wide = [step for step in steps if lattice.size[step[1]] - lattice.size[step[0]] > 1]
        start, end = max(wide, key=lambda step: (self._need(need, step), -step[0]))
        place = steps.index((start, end))
        if self._is_single:
            between = np.arange(start + 1, end)
            front = need[self._first[start] + between - start - 1]
            behind = need[self._first[between] + end - between - 1]
            middle = int(between[np.argmin(np.maximum(front, behind))])
            return [*steps[:place], (start, middle), (middle, end), *steps[place + 1 :]]
        into = np.flatnonzero(lattice.end == end)
        from_start = set(lattice.end[lattice.start == start].tolist())
        middles = [(step, int(lattice.start[step])) for step in into if int(lattice.start[step]) in from_start]
        _, middle = min(middles, key=lambda entry: max(self._need(need, (start, entry[1])), float(need[entry[0]])))
        return [*steps[:place], (start, middle), (middle, end), *steps[place + 1 :]]

    @property
    def _is_single(self) -> bool:
        """Whether the lattice has a single order: step (a, b) is the (b - a - 1)th of those from a."""
        return len(self.lattice) == len(self.graph) + 1

    def _need(self, need: Floats, step: tuple[int, int]) -> float:
        lattice = self.lattice
        low, high = int(self._first[step[0]]), int(self._first[step[0] + 1])
        if self._is_single:
            return float(need[low + step[1] - step[0] - 1])
        return float(need[low + int(np.flatnonzero(lattice.end[low:high] == step[1])[0])])

    def _moved(self, shape: Configuration, cut: list[list[int]]) -> tuple[float, list[list[int]]]:
        """Boundaries moved by a layer at a time while the fullest rank gets less to hold; several stages a rank."""
        order = [layer for layers in cut for layer in layers]
        marks = [0, *accumulate(len(layers) for layers in cut)]
        rank_needs = _RankNeeds(self._of(shape), shape, order)
        best = rank_needs(marks)
        left, better = _MOST_MOVES // len(cut), True
        while better and left > 0:
            better = False
            for place, by in itertools.product(range(1, len(marks) - 1), (1, -1)):
                moved = [*marks[:place], marks[place] + by, *marks[place + 1 :]]
                if not moved[place - 1] < moved[place] < moved[place + 1]:
                    continue
                if self.is_over():
                    return best[0], [order[low:high] for low, high in pairwise(marks)]
                left -= 1
                needs = rank_needs(moved)
                if needs < best:
                    best, marks, better = needs, moved, True
        return best[0], [order[low:high] for low, high in pairwise(marks)]


class _RankNeeds:
    """What each rank would hold, so many micro-batches in flight, the fullest first; by marks in an order of layers."""

    def __init__(self, figures: Figures, shape: Configuration, order: Sequence[int], flying: int = 1) -> None:
        costs, factor = figures.layers.costs, figures.layers.fixed_factor()
        self.homes: Final = ranks_of(shape.pipeline, shape.virtual, shape.placement)
        self.ranks: Final = shape.pipeline
        per_layer = [costs[layer] for layer in order]
        fixed = (
            c.parameter_bytes + factor * c.trainable_bytes + c.buffer_bytes + flying * c.saved_bytes for c in per_layer
        )
        self.held: Final = [0.0, *accumulate(fixed)]
        self.workspace: Final = [c.workspace_bytes for c in per_layer]

    def __call__(self, marks: Sequence[int]) -> list[float]:
        needs, spaces = [0.0] * self.ranks, [0] * self.ranks
        for rank, (low, high) in zip(self.homes, pairwise(marks), strict=True):
            needs[rank] += self.held[high] - self.held[low]
            spaces[rank] = max(spaces[rank], *self.workspace[low:high])
        return sorted((need + space for need, space in zip(needs, spaces, strict=True)), reverse=True)


def _timed(walk: Walk, asked: Asked, configuration: Configuration) -> Iterator[Candidate]:
    """A cut under the leanest orders of every schedule that suits it."""
    names = list(_names(asked, configuration))
    if 2 * len(walk.job.stages) * configuration.num_microbatches > _FEW_ACTIONS:
        names = [name for name in names if name in _LEAN] or names[:2]
    for name in names:
        for warmup, schedule in _orders(walk, name, configuration):
            try:
                timeline = simulate(walk, schedule, levels=False)
            except InputError:  # a warm-up that waits for ever
                continue
            yield Candidate(configuration=configuration, job=walk.job, schedule=name, warmup=warmup, timeline=timeline)


def _orders(
    walk: Walk, name: ScheduleName, configuration: Configuration
) -> Iterator[tuple[tuple[int, ...] | None, Schedule]]:
    shape = {
        "num_ranks": configuration.pipeline,
        "virtual": configuration.virtual,
        "num_microbatches": configuration.num_microbatches,
    }
    if name is ScheduleName.SYNTHESISED:
        yield None, _one_by_one(walk)
        return
    default = default_warmup(name, **shape)
    depths: list[tuple[int, ...] | None] = [default]
    if default is not None and name is ScheduleName.ONE_F_ONE_B:  # as deep as memory lets it be, messages or not
        for spare in (0, 1):
            capped = (most - spare for most in in_flight_limits(walk.job, walk.job.stages))
            depths.append(tuple(max(1, min(pair)) for pair in zip(default, capped, strict=True)))
    if default is not None:
        for depth in dict.fromkeys((1, configuration.virtual, min(default))):
            even = (depth,) * len(default)
            depths.append(even)
    for warmup in dict.fromkeys(depths):
        yield warmup, configuration.schedule(name, warmup)


def _one_by_one(walk: Walk) -> Schedule:
    """Every micro-batch all the way forward and back before the next one starts."""
    job = walk.job
    orders: list[list[Action]] = [[] for _ in range(job.num_ranks)]
    for microbatch in range(job.num_microbatches):
        for stage in job.stages:
            orders[stage.rank].append(Action(stage.stage, Letter.FORWARD, microbatch))
        for stage in reversed(job.stages):
            orders[stage.rank].append(Action(stage.stage, Letter.BACKWARD, microbatch))
    return tuple(map(tuple, orders))
