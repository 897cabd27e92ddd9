"""What every stage that a lattice allows would cost at one micro-batch size and tensor size, as arrays over its steps.

Sums over a stage's layers are differences of sums over ideals. A tensor that only counts where a cut parts its source
from a reader (received, saved once more) is a product of "source before, reader not yet" with "reader now in".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Final

import numpy as np

from planner.cluster import Cluster, memory_limit
from planner.graph import LayerGraph, Tensor
from planner.search.lattice import Bools, Floats, Ints, Lattice

_FILLED: Final = 1.5
"""Micro-batches that a filling pipeline holds, for each rank."""


class LayerFigures:
    """A graph's layers at one micro-batch size and tensor size, as arrays (seconds).

    ``spine``: the heaviest path of layers; stages that hold a layer of it surely follow one another. Entry i of
    ``ahead_bytes`` is what the edge from its layer i - 1 to its layer i carries (0 at both ends), of ``back_bytes``
    what comes back as gradients, where ``comes_back[i]``.
    """

    def __init__(self, graph: LayerGraph, *, microbatch_size: int, tensor: int, cluster: Cluster | None) -> None:
        self.graph: Final = graph
        self.microbatch_size: Final = microbatch_size
        self.tensor: Final = tensor
        self.cluster: Final = cluster
        self.costs: Final = graph.costs(microbatch_size=microbatch_size, tensor=tensor, cluster=cluster)
        self.forward_s: Final = np.array([cost.forward_s for cost in self.costs])
        self.input_s: Final = np.array([cost.backward_input_s for cost in self.costs])
        self.weight_s: Final = np.array([cost.backward_weight_s for cost in self.costs])
        self.load_s: Final[Floats] = self.forward_s + self.input_s + self.weight_s
        self.spine: Final = heaviest_path(graph, self.load_s)
        self.ahead_bytes: Final = np.zeros(len(self.spine) + 1)
        self.back_bytes: Final = np.zeros(len(self.spine) + 1)
        self.comes_back: Final = np.zeros(len(self.spine) + 1, dtype=np.bool_)
        following = {source: (place + 1, target) for place, (source, target) in enumerate(pairwise(self.spine))}
        for made in graph.tensors:
            place, target = following.get(made.source, (0, -1))
            for reader in made.readers:
                if reader.layer == target:
                    self.ahead_bytes[place] += made.bytes(microbatch_size, tensor)
                    self.back_bytes[place] += made.bytes(microbatch_size, tensor) if reader.grad else 0
                    self.comes_back[place] |= reader.grad

    def fixed_factor(self) -> float:
        """Bytes of gradients and optimizer state per byte of trainable parameters."""
        profile = self.graph.profile
        return profile.gradient_bytes_per_trainable_byte + profile.optimizer.state_bytes_per_trainable_byte

    def lacking(self, ranks: int, count: int) -> float:
        """How many micro-batches for each of P ranks memory does not hold, of those that a filling pipeline holds.

        Those are P of M micro-batches, and half as many more; so it is at most 1.5, 0 where memory is roomy.
        """
        limit = memory_limit(self.cluster) if self.cluster is not None else None
        if limit is None:
            return 0.0
        fixed, saved, workspace = self._held_bytes
        wanted = min(_FILLED, count / ranks)
        missing = (fixed + wanted * ranks * saved) / ranks + workspace - limit
        return min(max(missing / saved, 0.0), wanted) if saved else 0.0

    @cached_property
    def _held_bytes(self) -> tuple[float, float, float]:
        """What all layers always hold, what they save of a micro-batch, the largest workspace."""
        factor = self.fixed_factor()
        fixed = (cost.parameter_bytes + factor * cost.trainable_bytes + cost.buffer_bytes for cost in self.costs)
        saved = sum(cost.saved_bytes for cost in self.costs)
        return sum(fixed), float(saved), float(max(cost.workspace_bytes for cost in self.costs))


class Figures:
    """Arrays over the steps of a lattice (times in seconds, sizes in bytes), and what crosses the spine at each ideal.

    ``fixed_bytes``: parameters, gradients, optimizer state and buffers. ``ahead_bytes``, ``back_bytes``,
    ``comes_back``: per ideal, of the spine's edge that is cut there.
    """

    def __init__(self, layers: LayerFigures, lattice: Lattice) -> None:
        graph, costs = layers.graph, layers.costs
        self.layers: Final = layers
        self.graph: Final = graph
        self.lattice: Final = lattice
        self.forward_before_s: Final[Floats] = lattice.members @ layers.forward_s
        self.load_s: Final = self._between(layers.load_s)
        self.forward_s: Final = self._between(layers.forward_s)
        self.input_s: Final = self._between(layers.input_s)
        self.weight_s: Final = self._between(layers.weight_s)
        self.workspace_bytes: Final = self._largest(_floats(cost.workspace_bytes for cost in costs))
        received = [(tensor, tuple(r.layer for r in tensor.readers)) for tensor in graph.tensors]
        again = [(tensor, tuple(r.layer for r in tensor.readers if r.saved)) for tensor in graph.tensors]
        self.input_bytes: Final = self._parted(received)
        self.saved_bytes: Final = self._between(_floats(cost.saved_bytes for cost in costs)) + self._parted(again)
        parameters = self._between(_floats(cost.parameter_bytes for cost in costs))
        trainable = self._between(_floats(cost.trainable_bytes for cost in costs))
        for users, size, is_trainable in tied(graph):
            extra = self._counted_twice(users) * size
            parameters = parameters - extra
            trainable = trainable - extra * is_trainable
        self.trainable_bytes: Final = trainable
        buffers = self._between(_floats(cost.buffer_bytes for cost in costs))
        self.fixed_bytes: Final = parameters + layers.fixed_factor() * trainable + buffers
        held: Ints = lattice.members[:, list(layers.spine)].sum(axis=1)
        self.on_spine: Final[Bools] = held[lattice.end] > held[lattice.start]
        self.ahead_bytes: Final[Floats] = layers.ahead_bytes[held]
        self.back_bytes: Final[Floats] = layers.back_bytes[held]
        self.comes_back: Final[Bools] = layers.comes_back[held]

    def _between(self, per_layer: Floats) -> Floats:
        """The sum over each step's layers."""
        sums = self.lattice.members @ per_layer
        return np.maximum(sums[self.lattice.end] - sums[self.lattice.start], 0.0)

    def _largest(self, per_layer: Floats) -> Floats:
        """The largest over each step's layers."""
        made = np.full(len(self.lattice.start), -1.0)
        members, start, end = self.lattice.members, self.lattice.start, self.lattice.end
        for value in sorted(set(per_layer.tolist()), reverse=True):
            counts: Floats = members @ (per_layer == value).astype(np.float64)
            open_steps = made < 0
            made[open_steps & (counts[end] > counts[start])] = value
            if not bool((made < 0).any()):
                break
        return made

    def _parted(self, tensors: Sequence[tuple[Tensor, tuple[int, ...]]]) -> Floats:
        """Bytes of the tensors, each with readers, that have their source before a step and a reader in it.

        The reader asked for is the first one not yet in: on a chain that is exact, on a DAG never more than there is.
        """
        members = self.lattice.members
        before: list[Bools] = []
        inside: list[Bools] = []
        sizes: list[float] = []
        for tensor, readers in tensors:
            waiting = members[:, tensor.source].copy()
            for reader in readers:
                before.append(waiting & ~members[:, reader])
                inside.append(members[:, reader])
                sizes.append(float(tensor.bytes(self.layers.microbatch_size, self.layers.tensor)))
                waiting &= members[:, reader]
        made = np.zeros(len(self.lattice.start))
        for low in range(0, len(sizes), 512):
            chunk = slice(low, low + 512)
            left = np.array(before[chunk], dtype=np.float64) * np.array(sizes[chunk])[:, None]
            table = left.T @ np.array(inside[chunk], dtype=np.float64)
            made += table[self.lattice.start, self.lattice.end]
        return made

    def _counted_twice(self, users: Sequence[int]) -> Floats:
        """How often a parameter of these layers is counted beyond the first time, per step."""
        counts: Floats = self.lattice.members[:, list(users)].sum(axis=1).astype(np.float64)
        twice: Floats = np.maximum(counts[self.lattice.end] - counts[self.lattice.start] - 1, 0.0)
        return twice


def heaviest_path(graph: LayerGraph, weight: Floats) -> tuple[int, ...]:
    """The path of layers with the largest sum of weights; on a chain all layers."""
    longest = np.zeros(len(graph))
    count = np.zeros(len(graph), dtype=np.int64)
    previous = [-1] * len(graph)
    feeding: list[list[int]] = [[] for _ in graph.names]
    for source, target in graph.edges:
        feeding[target].append(source)
    for layer in range(len(graph)):
        best = max(feeding[layer], key=lambda source: (longest[source], count[source], -source), default=-1)
        previous[layer] = best
        longest[layer] = weight[layer] + (longest[best] if best >= 0 else 0.0)
        count[layer] = 1 + (count[best] if best >= 0 else 0)
    layer = max(range(len(graph)), key=lambda layer: (longest[layer], count[layer], -layer))
    path = []
    while layer >= 0:
        path.append(layer)
        layer = previous[layer]
    return tuple(reversed(path))


def tied(graph: LayerGraph) -> list[tuple[list[int], int, bool]]:
    """The layers that use each tied parameter, its bytes, and whether it is trained."""
    users: dict[str, list[int]] = {}
    entries: dict[str, tuple[int, bool]] = {}
    for index, layer in enumerate(graph.layers):
        for name, entry in (layer.shared or {}).items():
            users.setdefault(name, []).append(index)
            entries[name] = (entry.bytes, entry.trainable)
    return [(users[name], *entries[name]) for name in sorted(users)]


def _floats(values: Iterable[float]) -> Floats:
    return np.array([float(value) for value in values])
