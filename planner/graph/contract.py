"""A smaller graph with the same best cut: layers that cost nothing join the layer that they can never usefully leave.

A layer u is *free* where no action of it takes time and nothing of it is trained (where memory has an end: where it
holds no bytes either). Take any cut that parts a free layer from the layer that it joins here, and move it there:

    links free, memory unlimited                      else: u precedes or follows every other layer, and
    p ──▶ u ──▶ ...   reads from p alone: joins p     p ──x──▶ u ──y──▶ w    y no larger than x: joins p
    ... ──▶ u ──▶ w   is read by w alone: joins w     p ──x──▶ u ──y──▶ w    x no larger than y: joins w

Left: no rank has more to do. What waited for u waits for p, sooner; what u waited for w waits for, which did so through
u before. It is the same backwards, as long as gradients come into u if and only if they leave it (for p: if), and, for
w, as long as u reads what no other layer returns a gradient for: else w would be drawn into that chain. One thing could
get worse: the stage that u leaves may have nothing to return any more, so that its I joins its W. It would have to hold
a layer where gradients end which is no ancestor of u; u stays where there is one. So every schedule, with the orders as
they are, ends no later after the move.

Right: where u is parted, one stage ends and the next one begins, p in the one and w in the other. The message between
them becomes y instead of x (or x instead of y), ahead, back, and in what the reader saves again. Nothing else changes.

Joining an only predecessor or an only successor makes no cycle. Each step starts from a layer graph and ends with one,
so steps add up. The cuts that are lost have a stage of free layers alone: like an empty stage, it only takes a rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from planner.graph.derive import Cut
from planner.graph.layers import LayerGraph
from planner.profile import Cost, Edge, EdgeTensor, Layer, Profile


class Contraction:
    """The smaller ``graph``, whose layers stand for groups of the original's: ``members[name]`` by its layer's name."""

    def __init__(self, original: LayerGraph, groups: Sequence[Sequence[int]]) -> None:
        self.original: Final = original
        names = original.names
        self.graph: Final = original if len(groups) == len(names) else LayerGraph.of(_merged(original, groups))
        self.members: Final[Mapping[str, tuple[str, ...]]] = {
            names[group[0]]: tuple(names[layer] for layer in group) for group in groups
        }

    def expand(self, cut: Cut) -> list[list[str]]:
        """A cut of the smaller graph as one of the original, each stage's layers in the original's order."""
        place = self.original.index
        return [
            sorted((layer for name in names for layer in self.members[name]), key=place.__getitem__) for names in cut
        ]


def contract(graph: LayerGraph, *, links: bool, memory: bool) -> Contraction:
    """The graph with its free layers joined; ``links``: messages may take time; ``memory``: it has an end."""
    plain = not links and not memory
    free = {layer for layer in range(len(graph)) if _is_free(graph.layers[layer], holds_nothing=memory)}
    before, after = _ancestors(graph), _descendants(graph)
    if plain:
        certain = _ends_before(graph, free, before)
    else:
        free = {layer for layer in free if (before[layer] | after[layer]).bit_count() == len(graph) - 1}
        certain = set()
    work = _Work(graph, free, certain)
    while work.joined(plain=plain):
        pass
    return Contraction(graph, work.in_order())


def _is_free(layer: Layer, *, holds_nothing: bool) -> bool:
    sizes = [layer.trainable_bytes, len(layer.shared or {})]
    if holds_nothing:
        sizes += [layer.parameter_bytes, layer.buffer_bytes]
    for row in layer.costs:
        sizes += [row.trainable_bytes or 0, int(row.collectives is not None)]
        if holds_nothing:
            sizes += [row.saved_bytes, row.saved_for_weight_bytes, row.workspace_bytes]
            sizes += [row.parameter_bytes or 0, row.buffer_bytes or 0]
    times = sum(row.forward_s + row.backward_input_s + row.backward_weight_s for row in layer.costs)
    return not any(sizes) and times == 0


def _ancestors(graph: LayerGraph) -> list[int]:
    """Per layer the set of those that precede it, as bits."""
    before = [0] * len(graph)
    for source, target in sorted(graph.edges, key=lambda edge: edge[1]):
        before[target] |= before[source] | 1 << source
    return before


def _descendants(graph: LayerGraph) -> list[int]:
    after = [0] * len(graph)
    for source, target in sorted(graph.edges, reverse=True):
        after[source] |= after[target] | 1 << target
    return after


def _ends_before(graph: LayerGraph, free: set[int], before: Sequence[int]) -> set[int]:
    """The layers that come after all layers where gradients end."""
    returning = {reader.layer for tensor in graph.tensors for reader in tensor.readers if reader.grad}
    receiving = {tensor.source for tensor in graph.tensors if any(reader.grad for reader in tensor.readers)}
    ends = set(range(len(graph))) - returning
    ends -= free - receiving  # no gradient passes there at all
    mask = sum(1 << layer for layer in ends)
    return {layer for layer in range(len(graph)) if before[layer] & mask == mask}


class _Passage(NamedTuple):
    """What one group hands to one other: bytes at every measured size, those with a gradient, those saved again."""

    bytes: tuple[int, ...]
    back: tuple[int, ...]
    saved: tuple[int, ...]
    grad: bool

    def within(self, other: _Passage) -> bool:
        """Whether it costs nowhere more than the other, and a gradient comes back over both or neither."""
        pairs = zip((self.bytes, self.back, self.saved), (other.bytes, other.back, other.saved), strict=True)
        return self.grad == other.grad and all(
            mine <= theirs for one, two in pairs for mine, theirs in zip(one, two, strict=True)
        )


@dataclass(slots=True)
class _Between:
    """A group's neighbours, and whether it returns gradients to those that feed it, and gets them from its readers.

    ``shares_gradient``: another group, too, returns a gradient for something that it reads.
    """

    feeding: set[int] = field(default_factory=set)
    reading: set[int] = field(default_factory=set)
    returns: bool = False
    is_returned: bool = False
    shares_gradient: bool = False


class _Work:
    """Groups on the way: ``home[layer]`` is the group of a layer, named by one of its layers."""

    def __init__(self, graph: LayerGraph, free: set[int], certain: set[int]) -> None:
        self.graph: Final = graph
        self.home: Final = list(range(len(graph)))
        self.free: Final = free
        self.certain: Final = certain
        self.rows: Final = graph.rows()

    def joined(self, *, plain: bool) -> bool:
        """Join what can be joined now, no two in touch with each other; whether there was any."""
        between, touched = self._between(), set[int]()
        for group in sorted(self.free):
            beside = between[group]
            goal = self._plain_goal(group, beside) if plain else self._narrow_goal(group, beside)
            if goal is None or not touched.isdisjoint({group, goal} | beside.feeding | beside.reading):
                continue
            touched |= {group, goal} | beside.feeding | beside.reading
            self.free.discard(group)
            self.home[:] = [goal if home == group else home for home in self.home]
        return bool(touched)

    def _between(self) -> dict[int, _Between]:
        made = {group: _Between() for group in self.home}
        for tensor in self.graph.tensors:
            source = self.home[tensor.source]
            readers = {self.home[reader.layer] for reader in tensor.readers} - {source}
            returning = {self.home[reader.layer] for reader in tensor.readers if reader.grad} - {source}
            made[source].reading |= readers
            made[source].is_returned |= bool(returning)
            for reader in readers:
                made[reader].feeding.add(source)
                made[reader].returns |= reader in returning
                made[reader].shares_gradient |= reader in returning and len(returning) > 1
        return made

    def _plain_goal(self, group: int, beside: _Between) -> int | None:
        """Where links are free and memory is unlimited."""
        if beside.returns and group not in self.certain:
            return None
        if len(beside.feeding) == 1 and (beside.returns or not beside.is_returned):
            return min(beside.feeding)
        if len(beside.reading) == 1 and beside.returns == beside.is_returned and not beside.shares_gradient:
            return min(beside.reading)
        return None

    def _narrow_goal(self, group: int, beside: _Between) -> int | None:
        """On a bottleneck: towards the side with the larger message."""
        if len(beside.feeding) > 1 or len(beside.reading) > 1:
            return None
        source, target = min(beside.feeding, default=None), min(beside.reading, default=None)
        if source is None or target is None:
            return target if source is None else source
        before = self._passage(source, group)
        after = self._passage(group, target)
        if before is None or after is None:
            return None
        return source if after.within(before) else target if before.within(after) else None

    def _passage(self, source: int, target: int) -> _Passage | None:
        """What goes from one group to the other; None where anything of it goes elsewhere too."""
        crossing = []
        for tensor in self.graph.tensors:
            if self.home[tensor.source] == source:
                readers = [reader for reader in tensor.readers if self.home[reader.layer] != source]
                if any(self.home[reader.layer] != target for reader in readers):
                    return None
                if readers:
                    grad = any(reader.grad for reader in readers)
                    saved = any(reader.saved for reader in readers)
                    crossing.append((tensor, grad, saved))
        return _Passage(
            bytes=tuple(sum(tensor.bytes(*row) for tensor, _, _ in crossing) for row in self.rows),
            back=tuple(sum(tensor.bytes(*row) for tensor, grad, _ in crossing if grad) for row in self.rows),
            saved=tuple(sum(tensor.bytes(*row) for tensor, _, saved in crossing if saved) for row in self.rows),
            grad=any(grad for _, grad, _ in crossing),
        )

    def in_order(self) -> list[list[int]]:
        """The groups in a topological order, each with its layers ascending."""
        members: dict[int, list[int]] = {}
        for layer, group in enumerate(self.home):
            members.setdefault(group, []).append(layer)
        between = self._between()
        missing = {group: len(between[group].feeding) for group in members}
        ready = sorted((group for group, count in missing.items() if not count), key=lambda group: members[group][0])
        made = []
        while ready:
            group = ready.pop(0)
            made.append(members[group])
            for target in between[group].reading:
                missing[target] -= 1
                if not missing[target]:
                    ready.append(target)
            ready.sort(key=lambda group: members[group][0])
        return made


# --- the smaller graph as a profile ---------------------------------------------------------------------------------


def _merged(graph: LayerGraph, groups: Sequence[Sequence[int]]) -> Profile:
    profile = graph.profile
    home = {layer: place for place, group in enumerate(groups) for layer in group}
    edges: dict[tuple[int, int], list[EdgeTensor]] = {}
    for tensor in graph.tensors:
        source = home[tensor.source]
        for target in sorted({home[reader.layer] for reader in tensor.readers} - {source}):
            readers = [reader for reader in tensor.readers if home[reader.layer] == target]
            listed = edges.setdefault((source, target), [])
            if tensor.name:  # an edge that carries nothing is an order all the same
                listed.append(
                    EdgeTensor(
                        name=f"{graph.names[tensor.source]}/{tensor.name}",
                        bytes_per_sample=tensor.bytes_per_sample,
                        fixed_bytes=tensor.fixed_bytes,
                        parts=tensor.parts or None,
                        grad=any(reader.grad for reader in readers),
                        saved=any(reader.saved for reader in readers),
                    )
                )
    layers = tuple(_layer(graph, group) for group in groups)
    return dataclasses.replace(
        profile,
        layers=layers,
        edges=tuple(
            Edge(source=layers[source].name, target=layers[target].name, tensors=tuple(tensors))
            for (source, target), tensors in sorted(edges.items())
        ),
    )


def _layer(graph: LayerGraph, group: Sequence[int]) -> Layer:
    """A group as one layer, with the rows that all of its layers have: one that works, and the free ones with it."""
    layers = [graph.layers[layer] for layer in group]
    if len(layers) == 1:
        return layers[0]
    works = max(layers, key=lambda layer: (layer.trainable_bytes, sum(row.forward_s for row in layer.costs)))
    return dataclasses.replace(
        works,
        name=layers[0].name,
        modules=tuple(module for layer in layers for module in layer.modules),
        parameter_bytes=sum(layer.parameter_bytes for layer in layers),
        trainable_bytes=sum(layer.trainable_bytes for layer in layers),
        buffer_bytes=sum(layer.buffer_bytes for layer in layers),
        costs=tuple(_cost(works, layers, size, tensor) for size, tensor in graph.rows()),
    )


def _cost(works: Layer, layers: Sequence[Layer], size: int, tensor: int) -> Cost:
    def row_of(layer: Layer) -> Cost:
        return next(row for row in layer.costs if (row.microbatch_size, row.tensor) == (size, tensor))

    rows = [row_of(layer) for layer in layers]
    return dataclasses.replace(
        row_of(works),
        forward_s=sum(row.forward_s for row in rows),
        backward_input_s=sum(row.backward_input_s for row in rows),
        backward_weight_s=sum(row.backward_weight_s for row in rows),
        saved_bytes=sum(row.saved_bytes for row in rows),
        saved_for_weight_bytes=sum(row.saved_for_weight_bytes for row in rows),
        workspace_bytes=max(row.workspace_bytes for row in rows),
        parameter_bytes=_sum(row.parameter_bytes for row in rows),
        trainable_bytes=_sum(row.trainable_bytes for row in rows),
        buffer_bytes=_sum(row.buffer_bytes for row in rows),
    )


def _sum(sizes: Iterable[int | None]) -> int | None:
    """The sum; None where a row leaves the size to its layer."""
    given = [size for size in sizes if size is not None]
    return sum(given) if given else None
