"""The layers one after another: what each costs, and what a cut behind it would send.

    layer      a ──x──▶ b ──y──▶ c ──z──▶ d
                        └────────s────────▲
    cut behind    x       y + s     z + s     0          each tensor once, however many layers read it

The order is the profile's, or a plan's: by stage, and within it the profile's. Both keep every tensor's source before
its readers, also where stages lie across each other in the profile's order (a model with branches).
"""

from __future__ import annotations

from collections.abc import Sequence

from planner.cluster import Cluster
from planner.graph import LayerGraph
from planner.record import record


@record
class LayerRow:
    """One layer at one micro-batch size.

    ``spread``: the interquartile range of its time over the median, where it was measured. ``readers``: the layers that
    read from it, and the bytes each reads. ``output_bytes``: all tensors that are read, each once. ``cut_bytes``: every
    tensor made so far that a later layer reads. ``tensor``: sizes that it can be split to. ``whole_backward``: all of
    its backward is in I, as of a layer that is kept whole, though it has weights to train.
    """

    name: str
    kind: str
    forward_s: float
    backward_input_s: float
    backward_weight_s: float
    parameter_bytes: int
    trainable_bytes: int
    buffer_bytes: int
    saved_bytes: int
    saved_for_weight_bytes: int
    workspace_bytes: int
    shared: tuple[str, ...]
    spread: float | None
    readers: tuple[tuple[str, int], ...]
    output_bytes: int
    cut_bytes: int
    tensor: tuple[int, ...]
    whole_backward: bool

    @property
    def load_s(self) -> float:
        """F + I + W."""
        return self.forward_s + self.backward_input_s + self.backward_weight_s


def layer_rows(
    graph: LayerGraph,
    *,
    microbatch_size: int,
    tensor: int = 1,
    cluster: Cluster | None = None,
    order: Sequence[str] | None = None,
) -> tuple[LayerRow, ...]:
    """Every layer, in the profile's order or another one. Raises InputError where a layer has no such row."""
    costs = graph.costs(microbatch_size=microbatch_size, tensor=tensor, cluster=cluster)
    indices = [graph.index[name] for name in order] if order is not None else range(len(graph))
    place = {index: position for position, index in enumerate(indices)}
    outputs, change = [0] * len(graph), [0] * (len(graph) + 1)
    read: list[dict[str, int]] = [{} for _ in graph.names]
    for made in graph.tensors:
        size = made.bytes(microbatch_size)
        outputs[made.source] += size
        change[place[made.source]] += size
        change[max(place[reader.layer] for reader in made.readers)] -= size
        for reader in made.readers:
            name = graph.names[reader.layer]
            read[made.source][name] = read[made.source].get(name, 0) + size
    rows, cut = [], 0
    for position, index in enumerate(indices):
        cut += change[position]
        layer, cost = graph.layers[index], costs[index]
        measured = next(row for row in layer.costs if (row.microbatch_size, row.tensor) == (microbatch_size, tensor))
        rows.append(
            LayerRow(
                name=layer.name,
                kind=layer.kind,
                forward_s=cost.forward_s,
                backward_input_s=cost.backward_input_s,
                backward_weight_s=cost.backward_weight_s,
                parameter_bytes=cost.parameter_bytes,
                trainable_bytes=cost.trainable_bytes,
                buffer_bytes=cost.buffer_bytes,
                saved_bytes=cost.saved_bytes,
                saved_for_weight_bytes=cost.saved_for_weight_bytes,
                workspace_bytes=cost.workspace_bytes,
                shared=tuple(layer.shared or ()),
                spread=measured.spread,
                readers=tuple(sorted(read[index].items(), key=lambda reader: place[graph.index[reader[0]]])),
                output_bytes=outputs[index],
                cut_bytes=cut,
                tensor=tuple(sorted({row.tensor for row in layer.costs if row.microbatch_size == microbatch_size})),
                whole_backward=bool(cost.trainable_bytes and cost.backward_input_s and not cost.backward_weight_s),
            )
        )
    return tuple(rows)


def distinct_parameters(graph: LayerGraph) -> int:
    """Bytes of all parameters, tied ones once."""
    tied = [(name, entry.bytes) for layer in graph.layers for name, entry in (layer.shared or {}).items()]
    return (
        sum(layer.parameter_bytes for layer in graph.layers) - sum(size for _, size in tied) + sum(dict(tied).values())
    )


def shape_of(graph: LayerGraph) -> str:
    """How the layers hang together, in words."""
    if not graph.is_chain:
        return "with branches"
    skips = sum(target > source + 1 for source, target in graph.edges)
    return f"a chain with {skips} skips" if skips > 1 else "a chain with a skip" if skips else "a chain"
