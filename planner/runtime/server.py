"""The server that a run's processes are forked from: it has imported all they need, so they start in no time."""

from __future__ import annotations

import multiprocessing
from multiprocessing import forkserver


def start_method() -> str:
    """How the processes of a run start."""
    return "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"


def start_server() -> None:
    """Start the server now; it imports while the launcher goes on. The environment it starts with is the processes'."""
    if start_method() == "forkserver":
        multiprocessing.set_forkserver_preload(["planner.runtime.preload"])
        forkserver.ensure_running()
