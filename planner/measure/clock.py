"""Clocks: how long actions take on a device. One way to time for all: marks between actions, read at the end."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Protocol

import torch


class Clock(Protocol):
    """Times a row of actions that run one after another."""

    def start(self) -> None:
        """Set the first mark; what was queued before has ended by then."""

    def mark(self) -> None:
        """Set a mark at the end of what was queued so far."""

    def seconds(self) -> list[float]:
        """The time between each two marks since ``start``; waits for the device."""


class CpuClock:
    """On a CPU actions have ended when their call returns: the machine's clock tells, less what others took.

    Time that this thread was ready to run but had no core is taken off, as Linux counts it: in a run every rank has a
    core to itself. Time asleep counts.
    """

    def __init__(self) -> None:
        self._marks: list[int] = []
        try:
            self._scheduler = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        except OSError:
            self._scheduler = -1

    def __del__(self) -> None:
        if self._scheduler >= 0:
            os.close(self._scheduler)

    def _now_ns(self) -> int:
        if self._scheduler < 0:
            return time.perf_counter_ns()
        _, waited_ns, _ = os.pread(self._scheduler, 100, 0).split()
        return time.perf_counter_ns() - int(waited_ns)

    def start(self) -> None:
        """Set the first mark."""
        self._marks = [self._now_ns()]

    def mark(self) -> None:
        """Set a mark."""
        self._marks.append(self._now_ns())

    def seconds(self) -> list[float]:
        """The time between marks."""
        return [max(0, after - before) * 1e-9 for before, after in pairwise(self._marks)]


CYCLES_PER_S = 2e9
"""About what a GPU's clock makes; it only decides how long a device sleeps."""


class CudaClock:
    """On a CUDA device calls only queue: events on the stream tell when each action's kernels ended.

    The device first sleeps as long as Python took to queue the row before, so that kernels queue up and none waits for
    Python within the measured row, as in training, where the CPU runs ahead.
    """

    def __init__(self) -> None:
        self._events: list[torch.cuda.Event] = []
        self._queueing_s = 0.0
        self._started = 0.0

    def start(self) -> None:
        """Wait for the device, give Python its head start, set the first mark."""
        torch.cuda.synchronize()
        torch.cuda._sleep(int(1.5 * self._queueing_s * CYCLES_PER_S))
        self._events = []
        self._started = time.perf_counter()
        self.mark()

    def mark(self) -> None:
        """Record an event."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._events.append(event)

    def seconds(self) -> list[float]:
        """The time between events."""
        self._queueing_s = time.perf_counter() - self._started
        torch.cuda.synchronize()
        return [before.elapsed_time(after) * 1e-3 for before, after in pairwise(self._events)]


def clock_for(device: torch.device | str) -> Clock:
    """The clock of a device."""
    return CudaClock() if torch.device(device).type == "cuda" else CpuClock()


def time_calls(clock: Clock, calls: list[Callable[[], object]]) -> list[float]:
    """Seconds of each call, run one after another."""
    clock.start()
    for call in calls:
        call()
        clock.mark()
    return clock.seconds()
