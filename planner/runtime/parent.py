"""The processes of a run end with the launcher that started them."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from contextlib import suppress
from multiprocessing import connection, parent_process
from pathlib import Path

from planner.runtime.board import Board


def end_with_parent(folder: Path, num_local: int) -> None:
    """A launcher that is killed takes its processes along, those too that are stopped, and the run's folder."""
    parent = parent_process()
    if parent is None:
        return

    def watch() -> None:
        connection.wait([parent.sentinel])
        with suppress(OSError):  # no board: the launcher has tidied up itself
            board = Board(folder / "board", num_processes=num_local, num_steps=0)
            others = {board.read(process).pid for process in range(num_local)} - {0, os.getpid()}
            shutil.rmtree(folder, ignore_errors=True)
            for pid in others:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()
