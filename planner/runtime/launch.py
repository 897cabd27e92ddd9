"""Starts a run: one process per rank of this machine, through PyTorch's elastic launcher, and watches over them.

A rank that raises leaves its words in the store that all machines of the run share; one that dies or hangs is named by
the launcher of its machine. Whichever comes first ends the run everywhere, and nothing is left running.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from planner.errors import RunError
from planner.runtime.board import Board, Slot, State
from planner.runtime.failure import Failure, Where, died, hung, left, place
from planner.runtime.job import RunJob
from planner.runtime.server import start_method
from planner.runtime.worker import FAILURE_KEY, STORE_PREFIX, main

POLL_S = 0.1
SILENT_S = 2.0
"""A process that has been gone so long, and of which the launcher reports no failure, ended with code 0."""
TELL_S = 5.0
OWN_S = timedelta(seconds=20)
"""How long node 0 tries to reach its own store at the address by which the others are to reach it."""
START_FACTOR = 10
"""Starting may take this many time-outs: capturing a large model shows no progress for long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """The machines of a run, and where they meet: an address of the first one. Port 0: any that is free."""

    count: int = 1
    rank: int = 0
    host: str = "127.0.0.1"
    port: int = 0


class Listener(Protocol):
    """Who is told how a run goes."""

    def step(self, step: int, loss: float, seconds: float) -> None:
        """A step has ended; told on the machine of the last stage."""

    def remark(self, text: str) -> None:
        """Something worth knowing, before anything starts."""

    def details(self, text: str) -> None:
        """The traceback of what ends the run, or the stack of what hangs."""


def launch(
    job: RunJob, nodes: Nodes, *, timeout_s: Callable[[float | None], float], listener: Listener
) -> list[dict[str, Any]]:
    """Run a job to its end: what each process of the whole run told, by global rank; nothing on further machines.

    ``timeout_s``: seconds without a sign of progress after which a run is stuck, given those of the longest step so
    far, or None before there is one. Raises the first failure's own error; KeyboardInterrupt on Ctrl-C.
    """
    num_local = job.num_processes // nodes.count
    board = Board(job.folder / "board", num_processes=num_local, num_steps=job.steps)
    server = meet(nodes)
    store = PrefixStore(STORE_PREFIX, server)
    watch = _Watch(job, nodes, board, server, timeout_s=timeout_s, listener=listener)
    with _quiet_elastic(), watch:
        failure = _run(job, nodes, num_local, server.port, watch)
    if watch.fault is not None:
        raise watch.fault
    if failure is not None:
        watch.wait_until_told()
        listener.details(failure.details)
        raise failure.error()
    if nodes.rank:
        return []
    return [json.loads(store.get(f"result/{rank}")) for rank in range(job.num_processes)]


def _run(job: RunJob, nodes: Nodes, num_local: int, port: int, watch: _Watch) -> Failure | None:
    """Start the processes and wait for their end."""
    config = LaunchConfig(
        min_nodes=nodes.count,
        max_nodes=nodes.count,
        nproc_per_node=num_local,
        run_id="pipeplan",
        rdzv_backend="static",
        rdzv_endpoint=f"{nodes.host}:{port}",
        rdzv_configs={"rank": nodes.rank, "timeout": 900},
        max_restarts=0,
        monitor_interval=POLL_S,
        start_method=start_method(),
        logs_specs=DefaultLogsSpecs(log_dir=str(job.folder)),
        local_addr=nodes.host if nodes.count == 1 else None,
        signals_to_handle="SIGTERM,SIGHUP,SIGQUIT",  # Ctrl-C is Python's own KeyboardInterrupt
    )
    try:
        elastic_launch(config, main)(job)
    except ChildFailedError as error:
        return watch.first_failure(error)
    except SignalException as error:
        raise KeyboardInterrupt from error
    except RuntimeError as error:  # the store of another machine is gone
        return watch.failure or Failure(message=f"lost contact with the other machines: {error}")
    finally:
        watch.kill()
    return None


def meet(nodes: Nodes) -> TCPStore:
    """The store that the launcher shares (multi_tenant): it finds this process's server by its port.

    A free port is taken here and handed over: torch, given port 0, leaves a former server's entry in its table where
    the port comes round again, and the launcher would then start a second server on it (EADDRINUSE).
    """
    try:
        listening = socket.create_server((nodes.host, 0)) if not nodes.port else None
        store = TCPStore(
            nodes.host,
            nodes.port if listening is None else listening.getsockname()[1],
            is_master=nodes.rank == 0,
            wait_for_workers=False,
            multi_tenant=True,
            timeout=timedelta(minutes=10) if nodes.rank else OWN_S,
            master_listen_fd=None if listening is None else listening.detach(),
        )
        store.set_timeout(timedelta(minutes=10))
        return store
    except (RuntimeError, ValueError, OSError) as error:
        words = str(error).splitlines()[0]
        raise RunError(
            f"node {nodes.rank} cannot meet the others at {nodes.host}:{nodes.port} ({words})",
            hint="check --rdzv-endpoint" + (", and that node 0 is started" if nodes.rank else ", an address of node 0"),
        ) from None


@contextmanager
def _quiet_elastic() -> Iterator[None]:
    """Keep the launcher's own log lines from the terminal, and give back the signals it takes."""
    disabled = logging.root.manager.disable
    taken = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    handlers = [signal.getsignal(number) for number in taken]
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(disabled)
        for number, handler in zip(taken, handlers, strict=True):
            signal.signal(number, handler)


# --- watching ---------------------------------------------------------------------------------------------------------


class _Watch:
    """A thread beside the launcher: shows progress, sees failures told elsewhere, and names what hangs here."""

    def __init__(
        self,
        job: RunJob,
        nodes: Nodes,
        board: Board,
        server: TCPStore,
        *,
        timeout_s: Callable[[float | None], float],
        listener: Listener,
    ) -> None:
        self._job = job
        self._nodes = nodes
        self._board = board
        self._store: Store = PrefixStore(STORE_PREFIX, server.clone())  # type: ignore[attr-defined]
        self._timeout_s = timeout_s
        self._listener = listener
        self._num_local = job.num_processes // nodes.count
        self._first = nodes.rank * self._num_local
        self._signs = [0] * self._num_local
        self._moved = [time.monotonic()] * self._num_local
        self._there = [time.monotonic()] * self._num_local
        self._elsewhere: dict[int, bytes] = {}
        self._elsewhere_moved = time.monotonic()
        self._steps_seen = job.start
        self._longest_s: float | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watch", daemon=True)
        self.failure: Failure | None = None
        self.fault: BaseException | None = None
        """What the listener raised, as where nobody reads on: it ends the run, as nobody would see a hang any more."""

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        if self.fault is None:
            self._show_steps()

    def first_failure(self, error: ChildFailedError) -> Failure:
        """What ended the run: what was told first, or else that a process of this machine died."""
        rank, failure = error.get_first_failure()
        if failure.exitcode != 1:  # a rank that tells its failure ends with 1
            self._tell(died(failure.exitcode, self._place(rank - self._first)))
        with suppress(RuntimeError):
            if self._store.check([FAILURE_KEY]):
                return Failure.from_json(self._store.get(FAILURE_KEY))
        return self.failure or died(failure.exitcode, self._place(rank - self._first))

    def kill(self) -> None:
        """End what still runs here, stopped processes too."""
        for process in range(self._num_local):
            pid = self._board.read(process).pid
            if pid and _is_child(pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def wait_until_told(self) -> None:
        """Node 0 holds the store: it goes once the other machines have read why, or after a moment."""
        until = time.monotonic() + TELL_S
        with suppress(RuntimeError):
            self._store.set(f"told/{self._nodes.rank}", "")
            others = [f"told/{node}" for node in range(self._nodes.count)]
            while self._nodes.rank == 0 and time.monotonic() < until and not self._store.check(others):
                time.sleep(POLL_S)

    def _watch(self) -> None:
        while not self._stop.wait(POLL_S):
            try:
                self._show_steps()
            except BaseException as error:  # noqa: BLE001 - whatever it is, it must not end this thread alone
                self.fault = error
                self.kill()
                return
            try:
                if self._store.check([FAILURE_KEY]):
                    self.failure = Failure.from_json(self._store.get(FAILURE_KEY))
                    self.kill()
                    return
                self._look_for_progress()
            except RuntimeError as error:
                if not self._stop.is_set():
                    self.failure = Failure(message=f"lost contact with node 0: {str(error).splitlines()[0]}")
                    self.kill()
                return

    def _show_steps(self) -> None:
        process = self._loss_process()
        if process is None:
            return
        done = self._board.read(process).steps_done
        for step in range(self._steps_seen, done):
            loss, seconds = self._board.row(process, step)
            self._longest_s = max(self._longest_s or 0.0, seconds)
            self._listener.step(step, loss, seconds)
        self._steps_seen = max(self._steps_seen, done)

    def _loss_process(self) -> int | None:
        """The process of this machine that makes the loss: of the last stage and the first replica."""
        sizes = self._job.plan.parallel
        process = self._job.ranks[-1] * sizes.data * sizes.tensor - self._first
        return process if 0 <= process < self._num_local else None

    def _look_for_progress(self) -> None:
        now = time.monotonic()
        slots = [self._board.read(process) for process in range(self._num_local)]
        for process, slot in enumerate(slots):
            if slot.signs != self._signs[process]:
                self._signs[process], self._moved[process] = slot.signs, now
            if not slot.pid or slot.state is State.ENDING or not _has_ended(slot.pid):
                self._there[process] = now
            elif now - self._there[process] > SILENT_S:  # else the launcher has seen its exit code, and says so
                self._tell(left(self._place(process)))
        if self._nodes.count > 1:
            self._exchange_progress(now)
        limit = self._timeout_s(self._longest_s)
        if any(slot.state is State.STARTING for slot in slots):
            limit *= START_FACTOR
        if now - max(*self._moved, self._elsewhere_moved if self._nodes.count > 1 else 0.0) > limit:
            self._tell_hung(slots, limit)

    def _exchange_progress(self, now: float) -> None:
        """Tell the other machines that there is progress here, and see whether there is there."""
        self._store.set(f"signs/{self._nodes.rank}", str(sum(self._signs)))
        for node in range(self._nodes.count):
            key = f"signs/{node}"
            if node != self._nodes.rank and self._store.check([key]):
                seen = self._store.get(key)
                if self._elsewhere.get(node) != seen:
                    self._elsewhere[node], self._elsewhere_moved = seen, now

    def _tell_hung(self, slots: list[Slot], limit: float) -> None:
        """Name the process that the others wait for: a stopped one, else one that is not waiting, the longest still.

        A machine where all wait leaves the word to the others for a moment.
        """
        stopped = [process for process, slot in enumerate(slots) if _is_stopped(slot.pid)]
        at_work = [process for process, slot in enumerate(slots) if slot.state is not State.WAITING]
        if not stopped and not at_work and self._nodes.count > 1 and self._stop.wait(2.0):
            return
        suspects = stopped or at_work or list(range(self._num_local))
        process = min(suspects, key=lambda suspect: self._moved[suspect])
        stack = "" if stopped else self._stack_of(process, slots[process].pid)
        self._tell(hung(self._place(process), timeout_s=limit, stopped=bool(stopped), stack=stack))

    def _stack_of(self, process: int, pid: int) -> str:
        """Where a process is in its Python code: it writes that down on a signal, even when it computes for ever."""
        if not pid:
            return ""  # it has not begun; a signal to 0 would go to this process and its whole group
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGUSR1)
        self._stop.wait(0.5)
        path = self._job.folder / f"stack{process}"
        return path.read_text() if path.exists() else ""

    def _place(self, process: int) -> str:
        return place(Where.of(self._job, self._first + process), self._board.read(process))

    def _tell(self, failure: Failure) -> None:
        with suppress(RuntimeError):
            self._store.compare_set(FAILURE_KEY, "", failure.to_json())


def _is_stopped(pid: int) -> bool:
    return _process_state(pid) in ("T", "t")


def _has_ended(pid: int) -> bool:
    return Path("/proc/self/stat").exists() and _process_state(pid) in ("", "Z", "X")


def _process_state(pid: int) -> str:
    """The letter that Linux has for it; empty where there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def _is_child(pid: int) -> bool:
    return any(child.pid == pid for child in multiprocessing.active_children())
