"""PipeDream's profiles (``graph.txt``) become profiles of ours.

    node4 -- Linear(in_features=9216, ...) -- forward_compute_time=1.737, backward_compute_time=3.072,
             activation_size=4194304.0, parameter_size=151011328.000[ -- stage_id=2]    (ms, bytes)
    <tab>node4 -- node5                                                                 an edge

Nodes and edges stand in any order. Times are for a whole mini-batch, whose size the file does not tell. ``Input`` nodes
carry the time of loading data and are no layers. A list of sizes ``[a; b]`` is what a layer of several outputs hands
on: their sum. In-place layers carry the full size of what they change.
"""

from __future__ import annotations

import re
from pathlib import Path

from planner.errors import InputError
from planner.exchange.foreign import ForeignEdge, ForeignModel, figure, halved_backward, profile_of
from planner.files import read_text
from planner.profile import Layer, Profile

_NODE = re.compile(
    r"(?P<name>\S+) -- (?P<kind>.*) -- "
    r"forward_compute_time=(?P<forward>[^,]*), backward_compute_time=(?P<backward>[^,]*), "
    r"activation_size=(?P<activation>\[[^\]]*\]|[^,]*), parameter_size=(?P<parameters>\S+?)(?: -- stage_id=\S+)?"
)
_EDGE = re.compile(r"(?P<source>\S+) -- (?P<target>\S+)")
_INPUT = re.compile(r"Input\d*")


def import_pipedream(path: Path, *, microbatch_size: int | None = None) -> tuple[Profile, tuple[str, ...]]:
    """The profile in a PipeDream file, and remarks on what it left out.

    ``microbatch_size``: samples that the file's times are for, which it does not tell. Raises InputError on anything
    else than such a file.
    """
    if microbatch_size is None:
        raise InputError(
            f"{path}: a PipeDream profile does not tell how many samples its times are for",
            hint="give --microbatch-size (their vgg16 and resnet50: 128; alexnet: 256)",
        )
    layers: dict[str, Layer] = {}
    inputs: dict[str, float] = {}
    activations: dict[str, float] = {}
    edges: list[tuple[int, str, str]] = []
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        text, place = line.strip(), f"{path}: line {number}"
        if not text:
            continue
        if node := _NODE.fullmatch(text):
            name = node["name"]
            if name in activations:
                raise InputError(f"{place}: {name} stands there twice", hint="remove one of them")
            activations[name] = _sum(node["activation"], f"{place}: activation_size")
            if _INPUT.fullmatch(node["kind"].strip()):
                inputs[name] = figure(node["forward"], place=f"{place}: forward_compute_time") / 1000
            else:
                layers[name] = _layer(node, activations[name], microbatch_size, place)
        elif edge := _EDGE.fullmatch(text):
            edges.append((number, edge["source"], edge["target"]))
        else:
            raise InputError(
                f"{place}: is neither a node nor an edge of a PipeDream profile: {text[:60]!r}",
                hint="nodes read `node1 -- Conv2d(...) -- forward_compute_time=..., ...`, edges `node1 -- node2`",
            )
    model = ForeignModel(
        layers=tuple(layers.values()),
        edges=_edges(path, edges, activations, inputs),
        microbatch_size=microbatch_size,
    )
    return profile_of(model, path=path, system="PipeDream"), _remarks(layers, inputs)


def _layer(node: re.Match[str], activation: float, microbatch_size: int, place: str) -> Layer:
    parameters = round(figure(node["parameters"], place=f"{place}: parameter_size"))
    return Layer(
        name=node["name"],
        kind=node["kind"].strip(),
        modules=(),
        parameter_bytes=parameters,
        trainable_bytes=parameters,
        buffer_bytes=0,
        costs=(
            halved_backward(
                microbatch_size=microbatch_size,
                forward_s=figure(node["forward"], place=f"{place}: forward_compute_time") / 1000,
                backward_s=figure(node["backward"], place=f"{place}: backward_compute_time") / 1000,
                saved_bytes=round(activation),
            ),
        ),
    )


def _sum(text: str, place: str) -> float:
    sizes = text.strip("[]").split(";") if text.startswith("[") else [text]
    return sum(figure(size.strip(), place=place) for size in sizes)


def _edges(
    path: Path, edges: list[tuple[int, str, str]], activations: dict[str, float], inputs: dict[str, float]
) -> tuple[ForeignEdge, ...]:
    for number, *ends in edges:
        for end in ends:
            if end not in activations:
                raise InputError(f"{path}: line {number}: there is no node {end}", hint="remove the edge")
        if ends[1] in inputs:
            raise InputError(f"{path}: line {number}: an edge goes into the input {ends[1]}", hint="remove the edge")
    return tuple(
        ForeignEdge(source, target, activations[source]) for _, source, target in edges if source not in inputs
    )


def _remarks(layers: dict[str, Layer], inputs: dict[str, float]) -> tuple[str, ...]:
    remarks = []
    if inputs:
        loading_ms = sum(inputs.values()) * 1000
        remarks.append(f"left out {', '.join(inputs)}: inputs are no layers ({loading_ms:.4g} ms of loading data)")
    in_place = sum("inplace" in layer.kind for layer in layers.values())
    if in_place:
        remarks.append(f"{in_place} in-place layers count their output in saved_bytes too, as the file has it")
    return tuple(remarks)
