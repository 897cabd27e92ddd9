#!/usr/bin/env python
"""How long the search takes: a table on stdout.  scripts/bench/search.py [--quick]."""

from __future__ import annotations

import itertools
import random
import sys
import time
from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from planner.cluster import Cluster, resolve
from planner.graph import LayerGraph
from planner.profile import Cost, Device, Edge, EdgeTensor, Layer, OptimizerCost, Profile, ProfiledModel
from planner.schedules import ScheduleName
from planner.search import Asked, solve
from planner.search.figures import Figures, LayerFigures
from planner.search.lattice import lattice_of
from planner.search.proof import prove
from planner.search.suffix import Shape, SuffixBound

GIBI = 1024**3


def chain(num_layers: int, *, spread: float = 0.3, sizes: tuple[int, ...] = (1, 2, 4), seed: int = 0) -> Profile:
    """A transformer-like chain: an embedding, blocks that differ by ``spread``, a head of three blocks' work."""
    rng = random.Random(seed)
    layers = []
    for index in range(num_layers):
        work = 3.0 if index == num_layers - 1 else 0.1 if index == 0 else rng.uniform(1 - spread, 1 + spread)
        parameters = 400 * 2**20 if index in (0, num_layers - 1) else 100 * 2**20
        costs = tuple(
            Cost(
                microbatch_size=size,
                forward_s=1e-3 * work * (0.2 + 0.8 * size),
                backward_input_s=1.1e-3 * work * (0.2 + 0.8 * size),
                backward_weight_s=0.9e-3 * work * (0.2 + 0.8 * size),
                saved_bytes=64 * 2**20 * size,
                saved_for_weight_bytes=40 * 2**20 * size,
                workspace_bytes=16 * 2**20 * size,
            )
            for size in sizes
        )
        layers.append(
            Layer(
                name=f"layer{index}",
                kind="block",
                modules=(),
                parameter_bytes=parameters,
                trainable_bytes=parameters,
                buffer_bytes=0,
                costs=costs,
            )
        )
    hidden = EdgeTensor(name="hidden", bytes_per_sample=4 * 2**20, fixed_bytes=0, grad=True, saved=True)
    return Profile(
        model=ProfiledModel(name=f"chain{num_layers}", source="chain.py", fingerprint="0"),
        device=Device(kind="estimate", name="none", memory_bytes=0, software={}),
        provenance="estimated",
        dtype="bfloat16",
        gradient_bytes_per_trainable_byte=1.0,
        optimizer=OptimizerCost(name="adamw", state_bytes_per_trainable_byte=4.0, step_s_per_trainable_byte=1e-12),
        layers=tuple(layers),
        edges=tuple(
            Edge(source=f"layer{index}", target=f"layer{index + 1}", tensors=(hidden,))
            for index in range(num_layers - 1)
        ),
    )


def proofs() -> Iterator[tuple[str, ...]]:
    """One cut: bound by the recursion, windows, and the ILP's own proof."""
    for num_layers, ranks in ((98, 8), (200, 32), (200, 64)):
        graph = LayerGraph.of(chain(num_layers, sizes=(1,)))
        cluster = resolve(Cluster(), graph.profile)
        began = time.perf_counter()
        layers = LayerFigures(graph, microbatch_size=1, tensor=1, cluster=cluster)
        lattice = lattice_of(graph)
        assert lattice is not None
        shape = Shape(num_ranks=ranks, num_microbatches=4 * ranks, fused=True, cluster=cluster)
        suffix = SuffixBound(Figures(layers, lattice), shape)
        below = suffix.bound_s * 1.0001
        windows = suffix.windows(below)
        assert windows is not None
        solved = prove(layers, shape, windows=windows, below_s=below)
        took = time.perf_counter() - began
        choices = sum(last - first for first, last in windows)
        yield (
            f"cut of {num_layers} layers into {ranks}",
            f"{took:.2f} s",
            f"{choices} binaries, {solved.nodes} nodes",
            f"ILP {solved.bound:.6g} to {solved.value:.6g}, recursion {suffix.bound_s:.6g}",
        )


def searches(*, quick: bool) -> Iterator[tuple[str, ...]]:
    """Whole searches."""
    cases = [(50, 8, None), (98, 8, None), (98, 8, 24), (200, 64, None), (200, 64, 16)]
    if not quick:
        cases += [(1000, 64, None), (1000, 1024, None), (1000, 1024, 16), (1000, 4096, None)]
    for num_layers, gpus, memory in cases:
        profile = chain(num_layers)
        asked = Asked(
            gpus=gpus,
            global_batch=8 * gpus,
            cluster=resolve(Cluster(), profile, memory * GIBI if memory else None),
            schedules=(ScheduleName.GPIPE, ScheduleName.ONE_F_ONE_B),
        )
        began = time.perf_counter()
        found = solve(profile, asked)
        took = time.perf_counter() - began
        shape = found.best.configuration
        yield (
            f"{num_layers} layers, {gpus} GPUs" + (f", {memory} GiB" if memory else ""),
            f"{took:.2f} s",
            f"{found.configurations} configurations, {found.solved} solved",
            f"P={shape.pipeline} b={shape.microbatch_size}: gap {found.gap:.2%}, "
            f"{'proven' if found.proven else 'not proven'}",
        )


def main() -> None:
    """Print the table, a row as it is ready."""
    quick = "--quick" in sys.argv[1:]
    console = Console(width=140)
    table = Table("what", "time", "size", "result")
    for row in itertools.chain(proofs(), searches(quick=quick)):
        table.add_row(*row)
        console.print("  ".join(row), highlight=False)
    console.print(table)


if __name__ == "__main__":
    main()
