"""The captured graph with all that is known about it: its layers, and which tensors cross between them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import fx, nn

from planner.capture import layers as cutting
from planner.capture.batch import Batch, leaves
from planner.capture.dataflow import Dataflow, Kind, analyse
from planner.capture.layers import Granularity, Segment
from planner.capture.lifted import Lifted, Role, opaque_call
from planner.capture.trace import Trace, trace
from planner.capture.weightless import Fakes


@dataclass(frozen=True, slots=True, kw_only=True)
class Analysis:
    """The graph with everything known about it; what stage programs are built from."""

    lifted: Lifted
    trace: Trace
    flow: Dataflow
    segments: tuple[Segment, ...]
    layer_of: dict[fx.Node, int]
    crossing: dict[
        fx.Node, dict[int, bool]
    ]  # a tensor read in other layers -> each such layer, and whether gradient flows
    names: dict[fx.Node, str]  # of the crossing tensors
    order_only: frozenset[tuple[int, int]]


_Cut = Callable[[list[fx.Node], Trace, Dataflow], list[Segment]]
"""Layers out of the activation ops in execution order."""


def settled(
    lifted: Lifted, module: nn.Module, batch: Batch, granularity: Granularity, fakes: Fakes | None = None
) -> Analysis:
    """Analyse, insert the copies that turn out to be needed, and again until none is."""

    def cut(live: list[fx.Node], seen: Trace, flow: Dataflow) -> list[Segment]:
        work = _work(lifted, seen, _samples(batch)).__getitem__
        parts = cutting.segments(live, lifted=lifted, root=module, work=work, granularity=granularity)
        return cutting.merged(parts, _inseparable(parts, lifted, seen, flow))

    return _settled(lifted, module, batch, cut, fakes)


def settled_as(
    like: Analysis,
    lifted: Lifted,
    layer_of: Mapping[fx.Node, int],
    module: nn.Module,
    batch: Batch,
    fakes: Fakes | None = None,
) -> Analysis:
    """Analyse a graph that was written from another one and has its layers, given the layer of each op."""

    def cut(live: list[fx.Node], seen: Trace, flow: Dataflow) -> list[Segment]:
        parts = [Segment(name=part.name, kind=part.kind, modules=part.modules) for part in like.segments]
        for node in live:
            original = node.all_input_nodes[0] if node not in layer_of else node  # a copy lies where its original does
            parts[layer_of[original]].nodes.append(node)
        return parts

    return replace(_settled(lifted, module, batch, cut, fakes), order_only=like.order_only)


def _settled(lifted: Lifted, module: nn.Module, batch: Batch, cut: _Cut, fakes: Fakes | None) -> Analysis:
    parameters = dict(module.named_parameters())
    buffers = dict(module.named_buffers())
    while True:
        seen = trace(lifted, parameters, buffers, leaves(batch), fakes)
        flow = analyse(lifted, seen)
        if _copy_changed_inputs(lifted, seen, flow) or _copy_saved_buffers(lifted, seen, flow):
            continue
        live = [node for node in flow.live if flow.kinds[node] is Kind.ACTIVATION and node.op != "placeholder"]
        parts = cut(live, seen, flow)
        layer_of = {node: index for index, part in enumerate(parts) for node in part.nodes}
        crossing = _crossing(parts, layer_of, seen, flow)
        if not _copy_gapped(lifted, crossing, layer_of, seen, flow):
            break
    return Analysis(
        lifted=lifted,
        trace=seen,
        flow=flow,
        segments=tuple(parts),
        layer_of=layer_of,
        crossing=crossing,
        names=_names(parts, crossing, layer_of, flow),
        order_only=_order_only(parts, layer_of, crossing, lifted, seen, flow),
    )


def _samples(batch: Batch) -> int:
    return next(leaf.shape[0] for leaf in leaves(batch) if isinstance(leaf, torch.Tensor))


def _work(lifted: Lifted, seen: Trace, samples: int) -> dict[fx.Node, float]:
    """About what each op does for one sample: FLOPs, and ten for each number that it makes.

    The same at every micro-batch size, since layers hang on it: what is done once for all samples counts nothing, nor
    does what is another at every batch.
    """
    found: dict[fx.Node, float] = {}
    by_sample = {node for node, (role, _) in lifted.roles.items() if role is Role.INPUT}
    by_values: set[fx.Node] = set(lifted.sized_by_values)
    for node in lifted.graph.nodes:
        read = node.all_input_nodes
        if any(used in by_values for used in read):
            by_values.add(node)
        if any(used in by_sample for used in read):
            by_sample.add(node)
        facts = seen.facts.get(node)
        counts = facts is not None and node in by_sample and node not in by_values
        tensor = facts.tensor if facts is not None and counts else None
        numel = 0 if tensor is None or tensor.numel() % samples else tensor.numel()
        flops = facts.flops if facts is not None and counts else 0
        found[node] = (flops - flops % samples + 10 * numel) / samples
    return found


def needed(analysis: Analysis, nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """What ``nodes`` read beside activations, in execution order.

    That is placeholders, and the constant and derived ops to rebuild, with those that change their storages in place.
    """
    flow, facts = analysis.flow, analysis.trace.facts
    found: set[fx.Node] = set()
    stack = list(nodes)
    while stack:
        wanted = list(stack.pop().all_input_nodes)
        while wanted:
            node = wanted.pop()
            is_made_elsewhere = flow.kinds[node] is Kind.ACTIVATION and node.op != "placeholder"
            if node in found or is_made_elsewhere:
                continue
            found.add(node)
            stack.append(node)
            for storage in facts[node].storages:
                wanted.extend(flow.writers.get(storage, ()))
    return sorted(found, key=flow.order.__getitem__)


# --- copies that the graph needs before it can be cut -----------------------------------------------------------------


def _copy_changed_inputs(lifted: Lifted, seen: Trace, flow: Dataflow) -> bool:
    """Where the model changes an input or a constant in place, it gets a copy: every stage starts from the same."""
    changed = [
        node
        for node, (role, _) in lifted.roles.items()
        if role in (Role.INPUT, Role.CONSTANT) and seen.facts[node].storages & flow.writers.keys()
    ]
    last = next(node for node in reversed(lifted.graph.nodes) if node.op == "placeholder")
    for node in changed:
        _insert_copy(lifted, node, after=last, readers=list(node.users))
    return bool(changed)


def _copy_saved_buffers(lifted: Lifted, seen: Trace, flow: Dataflow) -> bool:
    """What an op keeps of a buffer for its backward is a copy, where a later micro-batch's forward changes the buffer.

    Kernels that keep and change one (batch norm's) do as they do: in training they do not look at what they kept.
    """
    changed = {
        storage
        for node, (role, name) in lifted.roles.items()
        if role is Role.BUFFER and name in flow.changed_buffers
        for storage in seen.facts[node].storages
    }
    found = [
        (node, used)
        for node in flow.live
        if node.op == "call_function" and opaque_call(node) is None and (kept := seen.facts[node].saved & changed)
        for used in node.all_input_nodes
        if seen.facts[used].storages & kept and not any(node in flow.writers.get(storage, ()) for storage in kept)
    ]
    for node, used in found:
        _insert_copy(lifted, used, after=node.prev, readers=[node])
    return bool(found)


def _copy_gapped(
    lifted: Lifted, crossing: dict[fx.Node, dict[int, bool]], layer_of: dict[fx.Node, int], seen: Trace, flow: Dataflow
) -> bool:
    """A tensor between layers fills its memory without gaps, so that what is sent is what one process reads."""
    gapped = [
        node for node in crossing if not seen.facts[node].dense and not seen.facts[node].storages & flow.writers.keys()
    ]
    for node in gapped:
        elsewhere = [user for user in node.users if layer_of.get(user, layer_of[node]) != layer_of[node]]
        _insert_copy(lifted, node, after=node, readers=elsewhere)
    return bool(gapped)


def _insert_copy(lifted: Lifted, node: fx.Node, *, after: fx.Node, readers: list[fx.Node]) -> None:
    with lifted.graph.inserting_after(after):
        copy = lifted.graph.call_function(torch.ops.aten.clone.default, (node,))
    lifted.scopes[copy] = lifted.scopes.get(node, ())
    lifted.copies.add(copy)
    for reader in readers:
        reader.replace_input_with(node, copy)


# --- what crosses between layers --------------------------------------------------------------------------------------


def _crossing(
    parts: list[Segment], layer_of: dict[fx.Node, int], seen: Trace, flow: Dataflow
) -> dict[fx.Node, dict[int, bool]]:
    """Each tensor read outside its layer, with the layers that read it, and whether a gradient comes back from each."""
    crossing: dict[fx.Node, dict[int, bool]] = defaultdict(dict)
    for index, part in enumerate(parts):
        for node in part.nodes:
            for used in node.all_input_nodes:
                if layer_of.get(used, index) != index:
                    flows = node in flow.flows and seen.facts[used].requires_grad
                    crossing[used][index] = flows or crossing[used].get(index, False)
    return dict(sorted(crossing.items(), key=lambda item: flow.order[item[0]]))


def _inseparable(parts: list[Segment], lifted: Lifted, seen: Trace, flow: Dataflow) -> list[tuple[int, int]]:
    """Spans of layers that no cut may part.

    Layers that touch a buffer which one of them changes; a value that is no tensor, or a tensor whose shape hangs on
    values, and its readers; and where a storage is changed through one alias, the definition of an older alias and its
    later readers.
    """
    layer_of = {node: index for index, part in enumerate(parts) for node in part.nodes}
    spans: list[tuple[int, int]] = []
    users: dict[int, list[tuple[fx.Node, fx.Node]]] = defaultdict(list)  # storage -> (reader, alias that it reads)
    for node in layer_of:
        for used in node.all_input_nodes:
            if used in layer_of and (seen.facts[used].tensor is None or used in lifted.sized_by_values):
                spans.append((layer_of[used], layer_of[node]))
            for storage in seen.facts[used].storages & flow.writers.keys():
                users[storage].append((node, used))
    of_buffers = {
        storage
        for node, (role, _) in lifted.roles.items()
        if role is Role.BUFFER
        for storage in seen.facts[node].storages
    }
    for storage, readers in users.items():
        touching = [layer_of[reader] for reader, _ in readers]
        if storage in of_buffers:
            spans.append((min(touching), max(touching)))
            continue
        for writer in flow.writers[storage]:
            if writer not in layer_of:
                continue  # it changes a constant, which each stage rebuilds with the change
            for reader, alias in readers:
                late = flow.order[alias] < flow.order[writer] < flow.order[reader]
                if late and not _rebuilt_together(writer, reader, readers, layer_of):
                    spans.append((min(layer_of[alias] for _, alias in readers if alias in layer_of), layer_of[reader]))
    return spans


def _rebuilt_together(
    writer: fx.Node, reader: fx.Node, readers: list[tuple[fx.Node, fx.Node]], layer_of: dict[fx.Node, int]
) -> bool:
    """Whether writer and reader share a layer that receives one alias alone: its copy then sees the change too."""
    layer = layer_of[writer]
    if layer_of[reader] != layer:
        return False
    foreign = {alias for user, alias in readers if layer_of[user] == layer and layer_of.get(alias) != layer}
    return len(foreign) <= 1


def _order_only(
    parts: list[Segment],
    layer_of: dict[fx.Node, int],
    crossing: dict[fx.Node, dict[int, bool]],
    lifted: Lifted,
    seen: Trace,
    flow: Dataflow,
) -> frozenset[tuple[int, int]]:
    """Pairs of layers of which the first must not come later than the second, beyond what their tensors say.

    One reads a storage that the other changes in place; or both add to one gradient that has more than two parts: these
    are added in the order of layers, so that order must hold across stages (two parts can be added in any).
    """
    pairs = set()
    for node, layer in layer_of.items():
        for used in node.all_input_nodes:
            for storage in seen.facts[used].storages & flow.writers.keys():
                for writer in flow.writers[storage]:
                    if flow.order[node] < flow.order[writer] and layer_of.get(writer, layer) != layer:
                        pairs.add((layer, layer_of[writer]))
    for node, users in _adding_to_one_gradient(crossing, layer_of, lifted, seen, flow).items():
        adding = sorted({layer_of[user] for user in users} - {layer_of.get(node)})
        if sum(_uses(user, node) for user in users) > 2:
            pairs |= set(pairwise(adding))
    follows = _reachable(crossing, layer_of, len(parts))
    return frozenset((first, second) for first, second in pairs if not follows[first] >> second & 1)


def _adding_to_one_gradient(
    crossing: dict[fx.Node, dict[int, bool]],
    layer_of: dict[fx.Node, int],
    lifted: Lifted,
    seen: Trace,
    flow: Dataflow,
) -> dict[fx.Node, list[fx.Node]]:
    """Tensors between layers and trained parameters, with the ops that a gradient comes back from."""
    parameters = [node for node, (role, _) in lifted.roles.items() if role is Role.PARAMETER]
    return {
        node: [user for user in node.users if user in layer_of and user in flow.flows]
        for node in (*crossing, *parameters)
        if seen.facts[node].requires_grad
    }


def _uses(user: fx.Node, node: fx.Node) -> int:
    """How often an op reads a value."""
    found: list[fx.Node] = []
    fx.node.map_arg((user.args, user.kwargs), found.append)
    return found.count(node)


def _reachable(crossing: dict[fx.Node, dict[int, bool]], layer_of: dict[fx.Node, int], count: int) -> list[int]:
    """For each layer the layers that read its tensors, directly or through others, as bits."""
    readers: list[set[int]] = [set() for _ in range(count)]
    for node, layers in crossing.items():
        readers[layer_of[node]] |= layers.keys()
    reachable = [0] * count
    for layer in reversed(range(count)):
        for reader in readers[layer]:
            reachable[layer] |= 1 << reader | reachable[reader]
    return reachable


def _names(
    parts: list[Segment], crossing: dict[fx.Node, dict[int, bool]], layer_of: dict[fx.Node, int], flow: Dataflow
) -> dict[fx.Node, str]:
    """A layer's tensors that others read: ``blocks.0``, ``blocks.0:1``, ..."""
    names: dict[fx.Node, str] = {}
    made: dict[int, int] = defaultdict(int)
    for node in crossing:
        layer = layer_of[node]
        names[node] = parts[layer].name + (f":{made[layer]}" if made[layer] else "")
        made[layer] += 1
    return names
