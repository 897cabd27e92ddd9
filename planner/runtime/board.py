"""The board: where each process of a machine says what it is doing, in memory that outlives it.

The launcher reads it to show progress, to tell a hang from a long action, and to say what a process that died was at.
Writing costs a process less than a microsecond an action.
"""

from __future__ import annotations

import mmap
import struct
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

_SLOT = struct.Struct("=qqqiii")  # pid, signs of progress, steps done, step, position, state
_ROW = struct.Struct("=dd")  # loss, seconds
_SLOT_BYTES = 64


class State(IntEnum):
    """What a process is at."""

    STARTING = 0
    DATA = 1
    WAITING = 2
    RUNNING = 3
    GRADIENTS = 4
    OPTIMIZER = 5
    VERIFYING = 6
    ENDING = 7
    CHECKPOINT = 8


class Slot(NamedTuple):
    """One process: ``position`` is that of the action in its rank's order."""

    pid: int
    signs: int
    steps_done: int
    step: int
    position: int
    state: State


class Board:
    """Slots of the processes of one machine, and a table of loss and time per process and step."""

    def __init__(self, path: Path, *, num_processes: int, num_steps: int) -> None:
        """Open the file; made, and filled with zeros, where it is not there yet."""
        self._num_steps = num_steps
        size = num_processes * (_SLOT_BYTES + num_steps * _ROW.size)
        self._table = num_processes * _SLOT_BYTES
        with path.open("r+b" if path.exists() else "w+b") as file:
            if path.stat().st_size < size:
                file.truncate(size)
            self._memory = mmap.mmap(file.fileno(), size)

    def read(self, process: int) -> Slot:
        """What a process said last."""
        slot = Slot(*_SLOT.unpack_from(self._memory, process * _SLOT_BYTES))
        return slot._replace(state=State(slot.state))

    def row(self, process: int, step: int) -> tuple[float, float]:
        """Loss (the mean over the step's samples) and seconds of a step, as the process wrote them."""
        loss, seconds = _ROW.unpack_from(self._memory, self._row(process, step))
        return loss, seconds

    def _row(self, process: int, step: int) -> int:
        return self._table + (process * self._num_steps + step) * _ROW.size

    def quiet(self, process: int) -> Writer:
        """The slot of a process that trains to compare."""
        return Quiet(self, self._memory, process)

    def writer(self, process: int) -> Writer:
        """The slot of a process, for itself to write."""
        return Writer(self, self._memory, process)


class Writer:
    """A process's own slot."""

    def __init__(self, board: Board, memory: mmap.mmap, process: int) -> None:
        self._board = board
        self._memory = memory
        self._process = process
        slot = memoryview(memory)[process * _SLOT_BYTES : (process + 1) * _SLOT_BYTES]
        self._counts = slot[:24].cast("q")  # pid, signs of progress, steps done
        self._place = slot[24:36].cast("i")  # step, position, state
        self._signs = self._counts[1]

    def start(self, pid: int) -> None:
        """Say which process this is."""
        self._counts[0] = pid
        self.at(State.STARTING)

    def at(self, state: State, position: int = -1) -> None:
        """Say what the process is at, which is a sign of progress."""
        place = self._place
        place[1] = position
        place[2] = state
        self._signs += 1
        self._counts[1] = self._signs

    def step(self, step: int) -> None:
        """Say which step comes now."""
        self._place[0] = step
        self.at(State.DATA)

    def done(self, step: int, *, loss: float, seconds: float) -> None:
        """Write a step's row."""
        _ROW.pack_into(self._memory, self._board._row(self._process, step), loss, seconds)
        self._counts[2] = step + 1


class Quiet(Writer):
    """Says only that there is progress, whatever the process is at."""

    def at(self, state: State, position: int = -1) -> None:
        """A sign of progress in training to compare."""
        super().at(State.VERIFYING)
