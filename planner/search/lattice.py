"""Where a graph can be cut: its ideals (sets of layers that hold all they read from), and the stages between them.

    a chain of 3         a fork b, c after a               a stage is what lies between an ideal and a larger one:
    {} {a} {ab} {abc}    {} {a} {ab} {ac} {abc}            layers(B) - layers(A), and no edge leads from B back to A

A cut into K stages is a path of K steps from the empty ideal to the whole. A chain of n layers has n + 1 ideals; graphs
with few forks have not many more. Where there are too many, a lattice along one topological order has only its n + 1
prefixes: paths in it are cuts of the graph, but not all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from planner.graph import LayerGraph

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

MOST_IDEALS: Final = 1500
"""Above so many, one works along single topological orders and leaves the proof to the ILP."""


class Lattice:
    """Ideals in order of size (index 0 empty, the last one whole), and every step from one to a larger one.

    ``members[i, l]``: layer l lies in ideal i. ``start`` and ``end``: the ideals of each step, sorted by ``start``;
    ``complete``: whether all ideals of the graph are in it, so that what it rules out is ruled out.
    """

    def __init__(self, members: Bools, *, complete: bool) -> None:
        self.members: Final = members
        self.size: Final[Ints] = members.sum(axis=1)
        self.complete: Final = complete
        self.start, self.end = _steps(members, self.size)

    def __len__(self) -> int:
        return len(self.members)

    def layers(self, start: int, end: int) -> list[int]:
        """The layers of the stage between two ideals, by index."""
        inside = self.members[end] & ~self.members[start]
        return [int(layer) for layer in np.flatnonzero(inside)]

    def every_cut(self, num_stages: int, most: int) -> list[tuple[int, ...]] | None:
        """The ideals of every cut into so many stages; None where there are more than ``most``."""
        along_one, layers = 1, self.members.shape[1]  # so many lie along each single order of the layers
        for chosen in range(min(num_stages - 1, layers - num_stages)):
            along_one = along_one * (layers - 1 - chosen) // (chosen + 1)
            if along_one > most:
                return None
        ways = np.zeros((num_stages + 1, len(self)))
        ways[0, -1] = 1  # from here to the whole in so many steps
        for left in range(1, num_stages + 1):
            np.add.at(ways[left], self.start, ways[left - 1][self.end])
        if ways[num_stages, 0] > most:
            return None
        first = np.searchsorted(self.start, np.arange(len(self) + 1))
        begun: list[tuple[int, ...]] = [(0,)]
        for left in range(num_stages - 1, -1, -1):
            begun = [
                (*path, int(end))
                for path in begun
                for end in self.end[first[path[-1]] : first[path[-1] + 1]]
                if ways[left, end]
            ]
        return begun


def lattice_of(graph: LayerGraph) -> Lattice | None:
    """All ideals of a graph; None where they are too many."""
    if graph.is_chain:
        return along(range(len(graph)), complete=True)
    ideals = _ideals(len(graph), graph.edges, MOST_IDEALS)
    if ideals is None:
        return None
    members = np.zeros((len(ideals), len(graph)), dtype=np.bool_)
    for row, ideal in enumerate(ideals):
        for layer in range(len(graph)):
            members[row, layer] = bool(ideal >> layer & 1)
    return Lattice(members, complete=True)


def along(order: Sequence[int] | range, *, complete: bool = False) -> Lattice:
    """The prefixes of one topological order."""
    count = len(order)
    members = np.zeros((count + 1, count), dtype=np.bool_)
    for place, layer in enumerate(order):
        members[place + 1 :, layer] = True
    return Lattice(members, complete=complete)


def _ideals(count: int, edges: Iterable[tuple[int, int]], most: int) -> list[int] | None:
    """Every ideal as a bit mask, in order of size; None where they are more than ``most``."""
    needs = [0] * count
    for source, target in edges:
        needs[target] |= 1 << source
    found, ring = [0], {0}
    for _ in range(count):
        ring = {
            ideal | 1 << layer
            for ideal in ring
            for layer in range(count)
            if not ideal >> layer & 1 and needs[layer] & ~ideal == 0
        }
        found += sorted(ring)
        if len(found) > most:
            return None
    return found


def _steps(members: Bools, size: Ints) -> tuple[Ints, Ints]:
    """Start and end of every step: ideals of which the first is part of the second, and smaller."""
    count = len(members)
    if bool((size == np.arange(count)).all()):  # one order: every later prefix holds every earlier one
        start, end = np.triu_indices(count, k=1)
        return start.astype(np.int64), end.astype(np.int64)
    as_float = members.astype(np.float32)
    part_of = (as_float @ as_float.T) >= size[:, None] - 0.5
    start, end = np.nonzero(part_of & (size[:, None] < size[None, :]))
    return start.astype(np.int64), end.astype(np.int64)
