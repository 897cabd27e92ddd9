"""What is searched: every configuration that was asked for, with a bound cheap enough to sort thousands by.

With one stage a rank, loads l_0..l_{P-1} and R_r = max(M · l_r, l_r + R_{r+1}) the least R_0 over all ways to part the
whole load has every l_r = R_{r+1} / (M - 1), so that on a chain with free links and any cut

    T >= tot / (1 - (1 - 1/M)^P)             fused; with split backwards, α the least F / (F + I + W) of a layer,
    T >= α · tot / (1 - (1 - α/M)^P)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from planner.cluster import Cluster, memory_limit
from planner.errors import InputError
from planner.graph import LayerGraph
from planner.record import record
from planner.schedules import Placement, ScheduleName
from planner.search.figures import LayerFigures


@record
class Asked:
    """What to search: None in a list of sizes means all that there are.

    ``gpus`` is the most; plans with fewer are searched too. ``schedules`` narrow what is named in the plan, never the
    bound. ``recompute``: auto (per stage, where it helps), none or all.
    """

    gpus: int
    global_batch: int
    cluster: Cluster
    schedules: tuple[ScheduleName, ...]
    pipeline: tuple[int, ...] | None = None
    virtual: tuple[int, ...] = (1,)
    data: tuple[int, ...] = (1,)
    tensor: tuple[int, ...] = (1,)
    microbatch: tuple[int, ...] | None = None
    recompute: str = "auto"
    max_seconds: float | None = None


@record
class Configuration:
    """P ranks, D replicas, T tensor ranks, v stages a rank, micro-batches of b samples, M of them a replica."""

    pipeline: int
    data: int
    tensor: int
    virtual: int
    placement: Placement
    microbatch_size: int
    num_microbatches: int

    @property
    def gpus(self) -> int:
        """N = P · D · T."""
        return self.pipeline * self.data * self.tensor

    def with_ranks(self, ranks: int) -> Configuration:
        """The same with so many ranks of one stage each."""
        return dataclasses.replace(self, pipeline=ranks, virtual=1, placement=Placement.LOOP)


def configurations(graph: LayerGraph, asked: Asked) -> tuple[Configuration, ...]:
    """Every configuration asked for, fewest GPUs and micro-batches first.

    Raises InputError where no measured micro-batch size divides the global batch, or none was measured that is asked.
    """
    rows = graph.rows()
    sizes = sorted({size for size, tensor in rows if tensor in asked.tensor})
    if asked.microbatch is not None:
        missing = [size for size in asked.microbatch if size not in sizes]
        if missing:
            raise InputError(
                f"the profile has no costs at micro-batch size {missing[0]} for all layers (it has {_words(sizes)})",
                hint="profile the model at that size too, or ask for another one",
            )
        sizes = [size for size in sizes if size in asked.microbatch]
    made = tuple(
        Configuration(
            pipeline=ranks,
            data=data,
            tensor=tensor,
            virtual=virtual,
            placement=placement,
            microbatch_size=size,
            num_microbatches=asked.global_batch // (size * data),
        )
        for size, tensor in rows
        if size in sizes and tensor in asked.tensor
        for data in asked.data
        if asked.global_batch % (size * data) == 0
        for ranks in range(1, min(asked.gpus // (data * tensor), len(graph)) + 1)
        if asked.pipeline is None or ranks in asked.pipeline
        for virtual in asked.virtual
        if ranks * virtual <= len(graph)
        for placement in ((Placement.LOOP, Placement.V) if virtual == 2 and ranks > 1 else (Placement.LOOP,))
    )
    if not made:
        fault, mend = _nothing(graph, asked, sizes)
        raise InputError(fault, hint=mend)
    return tuple(sorted(made, key=lambda c: (c.gpus, c.num_microbatches, c.pipeline, c.virtual, c.placement)))


def _nothing(graph: LayerGraph, asked: Asked, sizes: Sequence[int]) -> tuple[str, str]:
    """Why there is no configuration, and the mend."""
    if not any(asked.global_batch % (size * data) == 0 for size in sizes for data in asked.data):
        return (
            f"a global batch of {asked.global_batch} is no multiple of a micro-batch size that was measured "
            f"({_words(sizes)}) times the replicas ({_words(asked.data)})"
        ), "choose --batch so that it is"
    most = min(asked.gpus, len(graph))
    return (
        f"no pipeline size asked for ({_words(asked.pipeline or ())}) fits {asked.gpus} GPUs and {len(graph)} layers"
    ), f"ask for sizes from 1 to {most}"


def _words(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers)) or "none"


def cheap_bound(layers: LayerFigures, configuration: Configuration, cluster: Cluster, *, fused: bool) -> float:
    """A lower bound in seconds from totals alone; infinite where the parameters cannot fit at all."""
    ranks, count = configuration.pipeline, configuration.num_microbatches
    if not fits_at_all(layers, configuration, cluster):
        return float("inf")
    load = layers.load_s
    total = float(load.sum())
    even = total * count / ranks
    if configuration.virtual == 1 and layers.graph.is_chain and bool(layers.comes_back[1:-1].all()):
        share = 1.0 if fused else float(np.min(layers.forward_s[load > 0] / load[load > 0], initial=1.0))
        part = share / count
        spread = 1 - (1 - part) ** ranks if part < 1 else 1.0
        even = max(even, share * total / spread if spread > 0 else 0.0)
    lone = float(load[list(layers.spine)].sum()) if fused and bool(layers.comes_back[1:-1].all()) else 0.0
    return max(even, count * float(load.max()), lone)


def fits_at_all(layers: LayerFigures, configuration: Configuration, cluster: Cluster) -> bool:
    """Whether all layers' parameters and state (tied ones left out) fit on all ranks together."""
    limit = memory_limit(cluster)
    if limit is None:
        return True
    factor = layers.fixed_factor()
    held = sum(cost.parameter_bytes + factor * cost.trainable_bytes + cost.buffer_bytes for cost in layers.costs)
    shared = sum(
        entry.bytes * (1 + (factor if entry.trainable else 0))
        for layer in layers.graph.layers
        for entry in (layer.shared or {}).values()
    )
    return bool(held - shared <= limit * configuration.pipeline)


def largest_batch(graph: LayerGraph, gpus: int) -> int:
    """The default global batch where none is given: 8 · N · the largest measured micro-batch size."""
    return 8 * gpus * max(size for size, tensor in graph.rows() if tensor == 1)


def of_sizes(configurations: Sequence[Configuration]) -> Iterator[tuple[int, int]]:
    """Every (micro-batch size, tensor size) among configurations, once."""
    yield from dict.fromkeys((c.microbatch_size, c.tensor) for c in configurations)
