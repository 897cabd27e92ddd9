"""The cut that PipeDream would choose, stages straight or all replicated alike: its objective alone, its bandwidth."""

from __future__ import annotations

import numpy as np

from planner.graph import LayerGraph
from planner.search.lattice import along, lattice_of

BANDWIDTH = 1e9


def pipedream_cut(graph: LayerGraph, *, num_stages: int, data: int, microbatch_size: int) -> list[list[str]]:
    """The cut whose slowest part is fastest: a stage's work and its sum of gradients over D replicas, or a message.

    (F + I + W + 4 (D-1) parameters / (bandwidth · D)) / D for a stage, 2 activations / (bandwidth · D) between two.
    """
    lattice = lattice_of(graph) or along(range(len(graph)))
    members = lattice.members
    costs = graph.costs(microbatch_size=microbatch_size)
    load = np.array([cost.forward_s + cost.backward_input_s + cost.backward_weight_s for cost in costs])
    summed = np.array([4 * (data - 1) * cost.parameter_bytes / (BANDWIDTH * data) for cost in costs])
    work = members @ (load + summed) / data
    moved = np.zeros(len(lattice))
    for tensor in graph.tensors:
        readers = [reader.layer for reader in tensor.readers]
        crosses = members[:, tensor.source] & ~members[:, readers].all(axis=1)
        moved += crosses * 2 * tensor.bytes(microbatch_size) / (BANDWIDTH * data)
    slowest = np.maximum(work[lattice.end] - work[lattice.start], moved[lattice.end])
    reach = np.full((num_stages + 1, len(lattice)), np.inf)
    reach[0, 0] = 0.0
    for stage in range(num_stages):
        np.minimum.at(reach[stage + 1], lattice.end, np.maximum(reach[stage][lattice.start], slowest))
    ideal, cut = len(lattice) - 1, []
    for stage in range(num_stages, 0, -1):
        into = np.flatnonzero(lattice.end == ideal)
        step = into[np.argmin(np.maximum(reach[stage - 1][lattice.start[into]], slowest[into]))]
        start = int(lattice.start[step])
        cut.append([graph.names[layer] for layer in lattice.layers(start, ideal)])
        ideal = start
    return cut[::-1]
