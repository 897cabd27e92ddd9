"""Cuts with several stages a rank, bettered by moving two boundaries at once.

The row of each stage is a sum over layers and links before its boundaries, so what two moves change is the sum of what
each changes: all pairs of a move at the busiest rank with any other are judged in one array. A single move shifts a
whole layer from one rank to another, a pair shifts the difference of two: that is how ranks get even.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from planner.search.lattice import Bools, Floats, Ints
from planner.search.passes import Passes

_STEPS: Final = (-2, -1, 1, 2)
_BEST: Final = 8
"""So many of the most promising pairs are looked at with memory."""
_MOST_ENTRIES: Final = 1_000_000
"""Pairs times stages that are judged at once."""


def paired(passes: Passes, marks: Ints, again: Bools, rounds: int) -> Ints:
    """The cut after at most so many rounds of the best pair of moves."""
    best = _price(passes.rows(marks, again), passes)
    for _ in range(rounds if np.isfinite(best) else 0):
        found = _better(passes, marks, again, best)
        if found is None:
            break
        best, marks = found
    return marks


def _price(rows: Floats, passes: Passes) -> float:
    scale = passes.configuration.num_microbatches * passes.load[-1] / passes.configuration.pipeline
    return float(_counted(rows / scale).sum()) if np.isfinite(rows).all() else np.inf


def _counted(rows: Floats) -> Floats:
    """Rows to the 80th power, several times faster than a power: nearly the largest counts, and yet every rank's."""
    fifth = np.square(np.square(rows))
    fifth *= rows
    for _ in range(4):
        np.square(fifth, out=fifth)
    return fifth


def _better(passes: Passes, marks: Ints, again: Bools, best: float) -> tuple[float, Ints] | None:
    """The best pair of moves that makes the cut better."""
    boundaries = np.repeat(np.arange(1, len(marks) - 1), len(_STEPS))
    steps = np.tile(np.array(_STEPS), len(marks) - 2)
    moved = np.repeat(marks[None, :], len(steps), axis=0)
    moved[np.arange(len(steps)), boundaries] += steps
    kept = (np.diff(moved, axis=1) > 0).all(axis=1)
    moved, boundaries, steps = moved[kept], boundaries[kept], steps[kept]
    if not len(steps):  # a layer a stage: nothing can move
        return None
    now = stage_rows(passes, marks[None, :], again)
    change = stage_rows(passes, moved, again) - now
    worst = passes.rank_of[int(np.argmax(now[0]))]
    near = {place for stage in passes.stages_of[worst] for place in (int(stage), int(stage) + 1)}
    first = np.flatnonzero(np.isin(boundaries, list(near)))
    room = max(1, _MOST_ENTRIES // max(1, len(steps) * passes.num_stages))
    first = first[:room]
    scale = passes.configuration.num_microbatches * passes.load[-1] / passes.configuration.pipeline
    rows = (now + change[first])[:, None, :] + change[None, :, :]
    price = _counted(rows / scale).sum(axis=2)
    alone = _counted((now + change[first]) / scale)  # the first move by itself
    price[np.arange(len(first)), first] = alone.sum(axis=1)
    price[boundaries[first][:, None] == boundaries[None, :]] = np.inf
    price[np.arange(len(first)), first] = alone.sum(axis=1)
    for place in np.argsort(price, axis=None, kind="stable")[:_BEST]:
        one, other = first[place // len(steps)], place % len(steps)
        made = marks.copy()
        made[boundaries[one]] += steps[one]
        if other != one:
            made[boundaries[other]] += steps[other]
        if (np.diff(made) > 0).all():
            value = _price(passes.rows(made, again), passes)
            if value < best * (1 - 1e-9):
                return value, made
    return None


def stage_rows(passes: Passes, marks: Ints, again: Bools) -> Floats:
    """For each cut, when each stage's rank has done all that it does from that stage's first F on (seconds)."""
    count, stages = passes.configuration.num_microbatches, passes.stages_of
    forward = np.diff(passes.forward[marks], axis=1)
    load = np.diff(passes.load[marks], axis=1) + np.where(again[None, :], forward, 0.0)
    between = np.where(np.diff(passes.rank_of)[None, :] != 0, passes.link_s[marks[:, 1:-1]], 0.0)
    heads = passes.forward[marks[:, :-1]] + np.concatenate(
        [np.zeros((len(marks), 1)), np.cumsum(between, axis=1)], axis=1
    )
    steps = np.diff(passes.step_s[marks], axis=1)[:, stages].sum(axis=2)
    reduces = np.diff(passes.reduce_s[marks], axis=1)[:, stages[:, 0]]
    mine = load[:, stages]  # cut, rank, stage
    done = np.cumsum(forward[:, stages], axis=2) - forward[:, stages]
    rows = heads[:, stages] + count * (mine.sum(axis=2)[:, :, None] - done)
    rows = rows + (passes.extra_s[None, :] + steps + reduces)[:, :, None]
    made: Floats = np.empty_like(heads)
    made[:, stages.reshape(-1)] = rows.reshape(len(marks), stages.size)
    return made
