"""What a link between two processes of this machine costs, measured over the transport that runs use.

Two processes play ping-pong with messages of 1 KB to 10 MB (half a round trip is one message), and then compute while
messages pass both ways: what a message adds to the compute tells whether transfers go on beside it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean, median

import numpy
import torch
import torch.distributed as dist

from planner.profile import ProfiledLinks
from planner.runtime.messages import Key, Kind
from planner.runtime.transport import Communicators, Transport

SIZES = (4, 1_000, 10_000, 30_000, 100_000, 300_000, 1_000_000, 3_000_000, 10_000_000)
"""Bytes of the messages that play ping-pong; the first one only brings the two together."""
BESIDE = (100_000, 3_000_000)
"""Bytes of the messages that pass beside compute."""
STEPS, WARM_UP = 25, 5


def measure_links(device: str) -> ProfiledLinks | None:
    """Latency, bandwidth and overlap between two processes here (two GPUs on CUDA); None where there are no two."""
    if device == "cuda" and torch.cuda.device_count() < 2:
        return None
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        started = [
            subprocess.Popen(
                [sys.executable, "-m", "planner.runtime.links", str(rank), device, folder],
                env=environment,
                stdin=subprocess.DEVNULL,
            )
            for rank in (0, 1)
        ]
        try:
            codes = [process.wait(timeout=300) for process in started]
        finally:
            for process in started:
                process.kill()
                process.wait()
        if any(codes):
            raise ChildProcessError(f"the processes that measure the link ended with codes {codes}")
        figures = json.loads((Path(folder) / "figures").read_text())
    latency_s, seconds_per_byte = fit(figures["sizes"], figures["seconds"])
    return ProfiledLinks(
        latency_s=latency_s, bandwidth_bytes_per_s=1 / seconds_per_byte, overlap=mean(figures["added"]) < 0.5
    )


def fit(sizes: list[int], seconds: list[float]) -> tuple[float, float]:
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
        names = [*map(str, SIZES), *(f"beside {size}" for size in BESIDE)]
        self._transport = Transport(
            Communicators(store, device=device, one_node=True),
            prefix="links",
            rank=rank,
            pairs=((0, 1), (1, 0)),
            inbox={self._other: tuple(Kind("F", name, rank) for name in names)},
            windows={self._other: 2},
            arrived={self._other: (0,) * len(names)},
            device=device,
        )
        self._messages = {name: torch.zeros(int(name.split()[-1]) // 4, device=device) for name in names}
        self._place = {name: place for place, name in enumerate(names)}
        self._matrix = torch.randn(256, 256, device=device)

    def _send(self, name: str) -> None:
        self._transport.send(self._other, Key("F", name, self._other, 0), self._messages[name])

    def _take(self, name: str) -> None:
        self._transport.take(self._other, self._place[name])
        self._transport.post_ahead()
        self._settle()

    def _settle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def _compute(self, rounds: int) -> None:
        for _ in range(rounds):
            torch.mm(self._matrix, self._matrix)
        self._settle()

    def _step(self, rounds: dict[int, int]) -> dict[str, float]:
        """Seconds of half a ping-pong of each size, and of an exchange of each size beside rounds of compute."""
        seconds: dict[str, float] = {}
        for size in SIZES:
            name = str(size)
            start = time.perf_counter()
            for turn in (self._send, self._take) if self._rank == 0 else (self._take, self._send):
                turn(name)
            seconds[name] = (time.perf_counter() - start) / 2
        for size in BESIDE:
            name = f"beside {size}"
            start = time.perf_counter()
            self._send(name)
            self._compute(rounds.get(size, 0))
            self._take(name)
            seconds[name] = time.perf_counter() - start
        self._transport.next_step()
        return seconds

    def _steps(self, rounds: dict[int, int]) -> dict[str, float]:
        rows = [self._step(rounds) for _ in range(STEPS)][WARM_UP:]
        return {name: median(row[name] for row in rows) for name in rows[0]}

    def play(self) -> dict[str, object]:
        """All steps: without compute, then beside compute that lasts twice an exchange."""
        self._transport.begin(2 * STEPS)
        bare = self._steps({})
        rounds = {size: self._rounds(2 * bare[f"beside {size}"]) for size in BESIDE}
        loaded = self._steps(rounds)
        added = []
        for size in BESIDE:
            alone = self._compute_s(rounds[size])
            added.append((loaded[f"beside {size}"] - alone) / bare[f"beside {size}"])
        self._transport.close()
        return {"sizes": SIZES[1:], "seconds": [bare[str(size)] for size in SIZES[1:]], "added": added}

    def _rounds(self, seconds: float) -> int:
        return max(1, round(100 * seconds / self._compute_s(100)))

    def _compute_s(self, rounds: int) -> float:
        seconds = []
        for _ in range(STEPS):
            start = time.perf_counter()
            self._compute(rounds)
            seconds.append(time.perf_counter() - start)
        return median(seconds)


def _main(rank: int, kind: str, folder: Path) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that measures ends this one
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    figures = _Player(rank, device, folder).play()
    if rank == 0:
        (folder / "figures").write_text(json.dumps(figures))


if __name__ == "__main__":
    _main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
