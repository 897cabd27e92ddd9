"""Busy neighbours: a run keeps several cores at work, so a profile is taken with others at work too.

Cores share caches and memory, and clock down together: a layer timed on a machine at rest is faster than it will be.
A neighbour is a process that trains the same model, as the other ranks of a run would.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from planner.allocator import keep_freed_memory


def default_neighbours(device: str) -> int:
    """One where there is a core for it: no pipeline has fewer than two processes. None beside a GPU."""
    return int(device == "cpu" and len(os.sched_getaffinity(0)) > 1)


@contextmanager
def busy_neighbours(path: Path, *, microbatch_size: int, count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """``count`` processes that train the model file's model until the block ends, once ``wait_until_busy`` returned."""
    command = [sys.executable, "-m", "planner.measure.neighbours", str(path), str(microbatch_size)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        for _ in range(count)
    ]
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


def wait_until_busy(started: list[subprocess.Popen[bytes]]) -> int:
    """Wait until each neighbour is at work or has ended; how many are at work."""
    return sum(bool(process.stdout and process.stdout.readline()) for process in started)


def _work(path: Path, microbatch_size: int) -> None:
    from planner.capture import capture, load_model_file
    from planner.measure.passes import Pipeline

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that measures ends this one
    torch.set_num_threads(1)
    keep_freed_memory()
    out = os.dup(1)
    os.dup2(2, 1)  # what the user's code prints is no sign of ours
    captured = capture(load_model_file(path), microbatch_size=microbatch_size)
    pipeline = Pipeline(captured, [[layer.name for layer in captured.layers]], captured.batch)
    parent = os.getppid()
    pipeline.train()
    os.write(out, b"busy\n")
    while os.getppid() == parent:
        pipeline.train()


if __name__ == "__main__":
    _work(Path(sys.argv[1]), int(sys.argv[2]))
