"""Sound files of other systems, at random and in every spelling their formats allow, with what they say beside them."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any, NamedTuple

from hypothesis import strategies as st

_times = st.integers(0, 10**7).map(lambda number: number / 1000)
_sizes = st.integers(0, 10**10)
_counts = st.integers(1, 7)


class Said(NamedTuple):
    """What a layer of a file says, in seconds and bytes; ``reads``: what it takes from each layer before it."""

    forward_s: float
    backward_s: float
    parameter_bytes: float
    saved_bytes: float
    reads: dict[str, float]


class Foreign(NamedTuple):
    """A file, and the layers that must come out of it; ``options``: what its import needs beside --from."""

    text: str
    layers: dict[str, Said]
    options: tuple[object, ...] = ()


@st.composite
def _numbers(draw: st.DrawFn) -> list[int]:
    """The ids of some nodes, in the order in which they run."""
    count = draw(_counts)
    return draw(st.lists(st.integers(0, 10**6), min_size=count, max_size=count, unique=True))


@st.composite
def _ways(draw: st.DrawFn, count: int) -> list[tuple[int, int]]:
    """The edges of an acyclic graph over 0..count-1."""
    pairs = [(a, b) for b in range(count) for a in range(b)]
    return draw(st.lists(st.sampled_from(pairs), unique=True, max_size=2 * count)) if pairs else []


@st.composite
def pipedream_files(draw: st.DrawFn) -> Foreign:
    """Nodes and edges in any order, inputs, lists of sizes, marks of stages, blank lines, other line ends."""
    numbers = draw(_numbers())
    loads = [draw(st.sampled_from([True, False, False])) for _ in numbers[1:]] + [False]
    lines, layers = [], {}
    for number, is_input in zip(numbers, loads, strict=True):
        forward, backward, parameters = draw(_times), draw(_times), draw(_sizes)
        sizes = draw(st.lists(_sizes, min_size=1, max_size=3))
        listed = "; ".join(f"{size}.0" for size in sizes)
        kind = draw(
            st.sampled_from(["Input", "Input3"] if is_input else ["Conv2d(3, 64)", "Add(-- )", "__getitem__(0)"])
        )
        lines.append(
            f"node{number} -- {kind} -- forward_compute_time={forward:.3f}, backward_compute_time={backward:.3f}, "
            f"activation_size={f'[{listed}]' if len(sizes) > 1 else listed}, parameter_size={parameters}.000"
            f"{draw(st.sampled_from(['', ' -- stage_id=0', ' -- stage_id=11']))}"
        )
        if not is_input:
            layers[f"node{number}"] = Said(forward / 1000, backward / 1000, parameters, sum(sizes), {})
    for a, b in draw(_ways(len(numbers))):
        if not loads[b]:
            lines.append(f"\tnode{numbers[a]} -- node{numbers[b]}")
            if not loads[a]:
                source = f"node{numbers[a]}"
                layers[f"node{numbers[b]}"].reads[source] = layers[source].saved_bytes
    end = draw(st.sampled_from(["\n", "\r\n", "\n\n", " \n"]))
    return Foreign(end.join(draw(st.permutations(lines))), layers, ("--microbatch-size", 1))


@st.composite
def dnn_partitioning_files(draw: st.DrawFn) -> Foreign:
    """Colour classes of several nodes, backward nodes or none, yes and no as 0 and 1 or in words, keys left out.

    A class is a run of the order, so that no two classes wait for each other.
    """
    numbers, bandwidth = draw(_numbers()), draw(st.sampled_from([1e6, 12_500_000.0, 1e9]))
    trains, (no, yes) = draw(st.booleans()), draw(st.sampled_from([(0, 1), (False, True), (0.0, 1.0)]))
    ways = draw(_ways(len(numbers)))
    colours = [0]
    for _ in numbers[1:]:
        colours.append(colours[-1] + draw(st.integers(0, 1)))
    members: dict[int, list[int]] = defaultdict(list)
    for place, colour in enumerate(colours):
        members[colour].append(place)
    nodes: list[dict[str, Any]] = []
    costs = [draw(st.integers(0, 8000)) / 8 for _ in numbers]  # milliseconds to move what each makes
    latencies = [draw(_times) for _ in numbers]
    for place, number in enumerate(numbers):
        size = draw(_sizes) + round(costs[place] / 1000 * bandwidth)
        node = {"id": number, "size": size, "fpgaLatency": latencies[place]}
        if draw(st.booleans()):
            node |= {"name": f"n{number}", "cpuLatency": 1e9, "supportedOnFpga": yes, "isBackwardNode": no}
        elif draw(st.booleans()):
            node |= {"supportedOnFpga": no, "cpuLatency": latencies[place], "fpgaLatency": None}
        if trains or len(members[colours[place]]) > 1:
            node["colorClass"] = colours[place]
        nodes.append(node)
    edges = [{"sourceId": numbers[a], "destId": numbers[b], "cost": costs[a]} for a, b in ways]
    if draw(st.booleans()):
        edges = [edge | {"size": edge["cost"] / 1000 * bandwidth} for edge in edges]
    else:
        bandwidth = 1e9  # none follows from the file
    backward = {colour: draw(_times) for colour in members} if trains else {}
    for colour, latency in backward.items():
        number = 2_000_000 + colour
        nodes.append({"id": number, "fpgaLatency": latency, "isBackwardNode": yes, "colorClass": colour})
        edges.append({"sourceId": numbers[members[colour][0]], "destId": number, "cost": 0.0})
    if not any(edge["cost"] for edge in edges):
        bandwidth = 1e9
    names = {colour: str(min(numbers[place] for place in places)) for colour, places in members.items()}
    layers = {}
    for colour, places in members.items():
        sent = {a: costs[a] / 1000 * bandwidth for a, _ in ways}
        held = sum(nodes[place]["size"] for place in places)
        saved = sum(min(sent.get(place, 0.0), nodes[place]["size"]) for place in places)
        forward = sum(latencies[place] for place in places)
        layers[names[colour]] = Said(forward / 1000, backward.get(colour, 0) / 1000, held - saved, saved, {})
    for a, b in ways:
        if colours[a] != colours[b]:
            reads, source = layers[names[colours[b]]].reads, names[colours[a]]
            reads[source] = max(reads.get(source, 0.0), costs[a] / 1000 * bandwidth)
    document = {"nodes": draw(st.permutations(nodes)), "edges": draw(st.permutations(edges))}
    more = {"maxFPGAs": 6, "maxCPUs": 1, "maxSizePerFPGA": 16 << 30} if draw(st.booleans()) else {}
    return Foreign(json.dumps(document | more, indent=draw(st.sampled_from([None, 1]))), layers)


@st.composite
def piper_files(draw: st.DrawFn) -> Foreign:
    """Several tensor sizes, with and without recomputing, whole numbers or not, keys left out."""
    numbers = draw(_numbers())
    sizes = ["1", *draw(st.sets(st.sampled_from(["2", "4", "8"])))]
    nodes, layers = [], {}
    for number in numbers:
        rows = {}
        for size in draw(st.permutations(sizes)):
            forward, backward = draw(_times) + 0.001, draw(_times)
            parameters, saved = draw(_sizes), draw(_sizes)
            figures = {"parameterSize": parameters, "memoryUsageA": saved, "memoryUsageB": 2 * parameters}
            kept = {"id": "vanilla", "timePerSample": forward + backward, **figures}
            again = {"id": "activation recomp", "timePerSample": 2 * forward + backward, **figures}
            if draw(st.booleans()):
                kept |= {"syncTimeFw": 0.0, "syncTimeBw": 1}
            told = draw(st.sampled_from([[kept], [kept, again], [again, kept]]))
            rows[size] = told
            if size == "1":
                first = forward if len(told) > 1 else (forward + backward) / 3
                layers[str(number)] = Said(first, forward + backward - first, parameters, saved, {})
        nodes.append({"id": number, "TMPCs": rows} | ({"name": "Layer"} if draw(st.booleans()) else {}))
    costs = [float(draw(_sizes)) for _ in numbers]
    edges = []
    for a, b in draw(_ways(len(numbers))):
        edges.append({"sourceId": numbers[a], "destId": numbers[b], "communicationCost": costs[a]})
        layers[str(numbers[b])].reads[str(numbers[a])] = costs[a]
    document: dict[str, Any] = {"nodes": draw(st.permutations(nodes)), "edges": draw(st.permutations(edges))}
    if draw(st.booleans()):
        document |= {"maxDevices": 8, "maxMemoryPerDevice": 80e9, "bandwidth": 25e9, "mbsInBatch": 480}
    return Foreign(json.dumps(document), layers)


FILES = {"pipedream": pipedream_files(), "dnn-partitioning": dnn_partitioning_files(), "piper": piper_files()}
"""Sound files by system."""


@st.composite
def spelt(draw: st.DrawFn, orders: list[list[str]]) -> str:
    """A schedule's rows as CSV in any of its spellings: blanks, cells that follow from others, pairs side by side."""
    lines = []
    for order in orders:
        cells, left = [], list(order)
        while left:
            cells += draw(
                st.lists(st.sampled_from(["", " ", "0SEND_F0", "1RECV_B3", "0UNSHARD", "2REDUCE_GRAD"]), max_size=2)
            )
            pair = len(left) > 1 and draw(st.booleans())
            cells.append(f"({left.pop(0)};{left.pop(0)})OVERLAP_F_B" if pair else f" {left.pop(0)}")
        lines.append(",".join(cells + [""] * draw(st.integers(0, 2))))
    end = draw(st.sampled_from(["\n", "\r\n"]))
    return end.join(lines) + end * draw(st.integers(0, 3))
