"""Other systems' profiles: real files come out with every figure of theirs, and what is no such file is refused."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
from support.cases import case

from planner.errors import InputError
from planner.exchange.dnn_partitioning import import_dnn_partitioning
from planner.exchange.pipedream import import_pipedream
from planner.exchange.piper import import_piper
from planner.profile import Profile, read_profile, write_profile

PIPEDREAM = ["vgg16", "resnet50", "alexnet", "gnmt", "densenet121"]


def _survives(profile: Profile, folder: Path) -> None:
    """What is imported is a profile that our own reader finds nothing wrong with."""
    write_profile(profile, folder / "profile.json")
    assert read_profile(folder / "profile.json") == profile


@pytest.mark.parametrize("name", PIPEDREAM)
def test_pipedream_keeps_times_sizes_and_edges(name: str, tmp_path: Path) -> None:
    path = case(f"pipedream/{name}.graph.txt")
    profile, remarks = import_pipedream(path, microbatch_size=128)
    text = path.read_text()
    nodes = {
        node: (kind, float(forward), float(backward), sizes, float(parameters))
        for node, kind, forward, backward, sizes, parameters in re.findall(
            r"(node\d+) -- (.*) -- forward_compute_time=(\S+), backward_compute_time=(\S+), "
            r"activation_size=(.*), parameter_size=([\d.]+)",
            text,
        )
    }
    inputs = {node for node, (kind, *_) in nodes.items() if kind.startswith("Input")}
    assert {layer.name for layer in profile.layers} == set(nodes) - inputs
    for layer in profile.layers:
        _, forward, backward, sizes, parameters = nodes[layer.name]
        (cost,) = layer.costs
        activation = sum(float(size) for size in re.findall(r"[\d.]+", sizes))
        assert (cost.microbatch_size, layer.parameter_bytes, layer.trainable_bytes) == (128, parameters, parameters)
        assert (cost.forward_s, cost.saved_bytes) == (forward / 1000, activation)
        assert cost.backward_input_s == cost.backward_weight_s == backward / 2000
    edges = set(re.findall(r"^\t(node\d+) -- (node\d+)$", text, re.MULTILINE))
    assert {(edge.source, edge.target) for edge in profile.edges} == {ends for ends in edges if ends[0] not in inputs}
    for edge in profile.edges:
        (tensor,) = edge.tensors
        sizes = nodes[edge.source][3]
        assert tensor.bytes_per_sample * 128 == sum(float(size) for size in re.findall(r"[\d.]+", sizes))
    assert any(", ".join(sorted(inputs)) in remark for remark in remarks)
    assert (profile.provenance, profile.device.kind) == ("imported", "estimate")
    _survives(profile, tmp_path)


def test_pipedream_gradients_flow_where_there_are_parameters_before() -> None:
    profile, _ = import_pipedream(case("pipedream/gnmt.graph.txt"), microbatch_size=128)
    graph = nx.DiGraph([(edge.source, edge.target) for edge in profile.edges])
    trained = {layer.name for layer in profile.layers if layer.trainable_bytes}
    grads = {edge.source: edge.tensors[0].grad for edge in profile.edges}
    assert grads == {name: bool(trained & ({name} | nx.ancestors(graph, name))) for name in grads}
    assert set(grads.values()) == {True, False}


@pytest.mark.parametrize("name", ["bert24_inference", "bert24_training", "gnmt_inference", "resnet50_inference"])
def test_dnn_partitioning_keeps_times_costs_and_memory(name: str, tmp_path: Path) -> None:
    path = case(f"dnn-partitioning/{name}.json")
    data = json.loads(path.read_text())
    profile, _ = import_dnn_partitioning(path)
    forward = {node["id"]: node for node in data["nodes"] if not node["isBackwardNode"]}
    backward = {node["colorClass"]: node for node in data["nodes"] if node["isBackwardNode"]}
    assert {layer.name for layer in profile.layers} == {str(number) for number in forward}
    for layer in profile.layers:
        node = forward[int(layer.name)]
        (cost,) = layer.costs
        back = backward.get(node["colorClass"], {"fpgaLatency": 0})
        assert cost.forward_s == node["fpgaLatency"] / 1000
        assert cost.backward_input_s + cost.backward_weight_s == pytest.approx(back["fpgaLatency"] / 1000)
        assert layer.parameter_bytes + cost.saved_bytes == pytest.approx(node["size"], abs=1)
        assert layer.trainable_bytes == (layer.parameter_bytes if backward else 0)
    assert profile.links is not None
    costs = {(str(edge["sourceId"]), str(edge["destId"])): edge["cost"] / 1000 for edge in data["edges"]}
    for edge in profile.edges:
        (tensor,) = edge.tensors
        moved = tensor.bytes_per_sample / profile.links.bandwidth_bytes_per_s
        assert moved == pytest.approx(costs[edge.source, edge.target], rel=1e-12)
    pairs = {ends for ends in costs if all(int(end) in forward for end in ends)}
    assert {(edge.source, edge.target) for edge in profile.edges} == pairs
    assert profile.device.memory_bytes == data["maxSizePerFPGA"]
    _survives(profile, tmp_path)


def test_piper_keeps_times_sizes_and_memory(tmp_path: Path) -> None:
    path = case("piper/bert32a100.json")
    data = json.loads(path.read_text())
    profile, _ = import_piper(path)
    nodes = {str(node["id"]): node for node in data["nodes"]}
    assert {layer.name for layer in profile.layers} == set(nodes)
    for layer in profile.layers:
        rows = {row.tensor: row for row in layer.costs}
        assert set(rows) == {int(size) for size in nodes[layer.name]["TMPCs"]}
        for size, row in rows.items():
            kept, again = nodes[layer.name]["TMPCs"][str(size)]
            assert row.forward_s + row.backward_input_s + row.backward_weight_s == pytest.approx(kept["timePerSample"])
            if again["timePerSample"] < 2 * kept["timePerSample"]:
                assert row.forward_s == pytest.approx(again["timePerSample"] - kept["timePerSample"])
            assert row.saved_bytes == kept["memoryUsageA"]
            parameters = layer.parameter_bytes if size == 1 else row.parameter_bytes
            assert parameters == kept["parameterSize"]
            held = 2 * parameters * profile.gradient_bytes_per_trainable_byte + row.workspace_bytes
            assert held == pytest.approx(max(kept["memoryUsageB"], 2 * parameters))
    costs: dict[str, set[float]] = defaultdict(set)
    for edge in data["edges"]:
        costs[str(edge["sourceId"])].add(edge["communicationCost"])
    for edge in profile.edges:
        assert edge.tensors[0].bytes_per_sample in costs[edge.source]
    assert len(profile.edges) == len(data["edges"])
    assert profile.device.memory_bytes == 80e9
    assert profile.global_batch == 1920
    _survives(profile, tmp_path)


def test_times_may_be_for_several_samples() -> None:
    one, _ = import_piper(case("piper/bert32a100.json"))
    four, _ = import_piper(case("piper/bert32a100.json"), microbatch_size=4)
    assert four.layers[5].costs[0].microbatch_size == 4
    assert four.layers[5].costs[0].forward_s == one.layers[5].costs[0].forward_s
    assert four.edges[5].tensors[0].bytes_per_sample * 4 == one.edges[5].tensors[0].bytes_per_sample


NODE = "node{} -- {} -- forward_compute_time=1.0, backward_compute_time=2.0, activation_size={}, parameter_size=8.0\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no layers"),
        ("{}", "line 1: is neither a node nor an edge"),
        (NODE.format(1, "Linear(1, 1)", "x"), "line 1: activation_size is no number: 'x'"),
        (NODE.format(1, "Linear(1, 1)", "[1.0; -2.0]"), "line 1: activation_size is -2.0; it must be finite"),
        (NODE.format(1, "Linear(1, 1)", "[1e308; 1e308]"), "line 1: activation_size is 1e308; it must be finite"),
        (NODE.format(1, "Linear(1, 1)", "nan"), "line 1: activation_size is nan"),
        (NODE.format(1, "Input", "1.0"), "has no layers"),
        (NODE.format(1, "A", "1.0") * 2, "line 2: node1 stands there twice"),
        (NODE.format(1, "A", "1.0") + "\tnode1 -- node2\n", "line 2: there is no node node2"),
        (
            NODE.format(1, "A", "1.0") + NODE.format(2, "Input", "1.0") + "\tnode1 -- node2\n",
            "line 3: an edge goes into",
        ),
        (
            NODE.format(1, "A", "1.0") + NODE.format(2, "B", "1.0") + "\tnode1 -- node2\n\tnode2 -- node1\n",
            "its edges form a cycle: node1 -> node2 -> node1",
        ),
    ],
)
def test_what_is_no_pipedream_profile_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "graph.txt"
    path.write_text(text)
    with pytest.raises(InputError) as raised:
        import_pipedream(path, microbatch_size=1)
    assert str(raised.value).startswith(f"{path}: {said}")


def test_pipedream_needs_the_number_of_samples(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="give --microbatch-size"):
        import_pipedream(tmp_path / "graph.txt")


def test_pipedream_stages_are_read_over(tmp_path: Path) -> None:
    path = tmp_path / "graph.txt"
    path.write_text(NODE.format(1, "A -- B", "[1.0; 2.0]").replace("8.0\n", "8.0 -- stage_id=2\n"))
    profile, _ = import_pipedream(path, microbatch_size=1)
    (layer,) = profile.layers
    assert (layer.kind, layer.costs[0].saved_bytes, layer.parameter_bytes) == ("A -- B", 3, 8)


def _node(number: int, **more: Any) -> dict[str, Any]:
    return {"id": number, "name": f"n{number}", "fpgaLatency": 1.0, "size": 8.0, "isBackwardNode": 0} | more


def _graph(*nodes: dict[str, Any], edges: Any = (), **more: Any) -> dict[str, Any]:
    made = [{"sourceId": a, "destId": b, "cost": 1.0, "size": 4.0} for a, b in edges]
    return {"nodes": list(nodes), "edges": made, **more}


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ([], ": the file must be a mapping"),
        ({}, ": nodes must be a list"),
        ({"nodes": [], "edges": []}, ": has no layers"),
        ({"nodes": [1], "edges": []}, ": nodes[0] must be a mapping"),
        (_graph(_node(1, id="x")), ": nodes[0].id is no number: 'x'"),
        (_graph(_node(1, id=1.5)), ": nodes[0].id must be a whole number, not 1.5"),
        (_graph(_node(1, fpgaLatency=-1)), ": nodes[0].fpgaLatency is -1; it must be finite"),
        (_graph(_node(1, fpgaLatency=None)), ": nodes[0].fpgaLatency is missing"),
        (_graph(_node(1, fpgaLatency=[1])), ": nodes[0].fpgaLatency must be a number, not [1]"),
        (_graph(_node(1, isBackwardNode="false")), ': nodes[0].isBackwardNode must be 0 or 1, not "false"'),
        (_graph(_node(1, size=1.7e308), _node(2, size=1.7e308)), ": nodes[0].size is 1.7e+308; it must be finite"),
        (_graph(_node(2**53), _node(2**53 + 1)), ": nodes[0].id is 9007199254740992; it must be finite"),
        (_graph(_node(1), _node(1)), ": nodes[1].id: 1 stands there twice"),
        (_graph(_node(1), edges=[(1, 2)]), ": edges[0]: there is no node 2"),
        (_graph(_node(1), _node(2), edges=[(1, 2), (2, 1)]), ": its edges form a cycle: 1 -> 2 -> 1"),
        (
            _graph(_node(1, isBackwardNode=1, colorClass=3)),
            ": backward node 1 (n1): colour class 3 has no forward node",
        ),
    ],
)
def test_what_is_no_dnn_partitioning_graph_is_refused(tmp_path: Path, data: Any, said: str) -> None:
    path = tmp_path / "graph.json"
    path.write_text(json.dumps(data))
    with pytest.raises(InputError) as raised:
        import_dnn_partitioning(path)
    assert str(raised.value).startswith(f"{path}{said}")


def test_a_colour_class_is_one_layer(tmp_path: Path) -> None:
    """Nodes 1 and 3 stay together, 5 is their backward, and 2 has no class of its own."""
    path = tmp_path / "graph.json"
    nodes = [
        _node(5, colorClass=7, isBackwardNode=1, fpgaLatency=4.0),
        _node(1, colorClass=7),
        _node(3, colorClass=7, fpgaLatency=2.0),
        _node(2),
        _node(4, supportedOnFpga=0, cpuLatency=9.0),
    ]
    path.write_text(json.dumps(_graph(*nodes, edges=[(1, 3), (3, 2), (1, 2), (2, 4), (2, 5)])))
    profile, remarks = import_dnn_partitioning(path)
    assert [layer.name for layer in profile.layers] == ["1", "2", "4"]
    first = profile.layers[0].costs[0]
    assert (first.forward_s, first.backward_input_s, first.backward_weight_s) == (0.003, 0.002, 0.002)
    assert profile.layers[2].costs[0].forward_s == 0.009
    assert {(edge.source, edge.target) for edge in profile.edges} == {("1", "2"), ("2", "4")}
    assert any("folded" in remark for remark in remarks)
    assert any("CPU time" in remark for remark in remarks)


def test_classes_that_wait_for_one_another_are_one_layer(tmp_path: Path) -> None:
    """1 and 3 stay together, and 2 lies between them: no cut can part the three."""
    path = tmp_path / "graph.json"
    nodes = [_node(1, colorClass=7), _node(2, fpgaLatency=2.0), _node(3, colorClass=7), _node(4)]
    path.write_text(json.dumps(_graph(*nodes, edges=[(1, 2), (2, 3), (3, 4)])))
    profile, _ = import_dnn_partitioning(path)
    assert [(layer.name, layer.costs[0].forward_s) for layer in profile.layers] == [("1", 0.004), ("4", 0.001)]
    assert [(edge.source, edge.target) for edge in profile.edges] == [("1", "4")]


def test_a_backward_node_without_a_forward_goes_with_its_neighbour(tmp_path: Path) -> None:
    """13 and 14 are a class without a forward node, behind 12, the backward of 2; 15 hangs before 11 alone."""
    path = tmp_path / "graph.json"
    back = [(11, 1, 1.0), (12, 2, 2.0), (13, 9, 4.0), (14, 9, 8.0), (15, 8, 16.0)]
    nodes = [_node(n, isBackwardNode=1, colorClass=colour, fpgaLatency=ms) for n, colour, ms in back]
    nodes += [_node(1, colorClass=1), _node(2, colorClass=2)]
    path.write_text(json.dumps(_graph(*nodes, edges=[(1, 2), (2, 12), (12, 13), (13, 14), (14, 11), (15, 11)])))
    profile, _ = import_dnn_partitioning(path)
    spent = {layer.name: 2 * layer.costs[0].backward_input_s for layer in profile.layers}
    assert spent == pytest.approx({"1": 0.017, "2": 0.014})


def _piper(rows: Any) -> dict[str, Any]:
    return {"nodes": [{"id": 0, "name": "n", "TMPCs": rows}], "edges": []}


VANILLA = {"id": "vanilla", "timePerSample": 3.0, "parameterSize": 8, "memoryUsageA": 4, "memoryUsageB": 20}


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (_piper(None), ": nodes[0].TMPCs must be a mapping"),
        (_piper({}), ": nodes[0].TMPCs: is empty"),
        (_piper({"x": []}), ": nodes[0].TMPCs, tensor size is no number: 'x'"),
        (_piper({"1": {}}), ": nodes[0].TMPCs.1: must be a list"),
        (_piper({"1": []}), ": nodes[0].TMPCs.1: has no 'vanilla' entry"),
        (_piper({"1": [{"id": "magic"}]}), ": nodes[0].TMPCs.1[0].id: 'magic' is not known"),
        (_piper({"1": [VANILLA, VANILLA]}), ": nodes[0].TMPCs.1[1].id: 'vanilla' stands there twice"),
        (_piper({"1": [VANILLA], "1.0": [VANILLA]}), ": nodes[0].TMPCs: '1' and '1.0' are one tensor size"),
        (_piper({"0": [VANILLA]}), ": nodes[0].TMPCs: tensor size is 0; it must be at least 1"),
        (_piper({"1": [VANILLA | {"timePerSample": None}]}), ": nodes[0].TMPCs.1, vanilla: timePerSample is missing"),
    ],
)
def test_what_is_no_piper_model_is_refused(tmp_path: Path, data: Any, said: str) -> None:
    path = tmp_path / "model.json"
    path.write_text(json.dumps(data))
    with pytest.raises(InputError) as raised:
        import_piper(path)
    assert str(raised.value).startswith(f"{path}{said}")


def test_piper_without_recomputing_takes_a_third_as_forward(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    path.write_text(json.dumps(_piper({"2": [VANILLA]})))
    profile, _ = import_piper(path)
    (row,) = profile.layers[0].costs
    assert (row.tensor, row.forward_s, row.backward_input_s, row.backward_weight_s) == (2, 1.0, 1.0, 1.0)
    assert (row.parameter_bytes, row.workspace_bytes, row.saved_bytes) == (8, 4, 4)


def test_what_a_format_does_not_have_is_remarked(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    path.write_text(json.dumps(_piper({"1": [VANILLA | {"colour": 1}]}) | {"more": 2}))
    _, remarks = import_piper(path)
    assert [remark.partition(": ")[2] for remark in remarks] == ["'more' of the file", "'colour' of TMPCs"]
    path.write_text(json.dumps(_graph(_node(1, extra=0), _node(2), edges=[(1, 2)])))
    _, remarks = import_dnn_partitioning(path)
    assert any("'extra' of nodes" in remark for remark in remarks)


@pytest.mark.parametrize("name", ["dnn-partitioning/bert24_training.json", "piper/bert32a100.json"])
def test_real_files_hold_nothing_unknown(name: str) -> None:
    read = import_piper if name.startswith("piper") else import_dnn_partitioning
    _, remarks = read(case(name))
    assert not any("not read" in remark for remark in remarks)
