"""Known optima of other systems' objectives, out of our cut constraints: their objective rows live here alone.

PipeDream (Narayanan et al., 2019): stages replicated m times over n GPUs; the slowest of computing, of summing
gradients, and of moving activations, at 1 GB/s.  dnn-partitioning (Tarnawski et al., 2020): the largest device load,
computing plus moves out plus moves in, within a memory for each device.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import pytest
from support.cases import case

from planner.exchange.pipedream import import_pipedream
from planner.graph import LayerGraph
from planner.search.ilp import CutModel, Linear, Solved

BANDWIDTH = 1e9


class Foreign(NamedTuple):
    """A PipeDream graph: seconds and parameter bytes of each layer, and its tensors (source, bytes, readers)."""

    edges: tuple[tuple[int, int], ...]
    seconds: list[float]
    parameters: list[float]
    tensors: list[tuple[int, float, tuple[int, ...]]]


def pipedream(name: str) -> Foreign:
    profile, _ = import_pipedream(case(f"pipedream/{name}.graph.txt"), microbatch_size=1)
    graph = LayerGraph.of(profile)
    costs = graph.costs(microbatch_size=1)
    return Foreign(
        edges=graph.edges,
        seconds=[cost.forward_s + cost.backward_input_s + cost.backward_weight_s for cost in costs],
        parameters=[float(cost.parameter_bytes) for cost in costs],
        tensors=[
            (made.source, float(made.bytes(1)), tuple(reader.layer for reader in made.readers))
            for made in graph.tensors
        ],
    )


def replicated(graph: Foreign, gpus: int, num_stages: int, below: float) -> Solved:
    """PipeDream's least time per mini-batch over exactly ``num_stages`` stages on so many GPUs."""
    scale = below
    model = CutModel(len(graph.seconds), graph.edges, num_stages)
    seconds = [value / scale for value in graph.seconds]
    gradients = [4 * value / BANDWIDTH / scale for value in graph.parameters]
    crossing = [Linear()]
    for k in range(num_stages - 1):
        moved = Linear()
        for source, size, readers in graph.tensors:
            moved.add(model.crosses(source, readers, k), 2 * size / BANDWIDTH / scale)
        crossing.append(model.stored(moved))
    crossing.append(Linear())
    used = Linear()
    for k in range(num_stages):
        compute, summed = model.stored(model.load(seconds, k)), model.stored(model.load(gradients, k))
        chosen = Linear()
        for m in range(1, gpus + 1):
            choice = model.variable(most=1.0, whole=True)
            chosen.add(choice)
            used.add(choice, float(m))
            slack = Linear(constant=1.0) - choice
            most = (sum(seconds) + sum(gradients)) / m
            model.row(compute * (1 / m) + summed * ((m - 1) / m / m) - slack * most)
            for moved in (crossing[k], crossing[k + 1]):
                most = sum(2 * size / BANDWIDTH / scale for _, size, _ in graph.tensors) / m
                model.row(moved * (1 / m) - slack * most)
        model.at_most(Linear(constant=1.0), chosen)
        model.at_most(chosen, Linear(constant=1.0))
    model.at_most(used, Linear(constant=float(gpus)))
    solved = model.solve(below=1.0)
    return Solved(bound=solved.bound * scale, value=solved.value * scale, stage_of=solved.stage_of, nodes=solved.nodes)


PIPEDREAM = {
    ("vgg16", 4): 0.205521,
    ("vgg16", 8): 0.103833,
    ("vgg16", 16): 0.056530,
    ("resnet50", 4): 0.162881,
    ("resnet50", 8): 0.092012,
    ("resnet50", 16): 0.047801,
    ("gnmt", 4): 0.025868,
    ("gnmt", 8): 0.019285,
    ("gnmt", 16): 0.019285,
    ("alexnet", 4): 0.034217,
    ("alexnet", 8): 0.018874,
    ("alexnet", 16): 0.018874,
}


@pytest.mark.parametrize(("name", "gpus"), PIPEDREAM)
def test_pipedream_optima(name: str, gpus: int) -> None:
    """Straight pipelines of up to 8 stages, replicated ones of up to 3: the published value, or lower."""
    graph, known = pipedream(name), PIPEDREAM[name, gpus]
    best = known * 1.001
    for num_stages in range(1, min(gpus, 8 if name == "gnmt" else 3) + 1):
        best = min(best, replicated(graph, gpus, num_stages, best).value)
    assert best <= known + 5e-7  # they print six decimals


def test_the_slowest_stage_of_resnet50() -> None:
    graph = pipedream("resnet50")
    scale = 0.06
    model = CutModel(len(graph.seconds), graph.edges, 8)
    for k in range(8):
        model.row(model.load([value / scale for value in graph.seconds], k))
    solved = model.solve(below=1.0)
    assert solved.bound * scale == pytest.approx(0.056684, abs=1e-6)
    assert solved.value * scale == pytest.approx(0.056684, abs=1e-6)


class Placed(NamedTuple):
    """A dnn-partitioning graph with colour classes as layers: forward edges order them, every edge may cost a move."""

    edges: tuple[tuple[int, int], ...]
    latency: list[float]
    size: list[float]
    tensors: list[tuple[int, float, tuple[int, ...]]]
    devices: int
    memory: float


def placed(path: Path) -> Placed:
    document = json.loads(path.read_text())
    nodes = {node["id"]: node for node in document["nodes"]}
    colours: dict[object, int] = {}
    for number, node in nodes.items():
        colour = node.get("colorClass")
        colours.setdefault(("colour", colour) if colour is not None else ("node", number), len(colours))

    def layer(number: int) -> int:
        colour = nodes[number].get("colorClass")
        return colours["colour", colour] if colour is not None else colours["node", number]

    latency, size = [0.0] * len(colours), [0.0] * len(colours)
    for number, node in nodes.items():
        latency[layer(number)] += node["fpgaLatency"]
        size[layer(number)] += node["size"]
    order, moves = set(), defaultdict(set)
    cost = {}
    for edge in document["edges"]:
        source, target = edge["sourceId"], edge["destId"]
        cost[source] = edge["cost"]
        if layer(source) != layer(target):
            moves[source].add(layer(target))
            if not nodes[source]["isBackwardNode"] and not nodes[target]["isBackwardNode"]:
                order.add((layer(source), layer(target)))
    return Placed(
        edges=tuple(sorted(order)),
        latency=latency,
        size=size,
        tensors=[(layer(number), cost[number], tuple(sorted(readers))) for number, readers in moves.items()],
        devices=document["maxFPGAs"],
        memory=document["maxSizePerFPGA"],
    )


def largest_device_load(graph: Placed, below: float) -> Solved:
    model = CutModel(len(graph.latency), graph.edges, graph.devices, empty_stages=True)
    latency = [value / below for value in graph.latency]
    size = [value / graph.memory for value in graph.size]
    for k in range(graph.devices):
        moves = Linear()
        for source, cost, readers in graph.tensors:
            moves.add(model.leaves(source, readers, k), cost / below)
            moves.add(model.enters(source, readers, k), cost / below)
        model.row(model.load(latency, k) + moves)
        model.at_most(model.load(size, k), Linear(constant=1.0))
    solved = model.solve(below=1.0)
    return Solved(bound=solved.bound * below, value=solved.value * below, stage_of=solved.stage_of, nodes=solved.nodes)


@pytest.mark.parametrize(
    ("name", "optimum", "exact"),
    [
        ("bert24_inference", 17.78990625, True),
        ("gnmt_inference", 32.910658203125, True),
        ("resnet50_inference", 34.2228515625, True),
        ("bert24_training", 41.7458125, False),
    ],
)
def test_dnn_partitioning_optima(name: str, optimum: float, exact: bool) -> None:
    solved = largest_device_load(placed(case(f"dnn-partitioning/{name}.json")), optimum * 1.01)
    assert solved.value <= optimum * (1 + 1e-6)
    if exact:
        assert solved.value == pytest.approx(optimum, rel=1e-6)
        assert solved.bound == pytest.approx(optimum, rel=1e-5)
