"""The layer graph: what is computed, which tensors flow, what each layer costs at one micro-batch size.

embed ──x──▶ block.0 ──y──▶ block.1 ──z──▶ head          nodes: layers; edges: the tensors that a layer reads
  └────────────mask─────────────▲                         a tensor keeps one name per source, whoever reads it
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Final, NamedTuple

import networkx as nx

from planner.cluster import Cluster, Link, sum_link
from planner.errors import InputError
from planner.profile import Collective, Cost, EdgeTensor, Layer, Profile, TensorPart


class Reader(NamedTuple):
    """A layer that reads a tensor; ``grad``: a gradient flows back; ``saved``: its backward needs the tensor."""

    layer: int
    grad: bool
    saved: bool


class Tensor(NamedTuple):
    """What one layer hands to others: bytes_per_sample · b + fixed_bytes at micro-batch size b. Readers ascend.

    ``parts``: what a tensor rank has of it, at the tensor sizes where that is a part.
    """

    source: int
    name: str
    bytes_per_sample: float
    fixed_bytes: int
    readers: tuple[Reader, ...]
    parts: tuple[TensorPart, ...] = ()

    def bytes(self, microbatch_size: int, tensor: int = 1) -> int:
        """Its size at a micro-batch size: what one of ``tensor`` ranks has."""
        for part in self.parts:
            if part.tensor == tensor:
                return round(part.bytes_per_sample * microbatch_size) + part.fixed_bytes
        return round(self.bytes_per_sample * microbatch_size) + self.fixed_bytes


class LayerCost(NamedTuple):
    """One layer at one (micro-batch size, tensor size); times contain the tensor group's collectives."""

    forward_s: float
    backward_input_s: float
    backward_weight_s: float
    split_s: float
    saved_bytes: int
    saved_for_weight_bytes: int
    workspace_bytes: int
    parameter_bytes: int
    trainable_bytes: int
    buffer_bytes: int


class LayerGraph:
    """Layers in a topological order (indices 0..n-1), and the tensors between them.

    ``digraph``: the same as a networkx.DiGraph over layer names; node attribute ``layer``, edge attribute ``tensors``.
    """

    def __init__(self, profile: Profile) -> None:
        self.profile: Final = profile
        self.names: Final = tuple(layer.name for layer in profile.layers)
        self.index: Final = {name: index for index, name in enumerate(self.names)}
        self.digraph: Final = _digraph(profile)
        self._costs: Final[dict[tuple[int, int, Link | None], tuple[LayerCost, ...]]] = {}
        self.tensors: Final = _tensors(profile, self.index)
        self.edges: Final = tuple(
            sorted({(tensor.source, reader.layer) for tensor in self.tensors for reader in tensor.readers})
        )

    @classmethod
    def of(cls, profile: Profile) -> LayerGraph:
        """The layer graph of a profile."""
        return cls(profile)

    def __len__(self) -> int:
        return len(self.names)

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The profiled layers, by index."""
        return self.profile.layers

    @cached_property
    def is_chain(self) -> bool:
        """Whether the layers have one topological order only, so that every cut is a list of K - 1 positions."""
        following = set(self.edges)
        return all((index, index + 1) in following for index in range(len(self) - 1))

    def rows(self) -> tuple[tuple[int, int], ...]:
        """Every (micro-batch size, tensor size) that all layers have a row for, ascending."""
        keys = [{(cost.microbatch_size, cost.tensor) for cost in layer.costs} for layer in self.layers]
        return tuple(sorted(set.intersection(*keys)))

    def costs(self, *, microbatch_size: int, tensor: int = 1, cluster: Cluster | None = None) -> tuple[LayerCost, ...]:
        """What each layer costs, from its row at exactly this micro-batch size and tensor size.

        With T > 1, F and I last longer by the row's collectives, over a node's link for sums, where tensor groups lie:
        count · 2(T-1) · latency + 2(T-1)/T · bytes / bandwidth. Raises InputError where a layer has no such row.
        """
        link = sum_link(cluster)
        key = (microbatch_size, tensor, link)
        if key not in self._costs:
            self._costs[key] = tuple(_cost(layer, microbatch_size, tensor, link) for layer in self.layers)
        return self._costs[key]


def _digraph(profile: Profile) -> nx.DiGraph[str]:
    made: nx.DiGraph[str] = nx.DiGraph()
    for layer in profile.layers:
        made.add_node(layer.name, layer=layer)
    for edge in profile.edges:
        made.add_edge(edge.source, edge.target, tensors=edge.tensors)
    return made


def _tensors(profile: Profile, index: dict[str, int]) -> tuple[Tensor, ...]:
    sizes: dict[tuple[int, str], EdgeTensor] = {}
    readers: dict[tuple[int, str], list[Reader]] = {}
    for edge in profile.edges:
        source, target = index[edge.source], index[edge.target]
        if not edge.tensors:  # an edge that carries nothing is an order all the same
            sizes[source, ""] = EdgeTensor(name="none", bytes_per_sample=0.0, fixed_bytes=0, grad=False)
            readers.setdefault((source, ""), []).append(Reader(target, grad=False, saved=False))
        for tensor in edge.tensors:
            sizes[source, tensor.name] = tensor
            readers.setdefault((source, tensor.name), []).append(Reader(target, tensor.grad, tensor.saved))
    return tuple(
        Tensor(
            source, name, one.bytes_per_sample, one.fixed_bytes, tuple(sorted(readers[source, name])), one.parts or ()
        )
        for (source, name), one in sorted(sizes.items(), key=lambda entry: entry[0])
    )


def _cost(layer: Layer, microbatch_size: int, tensor: int, link: Link | None) -> LayerCost:
    for row in layer.costs:
        if (row.microbatch_size, row.tensor) == (microbatch_size, tensor):
            return _row_cost(layer, row, link)
    known = ", ".join(f"{row.microbatch_size}" for row in layer.costs if row.tensor == tensor) or "none"
    raise InputError(
        f"layer {layer.name!r} has no costs at micro-batch size {microbatch_size} with tensor size {tensor} "
        f"(micro-batch sizes there: {known})",
        hint="nothing is interpolated: profile the model at that size too",
    )


def _row_cost(layer: Layer, row: Cost, link: Link | None) -> LayerCost:
    sizes: Sequence[int | None] = (layer.parameter_bytes, layer.trainable_bytes, layer.buffer_bytes)
    forward_s, backward_input_s = row.forward_s, row.backward_input_s
    if row.tensor > 1:
        sizes = (row.parameter_bytes, row.trainable_bytes, row.buffer_bytes)
        if link is not None and row.collectives is not None:
            forward_s += _all_reduces_s(row.collectives.forward, row.tensor, link)
            backward_input_s += _all_reduces_s(row.collectives.backward_input, row.tensor, link)
    return LayerCost(
        forward_s,
        backward_input_s,
        row.backward_weight_s,
        row.split_s or 0.0,
        row.saved_bytes,
        row.saved_for_weight_bytes,
        row.workspace_bytes,
        *(size or 0 for size in sizes),
    )


def _all_reduces_s(calls: Collective, tensor: int, link: Link) -> float:
    """Ring all-reduces over T ranks: 2(T-1) latencies a call, and 2(T-1)/T of the bytes over every link."""
    latency_s = calls.count * 2 * (tensor - 1) * link.latency_s
    return latency_s + 2 * (tensor - 1) / tensor * calls.bytes / link.bandwidth_bytes_per_s
