"""Where nothing fits: the cut that comes closest, what it lacks and where, and the smallest change that would do."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from planner.cluster import memory_limit
from planner.errors import NothingFitsError
from planner.graph import LayerGraph
from planner.record import record
from planner.schedules import Placement, ScheduleName
from planner.search.depth import Depths1F1B
from planner.search.figures import Figures, LayerFigures
from planner.search.job import job_of_cut
from planner.search.lattice import Floats, Lattice, along, lattice_of
from planner.search.space import Asked, Configuration, configurations
from planner.simulate import Walk, simulate
from planner.units import format_bytes


@record
class Missing:
    """What a rank of the closest plan lacks; ``stage`` is its stage with the most in it."""

    rank: int
    stage: int
    bytes: int


class NoPlanFitsError(NothingFitsError):
    """No plan fits; with what the closest lacks, and the smallest change that would fit."""

    def __init__(self, message: str, *, hint: str, missing: tuple[Missing, ...], smallest_change: str) -> None:
        super().__init__(message, hint=hint)
        self.missing = missing
        self.smallest_change = smallest_change


def no_plan_fits(graph: LayerGraph, asked: Asked) -> NoPlanFitsError:
    """The error that says by how much nothing fits, and what would help."""
    limit = memory_limit(asked.cluster) or 0
    lattice = lattice_of(graph) or along(range(len(graph)))
    found = [
        (_needs(graph, asked, lattice, configuration), configuration)
        for configuration in _widest(configurations(graph, asked))
    ]
    needs, configuration = min(found, key=lambda entry: max(entry[0]))
    missing = tuple(
        Missing(rank=rank, stage=rank, bytes=need - limit) for rank, need in enumerate(needs) if need > limit
    )
    if not missing:  # it fits, yet no cut that was timed did: say so rather than nothing
        missing = (Missing(rank=int(np.argmax(needs)), stage=int(np.argmax(needs)), bytes=0),)
    worst = max(missing, key=lambda entry: entry.bytes)
    change = _smallest_change(graph, asked, lattice, configuration, max(needs))
    return NoPlanFitsError(
        f"no plan fits: at its closest ({configuration.pipeline} stages, micro-batches of "
        f"{configuration.microbatch_size}) rank {worst.rank}, stage {worst.stage}, needs "
        f"{format_bytes(worst.bytes + limit)}, {format_bytes(worst.bytes)} ({worst.bytes} bytes) more than the "
        f"{format_bytes(limit)} that a rank may use",
        hint=change,
        missing=missing,
        smallest_change=change,
    )


def _widest(given: tuple[Configuration, ...]) -> list[Configuration]:
    """Per micro-batch size the configuration with the most ranks: it needs the least on each."""
    most: dict[int, Configuration] = {}
    for configuration in given:
        best = most.get(configuration.microbatch_size)
        if best is None or configuration.pipeline > best.pipeline:
            most[configuration.microbatch_size] = configuration
    return list(most.values())


def _needs(graph: LayerGraph, asked: Asked, lattice: Lattice, configuration: Configuration) -> list[int]:
    """Peak bytes of every rank in the cut whose largest is least, with as few micro-batches in flight as can be.

    Under GPipe alone all are; the cut is then that with the least for one.
    """
    layers = LayerFigures(
        graph,
        microbatch_size=configuration.microbatch_size,
        tensor=configuration.tensor,
        cluster=asked.cluster,
    )
    cut = _leanest_cut(Figures(layers, lattice), configuration.pipeline)
    names = [[graph.names[layer] for layer in lattice.layers(*step)] for step in cut]
    recompute = (asked.recompute == "all",) * len(names)
    walk = Walk(job_of_cut(graph, asked, configuration, names, recompute))
    deep = asked.schedules == (ScheduleName.GPIPE,)
    depths = (configuration.num_microbatches if deep else 1,) * configuration.pipeline
    timeline = simulate(walk, Depths1F1B(walk, None).schedule(depths))
    return [use.peak_memory_bytes for use in timeline.ranks]


def _leanest_cut(figures: Figures, num_stages: int) -> list[tuple[int, int]]:
    """The steps of the cut whose largest stage, with one micro-batch in flight, is the smallest."""
    lattice = figures.lattice
    need: Floats = figures.fixed_bytes + figures.saved_bytes + figures.workspace_bytes
    reach = np.full((num_stages + 1, len(lattice)), np.inf)
    reach[0, 0] = 0.0
    for stage in range(num_stages):
        np.minimum.at(reach[stage + 1], lattice.end, np.maximum(reach[stage][lattice.start], need))
    ideal, made = len(lattice) - 1, []
    for stage in range(num_stages, 0, -1):
        into = np.flatnonzero(lattice.end == ideal)
        step = into[np.argmin(np.maximum(reach[stage - 1][lattice.start[into]], need[into]))]
        made.append((int(lattice.start[step]), ideal))
        ideal = int(lattice.start[step])
    return made[::-1]


def _smallest_change(graph: LayerGraph, asked: Asked, lattice: Lattice, closest: Configuration, need: int) -> str:
    """More memory, and what would fit without: another schedule, a smaller micro-batch, more GPUs."""
    limit = memory_limit(asked.cluster) or 0
    reserve = asked.cluster.memory_reserve_fraction or 0.0
    if asked.schedules == (ScheduleName.GPIPE,):
        flat = dataclasses.replace(asked, schedules=(ScheduleName.ONE_F_ONE_B,))
        if max(_needs(graph, flat, lattice, closest)) <= limit:
            return "it would fit with --schedule 1f1b, which holds fewer micro-batches at once"
    ways = [f"--memory {_enough(need / (1 - reserve))}"]
    for size, tensor in graph.rows():
        if tensor == closest.tensor and size < closest.microbatch_size and asked.global_batch % size == 0:
            smaller = _resized(closest, size, closest.pipeline, asked)
            if max(_needs(graph, asked, lattice, smaller)) <= limit:
                ways.append(f"--microbatch {size}")
                break
    more = _more_ranks(graph, asked, lattice, closest, limit)
    if more is not None:
        ways.append(f"--gpus {more}" if more > asked.gpus else f"--pipeline {more}")
    return f"it would fit with {' or '.join(ways)}"


def _more_ranks(graph: LayerGraph, asked: Asked, lattice: Lattice, closest: Configuration, limit: int) -> int | None:
    """The fewest ranks that fit; None: not even one rank a layer does."""
    low, high = closest.pipeline, len(graph)

    def fits(ranks: int) -> bool:
        return max(_needs(graph, asked, lattice, _resized(closest, closest.microbatch_size, ranks, asked))) <= limit

    if high <= low or not fits(high):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def _resized(closest: Configuration, size: int, ranks: int, asked: Asked) -> Configuration:
    return Configuration(
        pipeline=ranks,
        data=1,
        tensor=closest.tensor,
        virtual=1,
        placement=Placement.LOOP,
        microbatch_size=size,
        num_microbatches=asked.global_batch // size,
    )


def _enough(size: float) -> str:
    """An amount of memory that is not less, as --memory takes it."""
    mebi = 1024**2
    return f"{math.ceil(size / mebi)}MiB" if size >= mebi else f"{math.ceil(size) + 1}"
