"""Figures of layers that add up: what separately timed layers cost too much is taken off them.

A layer timed alone pays for entering and leaving a stage; in a run of layers that is paid once:

    alone        |o|--a--|   |o|--b--|   |o|--c--|         sum of alone  =  run + 2 o
    run a b c    |o|--a--|--b--|--c--|

So o follows from the timed runs, comes off every layer, and what is then left is fitted to the runs by iterative
proportional fitting (Deming and Stephan 1940): of all figures that explain the runs, those nearest to the layers' own.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import numpy

SWEEPS = 200
FLOOR = 0.02
"""No layer loses more than all but this part of its own time."""


class Run(NamedTuple):
    """Layers ``first`` to ``last`` - 1, timed as one stage."""

    first: int
    last: int
    seconds: float


def calibrate(alone: Sequence[float], runs: Sequence[Run]) -> tuple[float, ...]:
    """Seconds of each layer such that the layers of every run add up to it, as nearly as the runs agree."""
    own = numpy.asarray(alone, dtype=float)
    figures = numpy.maximum(own - entry_seconds(alone, runs), FLOOR * own)
    timed = sorted((run for run in runs if run.seconds > 0), key=lambda run: run.last - run.first)
    for sweep in range(SWEEPS):
        step = 1 / (1 + sweep / 20)  # smaller and smaller, so that runs that disagree settle in between
        for run in timed:
            total = figures[run.first : run.last].sum()
            if total > 0:
                figures[run.first : run.last] *= (run.seconds / total) ** step
    return tuple(float(figure) for figure in figures)


def entry_seconds(alone: Sequence[float], runs: Sequence[Run]) -> float:
    """What entering and leaving a stage costs: the median over the runs; never negative."""
    found = [
        (sum(alone[run.first : run.last]) - run.seconds) / (run.last - run.first - 1)
        for run in runs
        if run.last - run.first > 1
    ]
    return max(0.0, median(found)) if found else 0.0


def errors(figures: Sequence[float], runs: Sequence[Run]) -> tuple[float, ...]:
    """For each run: what its layers add up to over what it took, minus 1."""
    return tuple(sum(figures[run.first : run.last]) / run.seconds - 1 for run in runs if run.seconds > 0)
