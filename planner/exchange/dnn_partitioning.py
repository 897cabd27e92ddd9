"""The layer graphs of "Efficient Algorithms for Device Placement of DNN Graph Operators" (2020) become profiles.

    {"maxFPGAs": 6, "maxCPUs": 1, "maxSizePerFPGA": bytes,
     "nodes": [{id, name, fpgaLatency: ms on an accelerator, cpuLatency, size: bytes, isBackwardNode, colorClass}],
     "edges": [{sourceId, destId, cost: ms to move the source's output, size: its bytes}]}

Nodes of one colour class stay together, and the backward nodes among them are the class's backward pass: a class is a
layer; classes that wait for one another are one layer. A backward node whose class has no forward node goes with a
neighbour, one before it or else one behind it. What passes between backward nodes is what passed forward between their
classes, so those edges are not read. An edge's cost says what it takes; its bytes are that cost over the bandwidth that
most edges of the file agree on.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import networkx as nx

from planner.errors import InputError
from planner.exchange.foreign import (
    ForeignEdge,
    ForeignModel,
    entries,
    figure,
    flag,
    halved_backward,
    mapping,
    profile_of,
    refuse_cycles,
    unknown_keys,
    whole,
)
from planner.files import read_json
from planner.profile import Layer, Profile

_SOME_BANDWIDTH = 1e9
_SLOWEST, _FASTEST = 1.0, 1e15  # bytes a second: what else a size and a cost say is no link
_KEYS = frozenset({"maxFPGAs", "maxCPUs", "maxSizePerFPGA", "nodes", "edges"})
_NODE_KEYS = frozenset(
    {"id", "name", "fpgaLatency", "cpuLatency", "size", "isBackwardNode", "colorClass", "supportedOnFpga"}
)
_EDGE_KEYS = frozenset({"sourceId", "destId", "cost", "size"})


class _Node(NamedTuple):
    """One node: ``seconds`` on the accelerator, ``bytes`` it holds there."""

    number: int
    name: str
    seconds: float
    bytes: float
    backward: bool
    colour: object
    on_cpu: bool


class _Edge(NamedTuple):
    source: int
    target: int
    seconds: float
    bytes: float


def import_dnn_partitioning(path: Path, *, microbatch_size: int | None = None) -> tuple[Profile, tuple[str, ...]]:
    """The profile in such a file, and remarks on what it left out.

    ``microbatch_size``: samples that the file's times are for, 1 where it is None. Raises InputError on anything else
    than such a file.
    """
    size = microbatch_size or 1
    document = mapping(read_json(path), place=f"{path}: the file")
    nodes = _nodes(document, path)
    edges = _edges(document, nodes, path)
    layer_of = _layers_of(nodes, edges, path)
    bandwidth = _bandwidth(edges)
    sent: dict[int, float] = defaultdict(float)
    for edge in edges:
        sent[edge.source] = max(sent[edge.source], edge.seconds * bandwidth)
    trains = any(node.backward for node in nodes.values())
    members: dict[str, list[_Node]] = defaultdict(list)
    for number, name in layer_of.items():
        members[name].append(nodes[number])
    moves: dict[tuple[str, str], float] = {}
    for edge in edges:
        pair = layer_of[edge.source], layer_of[edge.target]
        if pair[0] != pair[1] and not nodes[edge.source].backward and not nodes[edge.target].backward:
            moves[pair] = max(moves.get(pair, 0.0), edge.seconds * bandwidth)
    limit = document.get("maxSizePerFPGA")
    model = ForeignModel(
        layers=tuple(_layer(name, group, sent, size, trains) for name, group in members.items()),
        edges=tuple(ForeignEdge(*pair, moved) for pair, moved in moves.items()),
        microbatch_size=size,
        memory_bytes=round(figure(limit, place=f"{path}: maxSizePerFPGA")) if limit is not None else 0,
        bandwidth_bytes_per_s=bandwidth,
    )
    unknown = (
        *unknown_keys([document], _KEYS, "the file"),
        *unknown_keys(document["nodes"], _NODE_KEYS, "nodes"),
        *unknown_keys(document["edges"], _EDGE_KEYS, "edges"),
    )
    remarks = (*_remarks(nodes, members, trains), *unknown)
    return profile_of(model, path=path, system="dnn-partitioning"), remarks


def _nodes(document: dict[str, Any], path: Path) -> dict[int, _Node]:
    made: dict[int, _Node] = {}
    for index, entry in enumerate(entries(document, "nodes", path)):
        place = f"{path}: nodes[{index}]"
        number = whole(entry.get("id"), place=f"{place}.id")
        if number in made:
            raise InputError(f"{place}.id: {number} stands there twice", hint="give each node its own id")
        on_cpu = not flag(entry.get("supportedOnFpga", 1), place=f"{place}.supportedOnFpga")
        latency = "cpuLatency" if on_cpu else "fpgaLatency"
        made[number] = _Node(
            number=number,
            name=str(entry.get("name", number)),
            seconds=figure(entry.get(latency), place=f"{place}.{latency}") / 1000,
            bytes=figure(entry.get("size", 0), place=f"{place}.size"),
            backward=flag(entry.get("isBackwardNode", 0), place=f"{place}.isBackwardNode"),
            colour=str(entry.get("colorClass", f"node {number}")),
            on_cpu=on_cpu,
        )
    return made


def _edges(document: dict[str, Any], nodes: dict[int, _Node], path: Path) -> list[_Edge]:
    made = []
    for index, entry in enumerate(entries(document, "edges", path)):
        place = f"{path}: edges[{index}]"
        source, target = (whole(entry.get(key), place=f"{place}.{key}") for key in ("sourceId", "destId"))
        for end in (source, target):
            if end not in nodes:
                raise InputError(f"{place}: there is no node {end}", hint="name one of nodes")
        cost = figure(entry.get("cost"), place=f"{place}.cost") / 1000
        made.append(_Edge(source, target, cost, figure(entry.get("size", 0), place=f"{place}.size")))
    return made


def _layers_of(nodes: dict[int, _Node], edges: list[_Edge], path: Path) -> dict[int, str]:
    """The layer of every node: the least id among the forward nodes that stay together with it."""
    colours = {node.number: node.colour for node in nodes.values()}
    _adopt(colours, nodes, edges, path)
    group_of = _together(colours, nodes, edges, path)
    first: dict[object, int] = {}
    for node in nodes.values():
        if not node.backward:
            group = group_of[colours[node.number]]
            first[group] = min(first.get(group, node.number), node.number)
    return {number: str(first[group_of[colour]]) for number, colour in colours.items()}


def _adopt(colours: dict[int, object], nodes: dict[int, _Node], edges: list[_Edge], path: Path) -> None:
    """Give backward nodes of classes without a forward node the class of a neighbour, those of a class together."""
    forward = {node.colour for node in nodes.values() if not node.backward}
    alone: dict[object, list[int]] = defaultdict(list)
    for number, colour in colours.items():
        if colour not in forward:
            alone[colour].append(number)
    before: dict[int, list[int]] = defaultdict(list)
    behind: dict[int, list[int]] = defaultdict(list)
    for edge in edges if alone else ():
        before[edge.target].append(edge.source)
        behind[edge.source].append(edge.target)
    while alone:
        found = {
            colour: near
            for colour, members in alone.items()
            for ways in (behind, before)  # the latter holds where there are both
            if (near := [colours[n] for member in members for n in sorted(ways[member]) if colours[n] in forward])
        }
        if not found:
            node = nodes[min(number for members in alone.values() for number in members)]
            raise InputError(
                f"{path}: backward node {node.number} ({node.name}): colour class {node.colour} has no forward node",
                hint="give it the colour class of the node that it is the backward of",
            )
        for colour, near in found.items():
            for number in alone.pop(colour):
                colours[number] = near[0]


def _together(
    colours: dict[int, object], nodes: dict[int, _Node], edges: list[_Edge], path: Path
) -> dict[object, object]:
    """A name for each colour class: one for those whose forward nodes wait for one another, which no cut can part."""
    passes: nx.DiGraph[int] = nx.DiGraph()
    classes: nx.DiGraph[object] = nx.DiGraph()
    classes.add_nodes_from(colours.values())
    for edge in edges:
        if not nodes[edge.source].backward and not nodes[edge.target].backward:
            passes.add_edge(edge.source, edge.target)
            classes.add_edge(colours[edge.source], colours[edge.target])
    refuse_cycles(passes, path)
    return {colour: index for index, group in enumerate(nx.strongly_connected_components(classes)) for colour in group}


def _bandwidth(edges: list[_Edge]) -> float:
    """Bytes per second that most edges with a size and a cost agree on."""
    rates = [edge.bytes / edge.seconds for edge in edges if edge.bytes > 0 and edge.seconds > 0]
    rates = [rate for rate in rates if _SLOWEST <= rate <= _FASTEST]
    agreed = Counter(f"{rate:.6g}" for rate in rates).most_common(1)
    return (
        next((rate for rate in rates if f"{rate:.6g}" == agreed[0][0]), _SOME_BANDWIDTH) if agreed else _SOME_BANDWIDTH
    )


def _layer(name: str, group: list[_Node], sent: dict[int, float], microbatch_size: int, trains: bool) -> Layer:
    """A colour class as one layer. A node's size is its parameters and its output; what it sends is its output."""
    forward = [node for node in group if not node.backward]
    outputs = sum(min(sent[node.number], node.bytes) for node in forward)
    parameters = round(sum(node.bytes for node in forward) - outputs)
    return Layer(
        name=name,
        kind=" + ".join(node.name for node in forward),
        modules=(),
        parameter_bytes=parameters,
        trainable_bytes=parameters if trains else 0,
        buffer_bytes=0,
        costs=(
            halved_backward(
                microbatch_size=microbatch_size,
                forward_s=sum(node.seconds for node in forward),
                backward_s=sum(node.seconds for node in group if node.backward),
                saved_bytes=round(outputs),
            ),
        ),
    )


def _remarks(nodes: dict[int, _Node], members: dict[str, list[_Node]], trains: bool) -> tuple[str, ...]:
    remarks = []
    if not trains:
        remarks.append("it has no backward nodes: a model that only infers, nothing of it is trained")
    folded = len(nodes) - len(members)
    if folded:
        remarks.append(f"{folded} of {len(nodes)} nodes folded into the layer of their colour class")
    on_cpu = [node.name for node in nodes.values() if node.on_cpu]
    if on_cpu:
        remarks.append(
            f"no accelerator runs {', '.join(on_cpu[:3])}{' ...' * (len(on_cpu) > 3)}: their CPU time stands"
        )
    return tuple(remarks)
