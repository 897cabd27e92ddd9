"""What sums over tensor ranks cost on this machine, measured over the groups that runs use.

T processes add up tensors of 1 KB to 10 MB and compute in between, as a run's ranks do. (Were they to sleep, a sum
would show how long they take to wake up.) A sum takes from the moment at which the last of them has begun until the
last has it; all read the machine's one clock.
The figures are those of the line by which the time model counts, 2(T-1) · latency + 2(T-1)/T · bytes / bandwidth.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from planner.profile import ProfiledLinks, ProfiledSums
from planner.runtime.groups import Communicators, Group
from planner.runtime.links import SIZES, fit, measure_links, start_process, told_by

STEPS, WARM_UP = 25, 5
SCRATCH_BYTES = 2_000_000
COMPUTE_S = 0.0005
"""Before each sum: about what a small layer computes between two."""


def measure_links_and_sums(device: str, *, tensor_sizes: Sequence[int]) -> ProfiledLinks | None:
    """A link between two processes here, with what sums over tensor ranks cost where such groups are asked for."""
    links = measure_links(device)
    return links and dataclasses.replace(links, sums=measure_sums(device, tensor_sizes))


def measure_sums(device: str, tensor_sizes: Sequence[int]) -> ProfiledSums | None:
    """Over the largest of these groups that has a device (on the CPU: a core) for each rank, at least two ranks.

    None where no group is asked for, or there are no two GPUs.
    """
    most = torch.cuda.device_count() if device == "cuda" else max(2, len(os.sched_getaffinity(0)))
    ranks = max((size for size in tensor_sizes if size <= most), default=1)
    if ranks == 1 and (device == "cuda" or max(tensor_sizes, default=1) == 1):
        return None
    return fitted(max(2, ranks), measured_s(device, max(2, ranks)))


def measured_s(device: str, ranks: int) -> list[float]:
    """Seconds of a sum of each of SIZES over so many processes here: medians."""
    told = told_by("planner.runtime.sums", ranks, device, str(ranks))
    seconds = []
    for size in map(str, SIZES):
        begun = [max(moments) for moments in zip(*(one["begun"][size] for one in told), strict=True)]
        ended = [max(moments) for moments in zip(*(one["ended"][size] for one in told), strict=True)]
        seconds.append(median([end - begin for begin, end in zip(begun, ended, strict=True)][WARM_UP:]))
    return seconds


def fitted(ranks: int, seconds: Sequence[float]) -> ProfiledSums:
    """Latency and bandwidth by which sums of SIZES bytes take so long."""
    call_s, seconds_per_byte = fit(SIZES, seconds)
    return ProfiledSums(
        latency_s=call_s / (2 * (ranks - 1)), bandwidth_bytes_per_s=2 * (ranks - 1) / ranks / seconds_per_byte
    )


def _main(rank: int, kind: str, ranks: int, folder: Path) -> None:
    device = start_process(rank, kind)
    store = dist.FileStore(str(folder / "store"), ranks)  # type: ignore[attr-defined]
    group = Group(Communicators(store, device=device, one_node=True).make("sums", rank, ranks))
    scratch = torch.zeros(SCRATCH_BYTES // 4, device=device)
    begun: dict[int, list[float]] = {size: [] for size in SIZES}
    ended: dict[int, list[float]] = {size: [] for size in SIZES}
    for _ in range(STEPS):
        for size in SIZES:
            row = torch.zeros(size // 4, device=device)
            until = time.perf_counter() + COMPUTE_S
            while time.perf_counter() < until:
                scratch.add_(1)
                _settle(device)
            begun[size].append(time.perf_counter())
            group.sum(row)
            _settle(device)
            ended[size].append(time.perf_counter())
    (folder / f"figures{rank}").write_text(json.dumps({"begun": begun, "ended": ended}))


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    _main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))
