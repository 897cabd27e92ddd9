"""What a link between two processes of this machine costs, measured over the transport that runs use.

Two processes send each other messages of 1 KB to 10 MB, by turns, as a run's ranks do: some time apart, so that the
receiver sleeps until its message comes and both find their caches cold. A message takes from the moment at which it is
handed over until its receiver has it; both read the machine's one clock. (A ping-pong without pauses shows a third of
that latency.) Then they compute while messages pass both ways: what a message adds to the compute tells whether
transfers go on beside it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy
import torch
import torch.distributed as dist

from planner.allocator import keep_freed_memory
from planner.profile import ProfiledLinks
from planner.runtime.groups import Communicators
from planner.runtime.messages import Key, Kind
from planner.runtime.transport import Transport

SIZES = (1_000, 10_000, 100_000, 1_000_000, 10_000_000)
"""Bytes of the messages that are timed alone."""
BESIDE = (100_000, 3_000_000)
"""Bytes of the messages that pass beside compute."""
STEPS, WARM_UP = 25, 5
ALONE_STEPS = 15
SCRATCH_BYTES = 2_000_000
PAUSE_S = 0.015
"""Before each message that is timed alone: about what a stage computes between two messages."""


def measure_links(device: str) -> ProfiledLinks | None:
    """Latency, bandwidth and overlap between two processes here (two GPUs on CUDA); None where there are no two."""
    if device == "cuda" and torch.cuda.device_count() < 2:
        return None
    told = told_by("planner.runtime.links", 2, device)
    seconds = [median(_durations(told, size)) for size in SIZES]
    latency_s, seconds_per_byte = fit(SIZES, seconds)
    overlap = mean([*told[0]["added"], *told[1]["added"]]) < 0.5
    return ProfiledLinks(latency_s=latency_s, bandwidth_bytes_per_s=1 / seconds_per_byte, overlap=overlap)


def told_by(module: str, count: int, *words: str) -> list[Mapping[str, Any]]:
    """What so many processes of a module of ours write down, by rank; each is given its rank, the words, a folder."""
    with tempfile.TemporaryDirectory() as folder:
        started = [
            subprocess.Popen(
                [sys.executable, "-m", module, str(rank), *words, folder],
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
            )
            for rank in range(count)
        ]
        try:
            codes = [process.wait(timeout=300) for process in started]
        finally:
            for process in started:
                process.kill()
                process.wait()
        if any(codes):
            raise ChildProcessError(f"the processes that measure the link ended with codes {codes}")
        return [json.loads((Path(folder) / f"figures{rank}").read_text()) for rank in range(count)]


def _durations(told: Sequence[Mapping[str, Any]], size: int) -> list[float]:
    """Of all messages of a size, from handing over until taken, both ways."""
    found = []
    for sender, receiver in ((0, 1), (1, 0)):
        handed, taken = told[sender]["handed"][str(size)], told[receiver]["taken"][str(size)]
        found += [after - before for before, after in zip(handed, taken, strict=True)][WARM_UP:]
    return found


def fit(sizes: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """Latency and seconds per byte of the line that is nearest to the measured points by relative error."""
    weight = 1 / numpy.asarray(seconds)
    rows = numpy.stack([weight, weight * numpy.asarray(sizes)], axis=1)
    latency_s, seconds_per_byte = numpy.linalg.lstsq(rows, numpy.ones(len(sizes)), rcond=None)[0]
    if latency_s < 0:
        latency_s = 0.0
        seconds_per_byte = 1 / float(numpy.mean(weight * numpy.asarray(sizes)))
    return float(latency_s), float(seconds_per_byte)


# --- the two processes ------------------------------------------------------------------------------------------------


class _Player:
    """One of the two processes."""

    def __init__(self, rank: int, device: torch.device, folder: Path) -> None:
        self._rank, self._other, self._device = rank, 1 - rank, device
        store = dist.FileStore(str(folder / "store"), 2)  # type: ignore[attr-defined]
        self._communicators = Communicators(store, device=device, one_node=True)
        self._matrix = torch.randn(256, 256, device=device)
        self._scratch = torch.zeros(SCRATCH_BYTES // 4, device=device)

    def _link(self, name: str, sizes: Sequence[int]) -> Transport:
        """A link in both directions over which messages of these sizes pass in each step."""
        return Transport(
            self._communicators,
            prefix=name,
            rank=self._rank,
            pairs=((0, 1), (1, 0)),
            inbox={self._other: tuple(Kind("F", str(size), self._rank) for size in sizes)},
            device=self._device,
        )

    def _send(self, link: Transport, size: int) -> float:
        """Hand a message over; the moment before."""
        message = torch.zeros(size // 4, device=self._device)
        self._settle()
        moment = time.perf_counter()
        link.send(self._other, Key("F", str(size), self._other, 0), message)
        return moment

    def _between(self) -> None:
        """What a stage's compute leaves behind: caches full of other things."""
        self._scratch.add_(1)
        self._settle()

    def _settle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def _compute(self, rounds: int) -> None:
        for _ in range(rounds):
            torch.mm(self._matrix, self._matrix)
        self._settle()

    def _alone(self) -> tuple[dict[int, list[float]], dict[int, list[float]]]:
        """By size: the moments at which messages were handed over here, and at which the other's were there."""
        link = self._link("alone", SIZES)
        handed: dict[int, list[float]] = {size: [] for size in SIZES}
        taken: dict[int, list[float]] = {size: [] for size in SIZES}
        for _ in range(ALONE_STEPS):
            for place, size in enumerate(SIZES):
                for turn in (0, 1):
                    if turn != self._rank:
                        link.post(self._other, place + 1)
                    self._between()
                    if turn == self._rank:
                        time.sleep(PAUSE_S)
                        handed[size].append(self._send(link, size))
                    else:
                        link.take(self._other, place)
                        self._settle()
                        taken[size].append(time.perf_counter())
            link.next_step()
        link.close()
        return handed, taken

    def _beside(self, link: Transport, rounds: Mapping[int, int]) -> dict[int, float]:
        """Seconds of an exchange of each size beside rounds of compute: medians."""
        rows: dict[int, list[float]] = {size: [] for size in BESIDE}
        for _ in range(STEPS):
            for place, size in enumerate(BESIDE):
                link.post(self._other, place + 1)
                start = self._send(link, size)
                self._compute(rounds.get(size, 0))
                link.take(self._other, place)
                self._settle()
                rows[size].append(time.perf_counter() - start)
            link.next_step()
        return {size: median(row[WARM_UP:]) for size, row in rows.items()}

    def play(self) -> dict[str, object]:
        """Messages alone; exchanges without compute, then beside compute that lasts twice as long."""
        handed, taken = self._alone()
        link = self._link("beside", BESIDE)
        bare = self._beside(link, {})
        rounds = {size: self._rounds(2 * bare[size]) for size in BESIDE}
        loaded = self._beside(link, rounds)
        added = [(loaded[size] - self._compute_s(rounds[size])) / bare[size] for size in BESIDE]
        link.close()
        return {"handed": handed, "taken": taken, "added": added}

    def _rounds(self, seconds: float) -> int:
        return max(1, round(100 * seconds / self._compute_s(100)))

    def _compute_s(self, rounds: int) -> float:
        seconds = []
        for _ in range(STEPS):
            start = time.perf_counter()
            self._compute(rounds)
            seconds.append(time.perf_counter() - start)
        return median(seconds)


def start_process(rank: int, kind: str) -> torch.device:
    """The device of a process that measures; the one that started it ends it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    keep_freed_memory()
    device = torch.device("cuda", rank) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    return device


def _main(rank: int, kind: str, folder: Path) -> None:
    figures = _Player(rank, start_process(rank, kind), folder).play()
    (folder / f"figures{rank}").write_text(json.dumps(figures))


if __name__ == "__main__":
    _main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
