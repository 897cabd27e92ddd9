"""The cuts that a search came to, under each schedule: who else would have won, and what less memory costs in time."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Final

from planner.cluster import memory_limit
from planner.errors import InputError
from planner.schedules import Placement, ScheduleName, default_warmup, shape_fault
from planner.search import Candidate, Found
from planner.search.depth import Depths1F1B
from planner.search.job import job_of_cut
from planner.search.result import SIMPLEST
from planner.simulate import Walk, simulate

MOST_ACTIONS: Final = 1_000_000
"""Simulated actions in all."""
_MOST_CUTS: Final = 12
_CLIMBED: Final = 3
"""Cuts of which 1F1B's warm-up is chosen, in so many simulations."""
_CLIMB: Final = 60


def is_bucketed(candidate: Candidate) -> bool:
    """Whether ranks of replicas alone run several stages, so that gradients are summed beside the work."""
    shape = candidate.configuration
    return shape.pipeline == 1 and shape.virtual > 1 and shape.data > 1


def contenders(found: Found, *, most_actions: int = MOST_ACTIONS) -> list[Candidate]:
    """Plans that fit, fastest first: the search's own, its best cuts under every schedule asked for, leaner ones.

    Of those on single ranks that are alike (another order there, or more buckets, changes nothing) the plainest.
    """
    made = [found.best, *found.alternatives, *found.by_schedule, *_variants(found, most_actions)]
    kept: dict[tuple[object, ...], Candidate] = {}
    for place, one in enumerate(sorted(made, key=lambda one: (len(one.stages), SIMPLEST.index(one.schedule)))):
        shape = one.configuration
        alike = (shape.data, shape.tensor, shape.microbatch_size, f"{one.iteration_s:.9g}", one.peak_memory_bytes)
        kept.setdefault(alike if shape.pipeline == 1 and one is not found.best else (place,), one)
    return sorted(kept.values(), key=lambda one: one.iteration_s)


def _variants(found: Found, most_actions: int) -> Iterator[Candidate]:
    """The search's best cuts under every schedule asked for, its best one with no stage or all recomputing too."""
    limit, spent = memory_limit(found.asked.cluster), 0
    for place, candidate in enumerate((found.best, *found.alternatives)[:_MOST_CUTS]):
        for variant in _leaner(found, candidate) if place == 0 else (candidate,):
            walk = Walk(variant.job)
            warmups = list(_schedules(found, variant))
            if ScheduleName.ONE_F_ONE_B in dict(warmups) and place < _CLIMBED:
                depths = Depths1F1B(walk, limit)
                actions = 2 * variant.configuration.pipeline * variant.configuration.num_microbatches
                climbed = depths.climb(0.0, min(_CLIMB * actions, (most_actions - spent) // 4))
                spent += depths.spent
                warmups += [(ScheduleName.ONE_F_ONE_B, climbed.depths)] if climbed is not None else []
            for name, warmup in warmups:
                actions = 3 * len(variant.stages) * variant.configuration.num_microbatches
                spent += 6 * actions
                if spent > most_actions:
                    return
                timed = _timed(walk, variant, name, warmup)
                if timed is not None and (limit is None or timed.peak_memory_bytes <= limit):
                    yield timed


def best_by_schedule(found: Found, every: Sequence[Candidate]) -> list[Candidate]:
    """The fastest under each schedule, fastest first."""
    best: dict[ScheduleName, Candidate] = {found.best.schedule: found.best}
    for candidate in every:
        best.setdefault(candidate.schedule, candidate)
    return sorted(best.values(), key=lambda one: one.iteration_s)


def frontier(found: Found, every: Sequence[Candidate], *, most: int = 6) -> list[Candidate]:
    """The fastest, then what holds less (a hundredth at least) and is the fastest to do so; thinned out to ``most``."""
    made = [found.best]
    for candidate in sorted(every, key=lambda one: (one.iteration_s, one.peak_memory_bytes)):
        if candidate.peak_memory_bytes < 0.99 * made[-1].peak_memory_bytes:
            made.append(candidate)
    if len(made) <= most:
        return made
    return [made[round(place * (len(made) - 1) / (most - 1))] for place in range(most)]


def _leaner(found: Found, candidate: Candidate) -> Iterator[Candidate]:
    """The candidate as it is, and its cut with every stage, or none, recomputing, where that was asked for."""
    yield candidate
    if found.asked.recompute != "auto":
        return
    cut = [list(stage.layers) for stage in candidate.stages]
    now = [stage.recompute for stage in candidate.stages]
    for again in (True, False):
        if now != [again] * len(cut):
            job = job_of_cut(found.graph, found.asked, candidate.configuration, cut, [again] * len(cut))
            yield dataclasses.replace(candidate, job=job)


def _schedules(found: Found, candidate: Candidate) -> Iterator[tuple[ScheduleName, tuple[int, ...] | None]]:
    """Every named schedule asked for that suits the shape, as it comes; 1F1B at lesser depths too.

    With one stage a rank interleaved 1F1B is 1F1B, looped BFS is GPipe.
    """
    shape = candidate.configuration
    twice = {ScheduleName.INTERLEAVED: ScheduleName.ONE_F_ONE_B, ScheduleName.LOOPED_BFS: ScheduleName.GPIPE}
    for name in found.asked.schedules:
        if shape.virtual == 1 and twice.get(name) in found.asked.schedules:
            continue
        if shape_fault(name, virtual=shape.virtual, placement=shape.placement):
            continue
        warmup = default_warmup(
            name, num_ranks=shape.pipeline, virtual=shape.virtual, num_microbatches=shape.num_microbatches
        )
        yield name, warmup
        if name is ScheduleName.ONE_F_ONE_B and warmup:
            for most in {max(warmup) // 2, max(warmup) // 4, 1} - {0}:
                yield name, tuple(min(depth, most) for depth in warmup)


def _timed(walk: Walk, candidate: Candidate, name: ScheduleName, warmup: tuple[int, ...] | None) -> Candidate | None:
    shape = candidate.configuration
    if shape.placement is Placement.FREE:
        return None
    schedule = shape.schedule(name, warmup)
    try:
        timeline = simulate(walk, schedule, levels=False)
    except InputError:  # a warm-up that waits for ever
        return None
    return dataclasses.replace(candidate, job=walk.job, schedule=name, warmup=warmup, timeline=timeline)
