"""What the importers of profiles share: other systems' layers and edges become a profile of ours.

file ─importer─▶ ForeignLayer, ForeignEdge ─▶ in topological order, tensors named, gradients followed ─▶ Profile
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import networkx as nx

from planner.errors import InputError
from planner.files import as_record, plain
from planner.profile import (
    Cost,
    Device,
    Edge,
    EdgeTensor,
    Layer,
    OptimizerCost,
    Profile,
    ProfiledLinks,
    ProfiledModel,
)
from planner.record import record


class ForeignEdge(NamedTuple):
    """What ``target`` reads from ``source``: ``bytes`` a micro-batch (the size that the file's times are for)."""

    source: str
    target: str
    bytes: float


@record
class ForeignModel:
    """A model as a foreign file has it: layers in any order, whose ``kind`` is what the file calls them."""

    layers: tuple[Layer, ...]
    edges: tuple[ForeignEdge, ...]
    microbatch_size: int
    memory_bytes: int = 0
    bandwidth_bytes_per_s: float | None = None
    global_batch: int | None = None
    remarks: tuple[str, ...] = ()


def profile_of(model: ForeignModel, *, path: Path, system: str) -> Profile:
    """The profile of a foreign model. Raises InputError where its edges form a cycle, or a figure is impossible."""
    _refuse_doubles(model, path)
    order = _order(model, path)
    layers = sorted(model.layers, key=lambda layer: order[layer.name])
    edges = _edges(model, order)
    links = model.bandwidth_bytes_per_s and ProfiledLinks(
        latency_s=0.0, bandwidth_bytes_per_s=model.bandwidth_bytes_per_s
    )
    made = Profile(
        model=ProfiledModel(
            name=path.name.partition(".")[0] or path.name,
            source=path.name,
            fingerprint=_fingerprint(layers, edges),
        ),
        device=Device(kind="estimate", name=f"imported from {system}", memory_bytes=model.memory_bytes, software={}),
        provenance="imported",
        dtype="float32",
        global_batch=model.global_batch,
        gradient_bytes_per_trainable_byte=1.0,
        optimizer=OptimizerCost(name="none", state_bytes_per_trainable_byte=0.0, step_s_per_trainable_byte=0.0),
        links=links or None,
        layers=tuple(layers),
        edges=edges,
    )
    return as_record(Profile, plain(made), path=f"{path}, as a profile")


def _refuse_doubles(model: ForeignModel, path: Path) -> None:
    names: set[str] = set()
    for layer in model.layers:
        if layer.name in names:
            raise InputError(f"{path}: layer {layer.name} stands there twice", hint="remove one of them")
        names.add(layer.name)
    sizes: dict[tuple[str, str], float] = {}
    for edge in model.edges:
        for end in (edge.source, edge.target):
            if end not in names:
                raise InputError(
                    f"{path}: edge {edge.source} -> {edge.target}: there is no layer {end}", hint="remove the edge"
                )
        if sizes.setdefault((edge.source, edge.target), edge.bytes) != edge.bytes:
            raise InputError(
                f"{path}: edge {edge.source} -> {edge.target} stands there twice, with other sizes", hint="remove one"
            )


def _order(model: ForeignModel, path: Path) -> dict[str, int]:
    """The position of every layer in the one topological order that keeps small numbers first."""
    graph: nx.DiGraph[str] = nx.DiGraph()
    graph.add_nodes_from(layer.name for layer in model.layers)
    graph.add_edges_from((edge.source, edge.target) for edge in model.edges)
    if not graph:
        raise InputError(f"{path}: has no layers", hint="check the file")
    refuse_cycles(graph, path)
    return {name: index for index, name in enumerate(nx.lexicographical_topological_sort(graph, key=_number))}


def refuse_cycles(graph: nx.DiGraph[Any], path: Path) -> None:
    """Raises InputError where some nodes wait for one another."""
    if not nx.is_directed_acyclic_graph(graph):
        cycle = [str(source) for source, _ in nx.find_cycle(graph)]
        raise InputError(
            f"{path}: its edges form a cycle: {' -> '.join([*cycle, cycle[0]])}", hint="a model's layers form none"
        )


def _number(name: str) -> tuple[int, str]:
    digits = "".join(filter(str.isdigit, name))
    return int(digits) if digits else 0, name


def _edges(model: ForeignModel, order: Mapping[str, int]) -> tuple[Edge, ...]:
    """Edges with named tensors: what a layer hands to several readers is one tensor where it has the same size.

    A gradient flows back where a layer with trainable parameters lies at the source or before it.
    """
    trained = {layer.name for layer in model.layers if layer.trainable_bytes > 0}
    edges = sorted(set(model.edges), key=lambda edge: (order[edge.source], order[edge.target]))
    sizes: dict[str, list[float]] = {}
    made = []
    for edge in edges:
        if edge.source in trained:
            trained.add(edge.target)
        known = sizes.setdefault(edge.source, [])
        if edge.bytes not in known:
            known.append(edge.bytes)
        index = known.index(edge.bytes)
        tensor = EdgeTensor(
            name=f"{edge.source}.{index + 1}" if index else edge.source,
            bytes_per_sample=edge.bytes / model.microbatch_size,
            fixed_bytes=0,
            grad=edge.source in trained,
        )
        made.append(Edge(source=edge.source, target=edge.target, tensors=(tensor,)))
    return tuple(made)


def _fingerprint(layers: Sequence[Layer], edges: Sequence[Edge]) -> str:
    """Layers, parameters and edges, as of a captured model; costs are not in it."""
    content = [[layer.name, layer.parameter_bytes, layer.trainable_bytes] for layer in layers]
    text = json.dumps([content, [plain(edge) for edge in edges]], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


_LARGEST: Final = 1e15
"""Bytes (0.9 PiB), milliseconds, a node's number: beyond anything real, and their sums stay finite and exact."""


def figure(value: object, *, place: str) -> float:
    """A figure from 0 to the largest that is taken for one. Raises InputError naming the place where it is none."""
    if value is None:
        raise InputError(f"{place} is missing", hint="check that this is the format that --from names")
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise InputError(f"{place} must be a number, not {json.dumps(value, default=str)[:40]}", hint="correct it")
    try:
        number = float(value)
    except (ValueError, OverflowError):
        raise InputError(f"{place} is no number: {str(value)[:40]!r}", hint="correct it") from None
    if not 0 <= number <= _LARGEST:
        raise InputError(f"{place} is {str(value)[:40]}", hint=f"it must be finite, and from 0 to {_LARGEST:g}")
    return number


def halved_backward(
    *, microbatch_size: int, forward_s: float, backward_s: float, saved_bytes: int, tensor: int = 1, **more: Any
) -> Cost:
    """A cost row of a system that times the backward as one: half of it each to I and W."""
    return Cost(
        microbatch_size=microbatch_size,
        tensor=tensor,
        forward_s=forward_s,
        backward_input_s=backward_s / 2,
        backward_weight_s=backward_s / 2,
        saved_bytes=saved_bytes,
        saved_for_weight_bytes=saved_bytes if backward_s > 0 else 0,
        **{"workspace_bytes": 0, **more},
    )


def whole(value: object, *, place: str) -> int:
    """A whole number, 0 or more, such as an id. Raises InputError naming the place where it is none."""
    number = figure(value, place=place)
    if number != int(number):
        raise InputError(f"{place} must be a whole number, not {value}", hint="correct it")
    return int(number)


def flag(value: object, *, place: str) -> bool:
    """Yes or no, as 1 or 0 or in JSON's own words. Raises InputError naming the place where it is neither."""
    if value not in (0, 1):
        raise InputError(f"{place} must be 0 or 1, not {json.dumps(value, default=str)[:40]}", hint="correct it")
    return bool(value)


def mapping(value: object, *, place: str) -> dict[str, Any]:
    """A mapping. Raises InputError naming the place where it is none."""
    if not isinstance(value, dict):
        raise InputError(f"{place} must be a mapping of keys to values", hint="correct it")
    return value


def entries(document: dict[str, Any], key: str, path: Path) -> list[dict[str, Any]]:
    """The list of mappings under a key. Raises InputError where it is none."""
    found = document.get(key)
    if not isinstance(found, list):
        raise InputError(f"{path}: {key} must be a list", hint="check that this is the format that --from names")
    return [mapping(entry, place=f"{path}: {key}[{index}]") for index, entry in enumerate(found)]


def unknown_keys(rows: list[dict[str, Any]], known: Collection[str], what: str) -> tuple[str, ...]:
    """A remark on the keys of a list of entries that the format does not have, and that are not read: none or one."""
    found = dict.fromkeys(key for row in rows for key in row if key not in known)
    if not found:
        return ()
    shown = ", ".join(repr(key)[:40] for key in list(found)[:5]) + (", ..." if len(found) > 5 else "")
    return (f"not read, as the format does not have it: {shown} of {what}",)
