"""What a rank measures of its own steps: every action, without stopping the device."""

from __future__ import annotations

import time
from collections import deque
from statistics import median
from typing import Any, Final

from planner.runtime.trainer import StepRecord, Trainer

RECORDED_STEPS: Final = 20
"""Of the last so many steps it is kept when each action began and ended."""


class RankFigures:
    """Times of a rank's steps, in seconds since all ranks began together."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._watch = trainer.stopwatch
        self._origin = self._watch.mark()
        self.clock_s = time.perf_counter()
        """When that was on the machine's clock, which all of its processes share."""
        self._pending: StepRecord | None = None
        self._ends: list[float] = []
        self._last_actions: list[float] = []
        self._busy: list[float] = []
        self._updates: list[float] = []
        self._begins: dict[int, float] = {0: 0.0}
        self._actions: dict[str, list[float]] = {}
        self._starts: deque[list[float]] = deque(maxlen=RECORDED_STEPS)
        self._stops: deque[list[float]] = deque(maxlen=RECORDED_STEPS)
        self.losses: list[float] = []

    def begin(self) -> None:
        """The next step does not follow the one before at once: all ranks begin together again."""
        self._settle()
        self._begins[len(self._ends)] = self._watch.seconds(self._origin, self._watch.mark())

    def add(self, record: StepRecord) -> None:
        """Keep a step's figures; read one step late, so that nothing waits for the device."""
        self._settle()
        self._pending = record
        self.losses.append(record.loss)

    def _settle(self) -> None:
        record, self._pending = self._pending, None
        if record is None:
            return
        seconds = self._watch.seconds
        self._ends.append(seconds(self._origin, record.end))
        self._last_actions.append(seconds(self._origin, record.spans[-1].end))
        first = record.spans[0].start
        begun = seconds(self._origin, first)  # events give four bytes' precision: best over short times
        self._starts.append([begun + seconds(first, span.start) for span in record.spans])
        self._stops.append([begun + seconds(first, span.end) for span in record.spans])
        self._updates.append(seconds(record.updating, record.updated))
        busy = 0.0
        rows: dict[str, list[float]] = {}
        for action, span in zip(self._trainer.order, record.spans, strict=True):
            duration = seconds(span.start, span.end)
            busy += duration
            rows.setdefault(f"{action.stage}{action.letter}", []).append(duration)
        self._busy.append(busy)
        for name, row in rows.items():
            self._actions.setdefault(name, []).append(median(row))

    def told(self, *, rows: bool) -> dict[str, Any]:
        """All of it as plain data: lists over steps; ``actions``: medians over steps, by stage and letter.

        ``rows``: with ``starts`` and ``stops`` too, the last steps' actions one by one, in the rank's order.
        """
        self._settle()
        kept = {"starts": list(self._starts), "stops": list(self._stops)} if rows else {}
        return kept | {
            "ends": self._ends,
            "last_actions": self._last_actions,
            "busy": self._busy,
            "optimizer_s": median(self._updates[1:] or self._updates or [0.0]),
            "begins": sorted(self._begins.items()),
            "actions": {name: median(row[1:] or row) for name, row in self._actions.items()},
            "losses": self.losses,
        }
