"""Reading and writing profile files: what the types cannot say is checked here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from planner.errors import InputError
from planner.files import as_record, json_text, plain, read_json, write_atomically
from planner.profile.profile import Cost, Layer, Profile


def read_profile(path: Path) -> Profile:
    """The profile in a JSON file. Raises InputError with file, place and mend where anything in it is wrong."""
    profile = as_record(Profile, read_json(path), path=path)
    for place, fault, mend in _faults(profile):
        raise InputError(f"{path}: {place}: {fault}", hint=mend)
    return profile


def write_profile(profile: Profile, path: Path) -> None:
    """Write a profile whole or not at all. Raises InputError where the folder cannot be written."""
    write_atomically(path, json_text(plain(profile)))


def _faults(profile: Profile) -> Iterator[tuple[str, str, str]]:
    """Place, fault and mend of whatever is wrong between the entries of a well-typed profile."""
    position: dict[str, int] = {}
    sizes: dict[str, tuple[int, str]] = {}
    for index, layer in enumerate(profile.layers):
        place = f"layers[{index}]"
        if layer.name in position:
            yield f"{place}.name", f"{layer.name!r} is also the name of layers[{position[layer.name]}]", "rename one"
        position[layer.name] = index
        yield from _layer_faults(layer, place)
        for name, shared in (layer.shared or {}).items():
            known = sizes.setdefault(name, (shared.bytes, layer.name))
            if known[0] != shared.bytes:
                yield (
                    f"{place}.shared.{name}",
                    f"{shared.bytes} bytes here, {known[0]} in layer {known[1]!r}",
                    "a tied parameter has one size",
                )
    yield from _edge_faults(profile, position)


def _layer_faults(layer: Layer, place: str) -> Iterator[tuple[str, str, str]]:
    if layer.trainable_bytes > layer.parameter_bytes:
        yield f"{place}.trainable_bytes", "is more than parameter_bytes", "parameter_bytes includes the trainable ones"
    shared = layer.shared or {}
    if sum(entry.bytes for entry in shared.values()) > layer.parameter_bytes:
        yield f"{place}.shared", "is more than parameter_bytes", "parameter_bytes includes the shared ones"
    if sum(entry.bytes for entry in shared.values() if entry.trainable) > layer.trainable_bytes:
        yield f"{place}.shared", "its trainable ones are more than trainable_bytes", "trainable_bytes includes them"
    seen: dict[tuple[int, int], int] = {}
    for row, cost in enumerate(layer.costs):
        key = (cost.microbatch_size, cost.tensor)
        if key in seen:
            yield (
                f"{place}.costs[{row}]",
                f"micro-batch size {key[0]} with tensor {key[1]} stands in costs[{seen[key]}] already",
                "remove one of them",
            )
        seen[key] = row
        yield from _cost_faults(cost, f"{place}.costs[{row}]")


def _cost_faults(cost: Cost, place: str) -> Iterator[tuple[str, str, str]]:
    own = {
        "parameter_bytes": cost.parameter_bytes,
        "trainable_bytes": cost.trainable_bytes,
        "buffer_bytes": cost.buffer_bytes,
        "collectives": cost.collectives,
    }
    for name, value in own.items():
        if cost.tensor > 1 and value is None:
            yield f"{place}.{name}", "is missing", f"a row with tensor {cost.tensor} brings its own"
        if cost.tensor == 1 and value is not None:
            yield f"{place}.{name}", "belongs to rows with tensor > 1", "remove it"


def _edge_faults(profile: Profile, position: dict[str, int]) -> Iterator[tuple[str, str, str]]:
    pairs: dict[tuple[str, str], int] = {}
    tensors: dict[tuple[str, str], tuple[object, ...]] = {}
    for index, edge in enumerate(profile.edges):
        place = f"edges[{index}]"
        for end, name in (("source", edge.source), ("target", edge.target)):
            if name not in position:
                yield f"{place}.{end}", f"there is no layer {name!r}", "name one of layers"
        if edge.source not in position or edge.target not in position:
            continue
        if position[edge.source] >= position[edge.target]:
            yield (
                place,
                f"goes from {edge.source!r} back to {edge.target!r}",
                "edges form no cycle, and layers stand in a topological order",
            )
        if (edge.source, edge.target) in pairs:
            yield place, f"repeats edges[{pairs[edge.source, edge.target]}]", "list its tensors in one edge"
        pairs[edge.source, edge.target] = index
        names = [tensor.name for tensor in edge.tensors]
        for row, tensor in enumerate(edge.tensors):
            if names.index(tensor.name) < row:
                yield f"{place}.tensors[{row}].name", f"{tensor.name!r} stands twice", "remove one of them"
            size = (tensor.bytes_per_sample, tensor.fixed_bytes, tensor.parts)
            sizes = [part.tensor for part in tensor.parts or ()]
            if len(set(sizes)) < len(sizes) or 1 in sizes:
                yield (
                    f"{place}.tensors[{row}].parts",
                    "has a tensor size twice, or 1",
                    "one entry for each tensor size above 1 at which it is held in parts",
                )
            if tensors.setdefault((edge.source, tensor.name), size) != size:
                yield (
                    f"{place}.tensors[{row}]",
                    f"{tensor.name!r} of {edge.source!r} has another size in an earlier edge",
                    "a tensor read by several layers is one tensor",
                )
