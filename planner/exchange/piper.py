"""The model files of "Piper: Multidimensional Planner for DNN Parallelization" (2021) become profiles of ours.

    {"maxDevices": 10, "maxMemoryPerDevice": bytes, "bandwidth": bytes/s, "mbsInBatch": micro-batches a step,
     "nodes": [{id, name, TMPCs: {"<tensor size>": [{id: "vanilla" | "activation recomp", timePerSample: s,
                parameterSize: bytes, memoryUsageA, memoryUsageB, syncTimeFw, syncTimeBw}]}}],
     "edges": [{sourceId, destId, communicationCost: bytes}]}

A stage with y micro-batches in flight needs A·y + B: A is what is saved for the backward, and B is the parameters,
their gradients, and workspace. Forward and backward are timed as one; recomputing adds one forward, so the difference
of the two times is the forward, and where only one is there the forward is a third. Times contain the tensor group's
own collectives.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

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
    unknown_keys,
    whole,
)
from planner.files import read_json
from planner.profile import Collective, Collectives, Cost, Layer, Profile

_KEPT, _RECOMPUTED = "vanilla", "activation recomp"
_KEYS = frozenset({"maxDevices", "maxMemoryPerDevice", "bandwidth", "mbsInBatch", "nodes", "edges"})
_NODE_KEYS = frozenset({"id", "name", "TMPCs", "isBackwardNode"})
_VARIANT_KEYS = frozenset(
    {"id", "timePerSample", "parameterSize", "memoryUsageA", "memoryUsageB", "syncTimeFw", "syncTimeBw"}
)
_EDGE_KEYS = frozenset({"sourceId", "destId", "communicationCost"})
_NONE = Collective(count=0.0, bytes=0.0)


def import_piper(path: Path, *, microbatch_size: int | None = None) -> tuple[Profile, tuple[str, ...]]:
    """The profile in a Piper file, and remarks on it.

    ``microbatch_size``: samples that the file's times are for, 1 where it is None. Raises InputError on anything else
    than such a file.
    """
    size = microbatch_size or 1
    document = mapping(read_json(path), place=f"{path}: the file")
    nodes, edges = entries(document, "nodes", path), entries(document, "edges", path)
    memory, bandwidth, microbatches = (
        figure(document.get(key, 0), place=f"{path}: {key}")
        for key in ("maxMemoryPerDevice", "bandwidth", "mbsInBatch")
    )
    model = ForeignModel(
        layers=tuple(_layer(node, size, f"{path}: nodes[{index}]") for index, node in enumerate(nodes)),
        edges=tuple(_edge(edge, f"{path}: edges[{index}]") for index, edge in enumerate(edges)),
        microbatch_size=size,
        memory_bytes=round(memory),
        bandwidth_bytes_per_s=bandwidth or None,
        global_batch=round(microbatches) * size or None,
    )
    variants = [variant for node in nodes for listed in node["TMPCs"].values() for variant in listed]
    unknown = (
        *unknown_keys([document], _KEYS, "the file"),
        *unknown_keys(nodes, _NODE_KEYS, "nodes"),
        *unknown_keys(variants, _VARIANT_KEYS, "TMPCs"),
        *unknown_keys(edges, _EDGE_KEYS, "edges"),
    )
    return profile_of(model, path=path, system="Piper"), unknown


def _layer(node: dict[str, Any], microbatch_size: int, place: str) -> Layer:
    if flag(node.get("isBackwardNode", 0), place=f"{place}.isBackwardNode"):
        raise InputError(f"{place}: is a backward node, and Piper's times hold the backward", hint="fold it in")
    rows = mapping(node.get("TMPCs"), place=f"{place}.TMPCs")
    sizes = sorted((_tensor_size(word, f"{place}.TMPCs"), word) for word in rows)
    for (size, one), (next_size, other) in pairwise(sizes):
        if size == next_size:
            raise InputError(f"{place}.TMPCs: {one!r} and {other!r} are one tensor size", hint="remove one of them")
    costs = tuple(_cost(rows[word], tensor, microbatch_size, f"{place}.TMPCs.{word}") for tensor, word in sizes)
    if not costs:
        raise InputError(f"{place}.TMPCs: is empty", hint="give the costs of at least one tensor size")
    whole_bytes = _figure(_variants(rows[sizes[0][1]], place)[_KEPT], "parameterSize", place)
    return Layer(
        name=str(whole(node.get("id"), place=f"{place}.id")),
        kind=str(node.get("name", "")),
        modules=(),
        parameter_bytes=round(whole_bytes),
        trainable_bytes=round(whole_bytes),
        buffer_bytes=0,
        costs=costs,
    )


def _tensor_size(word: str, place: str) -> int:
    size = whole(word, place=f"{place}, tensor size")
    if not size:
        raise InputError(f"{place}: tensor size is 0", hint="it must be at least 1")
    return size


def _cost(listed: object, tensor: int, microbatch_size: int, place: str) -> Cost:
    """One tensor size's row, from its variants with and without recomputing."""
    variants = _variants(listed, place)
    kept, again = variants[_KEPT], variants.get(_RECOMPUTED)
    both_s = _figure(kept, "timePerSample", place)
    forward_s = (_figure(again, "timePerSample", place) - both_s) if again else both_s / 3
    if not 0 <= forward_s <= both_s:
        forward_s = both_s / 3
    parameters = _figure(kept, "parameterSize", place)
    own: dict[str, Any] = {}
    if tensor > 1:
        own = {name: round(parameters) for name in ("parameter_bytes", "trainable_bytes")}
        own |= {"buffer_bytes": 0, "collectives": Collectives(forward=_NONE, backward_input=_NONE)}
    return halved_backward(
        microbatch_size=microbatch_size,
        tensor=tensor,
        forward_s=forward_s,
        backward_s=both_s - forward_s,
        saved_bytes=round(_figure(kept, "memoryUsageA", place)),
        workspace_bytes=max(0, round(_figure(kept, "memoryUsageB", place) - 2 * parameters)),
        **own,
    )


def _variants(listed: object, place: str) -> dict[str, dict[str, Any]]:
    if not isinstance(listed, list):
        raise InputError(f"{place}: must be a list", hint=f"of entries with the ids {_KEPT!r} and {_RECOMPUTED!r}")
    made = {}
    for index, entry in enumerate(listed):
        variant = mapping(entry, place=f"{place}[{index}]")
        name = variant.get("id")
        if name not in (_KEPT, _RECOMPUTED):
            raise InputError(f"{place}[{index}].id: {name!r} is not known", hint=f"{_KEPT!r} and {_RECOMPUTED!r} are")
        if name in made:
            raise InputError(f"{place}[{index}].id: {name!r} stands there twice", hint="remove one of them")
        made[str(name)] = variant
    if _KEPT not in made:
        raise InputError(f"{place}: has no {_KEPT!r} entry", hint="its figures are those without recomputing")
    return made


def _figure(variant: dict[str, Any], key: str, place: str) -> float:
    return figure(variant.get(key), place=f"{place}, {variant['id']}: {key}")


def _edge(edge: dict[str, Any], place: str) -> ForeignEdge:
    source, target = (str(whole(edge.get(key), place=f"{place}.{key}")) for key in ("sourceId", "destId"))
    return ForeignEdge(source, target, figure(edge.get("communicationCost"), place=f"{place}.communicationCost"))
