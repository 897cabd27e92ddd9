#!/usr/bin/env python
"""Where another layout of ranks would have won: replicas of a rank side by side (as planned), or whole pipelines.

.venv/bin/python scripts/bench/layouts.py [--layers N]

Pipeline rank r of replica d is global rank r·D + d: all-reduces stay within a node as far as they can. The other layout
has d·P + r: activations do. For every P and D the best plan found is timed under both by the simulator; the time of the
other layout is that of the same cut and order of actions, so a search for it could do a little better still.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from rich.console import Console
from rich.table import Table

from planner.cluster import Cluster, ClusterLinks, Link, resolve
from planner.errors import InputError, NothingFitsError
from planner.profile import Profile
from planner.search import Asked, Candidate, solve
from planner.simulate import closing, costs, simulate

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))  # the chains stand there
from support.chains import chain

NVLINK = Link(latency_s=5e-6, bandwidth_bytes_per_s=200e9)
PCIE = Link(latency_s=1e-5, bandwidth_bytes_per_s=12e9)
INFINIBAND = Link(latency_s=1e-5, bandwidth_bytes_per_s=25e9)
ETHERNET = Link(latency_s=5e-5, bandwidth_bytes_per_s=1.2e9)
CLUSTERS = {
    "NVLink, InfiniBand": ClusterLinks(intra_node=NVLINK, inter_node=INFINIBAND),
    "NVLink, Ethernet": ClusterLinks(intra_node=NVLINK, inter_node=ETHERNET),
    "PCIe, Ethernet": ClusterLinks(intra_node=PCIE, inter_node=ETHERNET),
}
GIBI = 1024**3


def slowest(pairs: Iterator[tuple[int, int]], cluster: Cluster) -> Link | None:
    """The slowest link over pairs of global ranks (one tensor rank each)."""
    assert cluster.links is not None
    assert cluster.gpus_per_node is not None
    found = [
        cluster.links.intra_node
        if a // cluster.gpus_per_node == b // cluster.gpus_per_node
        else cluster.links.inter_node
        for a, b in pairs
        if a != b
    ]
    known = [link for link in found if link is not None]
    return max(known, key=lambda link: 1 / link.bandwidth_bytes_per_s) if known else None


@contextlib.contextmanager
def pipelines_side_by_side(ranks: int) -> Iterator[None]:
    """The simulator with global rank d·P + r."""

    def between(a: int, b: int, *, data: int, tensor: int, cluster: Cluster) -> Link | None:
        return slowest(((d * ranks + a, d * ranks + b) for d in range(data)), cluster)

    def ring(rank: int, *, data: int, tensor: int, cluster: Cluster) -> Link | None:
        return slowest(((d * ranks + rank, (d + 1) % data * ranks + rank) for d in range(data)), cluster)

    with mock.patch.object(costs, "link_between", between), mock.patch.object(closing, "ring_link", ring):
        yield


def plans(profile: Profile, cluster: Cluster, gpus: int, global_batch: int) -> Iterator[Candidate]:
    """The best plan found for every number of ranks and replicas that use all GPUs."""
    for data in (data for data in range(1, gpus + 1) if gpus % data == 0):
        asked = Asked(gpus=gpus, global_batch=global_batch, cluster=cluster, data=(data,), pipeline=(gpus // data,))
        with contextlib.suppress(NothingFitsError, InputError):
            yield solve(profile, asked).best


def rows(profile: Profile) -> Iterator[tuple[str, ...]]:
    """One line for each cluster, number of GPUs and memory: the best of both layouts."""
    for (name, links), (gpus, per_node), memory in (
        (pair, size, memory)
        for pair in CLUSTERS.items()
        for size in ((16, 8), (32, 8), (16, 4))
        for memory in (None, 24)
    ):
        cluster = resolve(Cluster(gpus_per_node=per_node, links=links), profile, memory * GIBI if memory else None)
        best: dict[bool, tuple[float, str]] = {}
        for plan in plans(profile, cluster, gpus, 16 * gpus):
            shape = plan.configuration
            words = f"P={shape.pipeline} D={shape.data} v={shape.virtual} b={shape.microbatch_size}"
            with pipelines_side_by_side(shape.pipeline):
                other_s = simulate(plan.job, plan.timeline.schedule, memory=False).iteration_s
            for other, seconds in ((False, plan.iteration_s), (True, other_s)):
                best[other] = min(best.get(other, (seconds, words)), (seconds, words))
        if best:
            (own_s, own), (other_s, other) = best[False], best[True]
            what = f"{name}, {gpus} GPUs, {per_node} a node" + (f", {memory} GiB" if memory else "")
            yield (what, own, f"{own_s:.3f} s", other, f"{other_s:.3f} s", f"{other_s / own_s:.3f}")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24, help="layers of the transformer-like chain")
    chosen = parser.parse_args()
    console, table = (
        Console(width=140, highlight=False),
        Table("cluster", "as planned", "", "pipelines side by side", "", "ratio"),
    )
    for row in rows(chain(chosen.layers)):
        console.print("  ".join(row), style="dim")
        table.add_row(*row)
    console.print(table)


if __name__ == "__main__":
    main()
