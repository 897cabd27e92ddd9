"""Seconds of every layer's F, I and W at several micro-batch sizes, and how well they add up.

Visit after visit, every cut at every micro-batch size goes through, so that a noisy neighbour hits all alike:

    each layer alone | whole | halves | quarters | eighths   the layers' figures are fitted to these (calibrate.py)
    thirds | fifths                                     these are foretold from them: the remaining error

Layers are in execution order, so any run of consecutive ones is a stage.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from statistics import median, quantiles

from planner.capture import Capture
from planner.measure.calibrate import Run, calibrate, entry_seconds, errors
from planner.measure.clock import Clock, clock_for
from planner.measure.passes import SPLIT_FORWARD, TIMED, Handed, Pipeline
from planner.measure.room import micro_batches_under_way
from planner.schedules import Letter

FITTED = (1, 2, 4, 8)
FORETOLD = (3, 5)
"""In how many runs the layers are cut."""
WARMING, PASSES = 1, 3
"""Passes of a stage in one visit, each split and fused: some fetch its weights and code, the others are timed.

Before them one of all stages makes what it is handed, and fills its gradients, which are freed after them.
"""
MOST_VISITS, FEWEST_VISITS = 4, 2
SMALLEST_RUN = 0.05
"""Of the whole: what is smaller limits no pipeline, and is mostly the cost of entering a stage."""
LEAST_SPLIT = 0.03
"""Of F + B: from so much on what splitting a backward costs is counted."""
ENOUGH_S = 60.0
"""Large models get fewer visits, so that timing takes about this long."""

Progress = Callable[[str, float], None]
"""Told what is being done, and how much of it is done (0 to 1)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSeconds:
    """One layer; ``spread``: interquartile range of F + B alone over its median.

    I and W make up a whole B; ``split``: what F, I and W last longer than F and B.
    """

    forward: float
    backward_input: float
    backward_weight: float
    split: float
    spread: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """All layers at one micro-batch size.

    ``entry_s``: what entering and leaving a stage costs in F + B. ``errors``: of the F + B of each foretold run that is
    not tiny, what its layers add up to over what it took, minus 1. ``loss``: of the example batch; None where no pass
    went through the whole model.
    """

    layers: tuple[LayerSeconds, ...]
    entry_s: float
    errors: tuple[float, ...]
    loss: float | None = None


def time_layers(captures: Sequence[Capture], *, progress: Progress) -> tuple[Timed, ...]:
    """Time the layers of a model captured at several micro-batch sizes."""
    subjects = [_Subject(captured) for captured in captures]
    with no_collector():
        progress("warming up", 0.0)
        for subject in subjects:
            subject.warm_up()
        visits, number = MOST_VISITS, 0
        start = time.perf_counter()
        while number < visits:
            for subject in subjects:
                subject.visit()
            number += 1
            visit_s = (time.perf_counter() - start) / number
            visits = max(FEWEST_VISITS, min(MOST_VISITS, int(ENOUGH_S / visit_s)))
            progress("timing layers", number / max(number, visits))
    return tuple(subject.timed() for subject in subjects)


@contextmanager
def no_collector() -> Iterator[None]:
    """Without Python's garbage collector, which would strike some round or other."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


_WHOLE = (Letter.FORWARD, Letter.BACKWARD)
_SPLIT = (SPLIT_FORWARD, Letter.BACKWARD_INPUT, Letter.BACKWARD_WEIGHT)
Figures = Callable[..., tuple[float, ...]]
"""Seconds of every layer, of some letters in sum."""


def layer_seconds(figures: Figures, spreads: Sequence[float]) -> tuple[LayerSeconds, ...]:
    """All layers' figures; I and W are those of the split backward, scaled so that they make up a whole B.

    What splitting costs over all layers is shared out as far as each shows it: alone it is mostly noise. Where all of
    them show less than ``LEAST_SPLIT`` it is none: figures are not that exact, and proofs are cheaper without it.
    """
    forward, backward, *halves = (figures(letter) for letter in (*_WHOLE, *_SPLIT[1:]))
    over = [split - f - b for split, f, b in zip(figures(*_SPLIT), forward, backward, strict=True)]
    shown = sum(max(0.0, one) for one in over)
    counts = sum(over) > LEAST_SPLIT * (sum(forward) + sum(backward))
    share = sum(over) / shown if counts else 0.0
    return tuple(
        LayerSeconds(
            forward=f,
            backward_input=b * i / (i + w or 1),
            backward_weight=b * w / (i + w or 1),
            split=max(0.0, more) * share,
            spread=spread,
        )
        for f, b, i, w, more, spread in zip(forward, backward, *halves, over, spreads, strict=True)
    )


class Series:
    """One cut, and the seconds of its stages, pass after pass."""

    def __init__(self, captured: Capture, bounds: Sequence[int]) -> None:
        names = [layer.name for layer in captured.layers]
        self.bounds = bounds
        cut = [names[first:last] for first, last in pairwise(bounds)]
        self._pipeline = Pipeline(captured, cut, captured.batch)
        self._under_way = [micro_batches_under_way(captured, *run) for run in pairwise(bounds)]
        self._clock: Clock = clock_for(captured.device)
        self._rows: dict[str, list[list[float]]] = {letter: [] for letter in TIMED}

    def visit(self) -> None:
        """Passes of one stage after another, split and fused by turns; F counts in the fused ones."""
        handed = self._pipeline.handed()
        found = [self._passes(number, given) for number, given in enumerate(handed)]
        for letter, rows in self._rows.items():
            rows += map(list, zip(*(passes[letter] for passes in found), strict=True))

    def _passes(self, number: int, handed: Handed) -> dict[str, list[float]]:
        """Seconds of one stage, pass after pass, as a rank runs it: with its own weights and code at hand alone."""
        rounds, under_way = WARMING + PASSES, self._under_way[number]
        found = self._pipeline.seconds(number, handed, self._clock, rounds=rounds, under_way=under_way)
        self._pipeline.drop_gradients(number)
        return {letter: rows[WARMING:] for letter, rows in found.items()}

    @property
    def loss(self) -> float:
        """Of the last visit."""
        return self._pipeline.loss

    def forget(self) -> None:
        """Drop what was timed so far."""
        for rows in self._rows.values():
            rows.clear()

    def medians(self, *letters: str) -> list[float]:
        """The sum of the median seconds of some letters, stage by stage."""
        return [sum(median(column) for column in columns) for columns in zip(*map(self._columns, letters), strict=True)]

    def _columns(self, letter: str) -> list[tuple[float, ...]]:
        return list(zip(*self._rows[letter], strict=True))

    def runs(self, *letters: str) -> list[Run]:
        """The stages as runs of layers, with the sum of their median seconds."""
        return [
            Run(first, last, seconds)
            for (first, last), seconds in zip(pairwise(self.bounds), self.medians(*letters), strict=True)
        ]

    def spreads(self) -> list[float]:
        """Of each stage's F + B, pass by pass."""
        made = []
        forward, backward = self._rows[Letter.FORWARD], self._rows[Letter.BACKWARD]
        for f, b in zip(zip(*forward, strict=True), zip(*backward, strict=True), strict=True):
            row = [one + other for one, other in zip(f, b, strict=True)]
            low, middle, high = quantiles(row, n=4, method="inclusive") if len(row) > 1 else (row[0],) * 3
            made.append((high - low) / middle)
        return made


class _Subject:
    """A model captured at one micro-batch size, with all its cuts."""

    def __init__(self, captured: Capture) -> None:
        self._captured = captured
        self._alone = Series(captured, range(len(captured.layers) + 1))
        self._fitted: list[Series] = []
        self._foretold: list[Series] = []

    def warm_up(self) -> None:
        """Time the layers alone once, to make the other cuts of runs that take about the same time."""
        self._alone.visit()
        load = self._alone.medians(*_WHOLE)
        self._fitted = [Series(self._captured, bounds) for bounds in _distinct(load, FITTED)]
        self._foretold = [Series(self._captured, bounds) for bounds in _distinct(load, FORETOLD)]
        self._alone.forget()

    def visit(self) -> None:
        for series in (self._alone, *self._fitted, *self._foretold):
            series.visit()

    def timed(self) -> Timed:
        """All figures."""
        layers = layer_seconds(self._figures, self._alone.spreads())
        both = [one.forward + one.backward_input + one.backward_weight for one in layers]
        fitted = [run for series in self._fitted for run in series.runs(*_WHOLE)]
        foretold = [run for series in self._foretold for run in series.runs(*_WHOLE)]
        return Timed(
            layers=layers,
            entry_s=entry_seconds(self._alone.medians(*_WHOLE), fitted),
            errors=errors(both, [run for run in foretold if run.seconds >= SMALLEST_RUN * sum(both)]),
            loss=self._fitted[0].loss,
        )

    def _figures(self, *letters: str) -> tuple[float, ...]:
        runs = [run for series in self._fitted for run in series.runs(*letters)]
        return calibrate(self._alone.medians(*letters), runs)


def _distinct(load: Sequence[float], counts: Sequence[int]) -> list[list[int]]:
    found: list[list[int]] = []
    for pieces in counts:
        bounds = even_bounds(load, pieces)
        if bounds not in found:
            found.append(bounds)
    return found


def even_bounds(load: Sequence[float], pieces: int) -> list[int]:
    """Where to cut a row of loads into runs of about the same load: 0, ..., len(load), ascending."""
    bounds, total, piece = [0], 0.0, 1
    for index, value in enumerate(load):
        goal = sum(load) * piece / pieces
        while piece < pieces and total + value / 2 > goal:
            if index > bounds[-1]:
                bounds.append(index)
            piece += 1
            goal = sum(load) * piece / pieces
        total += value
    return [*bounds, len(load)]
