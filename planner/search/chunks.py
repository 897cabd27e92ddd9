"""The bound of a chain with several stages a rank, over every cut: a linear program over stages instead of layers.

    x_k, f_k     load and forward of stage k:  sum of x = all, sum of f = all forwards,  α x <= f <= β x,  x >= a layer
    h            layers' forwards that run again, spread over the ranks as suits best
    rows         T >= f before stage ka, links at their cheapest + M · (load of the rank - f of its first a) + step
                 fused, for the lowest b stages of the rank too:  - M · (their backward) + backward before them
    start        T >= all F's, the I's after stage kb + M · (load of the rank's stages up to kb) - d_r + step, where d_r
                 are seconds of F that the rank's memory holds, before its first I: their sum over all ranks is known
    memory       what is held over time fits:  T · room >= M · held(h), a convex curve, by its tangents

α and β are the least and the largest F / (F + I + W) of a layer. Layers may part anywhere here, so no cut is below it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from planner.cluster import ClusterLinks, Link
from planner.schedules import ranks_of
from planner.search.cheap import Totals
from planner.search.ilp import CutModel, Linear
from planner.search.lattice import Floats
from planner.search.space import Configuration

_TANGENTS: Final = 12


def stages_bound(totals: Totals, configuration: Configuration, *, fused: bool) -> float:
    """A lower bound in seconds over every cut into P·v stages; the graph must be a chain whose gradients all return."""
    layers, count = totals.layers, configuration.num_microbatches
    ranks, stages = configuration.pipeline, configuration.pipeline * configuration.virtual
    scale = count * totals.load_s / ranks
    pace_s = totals.pace_s(ranks)
    if not math.isfinite(pace_s) or scale <= 0:
        return math.inf if math.isinf(pace_s) else 0.0
    rank_of = ranks_of(ranks, configuration.virtual, configuration.placement)
    busy = layers.load_s > 0
    shares = layers.forward_s[busy] / layers.load_s[busy]
    low, high, least = float(shares.min()), float(shares.max()), float(layers.load_s.min()) / scale
    model = CutModel(0, (), stages, empty_stages=True, relaxed=True)
    load_to, forward_to = [Linear()], [Linear()]
    reaches = [_reaches(per_layer / scale, stages) for per_layer in (layers.load_s, layers.forward_s)]
    for k in range(stages):
        for prefix, reach in zip((load_to, forward_to), reaches, strict=True):
            fewest, most = reach[k]
            prefix.append(Linear(constant=most) if k == stages - 1 else model.variable(least=fewest, most=most))
        load, forward = load_to[k + 1] - load_to[k], forward_to[k + 1] - forward_to[k]
        model.at_most(load * low, forward)
        model.at_most(forward, load * high)
        model.at_most(Linear(constant=least), load)
    again = [model.variable() for _ in range(ranks)]
    _memory(model, totals, again, count, ranks, scale)
    hop_s = _hop_s(totals, configuration) / scale
    hops = np.concatenate([[0], np.cumsum(np.diff(rank_of) != 0)])
    for rank in range(ranks):
        mine = [k for k, home in enumerate(rank_of) if home == rank]
        row = again[rank] * count
        for k in mine:
            row.add(load_to[k + 1] - load_to[k], count)
        for first in mine:
            reached = row + forward_to[first] + Linear(constant=hop_s * float(hops[first]))
            model.row(reached)
            if fused:
                for lowest in mine:
                    back = load_to[lowest] - forward_to[lowest]
                    model.row(reached + back + Linear(constant=hop_s * float(hops[lowest])))
                    reached.add(
                        load_to[lowest + 1] - load_to[lowest] - forward_to[lowest + 1] + forward_to[lowest], -count
                    )
            row.add(forward_to[first + 1] - forward_to[first], -count)
    _start(model, totals, configuration, rank_of, load_to, scale)
    solved = model.solve()
    return max(solved.bound * scale, count * pace_s)


def _reaches(per_layer: Floats, stages: int) -> list[tuple[float, float]]:
    """The least and the most that the stages up to each hold: none is empty, there is a layer for each one."""
    sums: list[float] = np.cumsum(per_layer).tolist()
    return list(zip(sums[:stages], sums[-stages:], strict=True))


def _start(
    model: CutModel,
    totals: Totals,
    configuration: Configuration,
    rank_of: Sequence[int],
    load_to: Sequence[Linear],
    scale: float,
) -> None:
    """Before the first I of a rank's lowest stages only their F's run, as many as its memory holds."""
    if totals.limit is None:
        return
    layers, count, ranks = totals.layers, configuration.num_microbatches, configuration.pipeline
    busy = layers.load_s > 0
    share = float((layers.input_s[busy] / layers.load_s[busy]).min())
    begun = [model.variable() for _ in range(ranks)]
    together = Linear()
    for part in begun:
        together.add(part)
    model.at_most(together, Linear(constant=totals.held_forward_s(ranks, count) / scale))
    for rank in range(ranks):
        works = Linear(constant=float(layers.forward_s.sum()) / scale) - begun[rank]
        for k in (k for k, home in enumerate(rank_of) if home == rank):
            works.add(load_to[k + 1] - load_to[k], count)
            model.row(works + (load_to[-1] - load_to[k + 1]) * share)


def _memory(model: CutModel, totals: Totals, again: list[Linear], count: int, ranks: int, scale: float) -> None:
    """Tangents of held(h), h the seconds of forwards that run again."""
    h = Linear()
    for part in again:
        h.add(part)
    if totals.again == "all":
        model.at_most(Linear(constant=float(totals.layers.forward_s.sum()) / scale), h)
    if totals.limit is None:
        return
    room = ranks * totals.limit - totals.fixed_bytes
    added, held = totals.added_s, totals.held_byte_s
    if room <= 0 or not len(added):
        return
    places = np.unique(np.linspace(0, len(added) - 1, _TANGENTS).astype(int))
    for place in places:
        following = min(place + 1, len(added) - 1)
        step = float(added[following] - added[place])
        if following > place and step <= 0:  # recomputing is free: held drops at once
            continue
        slope = float(held[following] - held[place]) / step if step > 0 else 0.0
        value = Linear(constant=count * float(held[place] - slope * added[place]) / room / scale)
        model.row(value + h * (count * slope / room))


def _hop_s(totals: Totals, configuration: Configuration) -> float:
    """The least that a message between two ranks takes."""
    layers = totals.layers
    links = totals.cluster.links or ClusterLinks()
    used: list[Link | None] = [links.intra_node]
    if totals.cluster.gpus_per_node is not None:
        used.append(links.inter_node)
    if configuration.pipeline == 1 or any(link is None for link in used) or not totals.cluster.overlap:
        return 0.0
    size = min((float(size) for size in layers.ahead_bytes[1:-1]), default=0.0)
    back = min((float(size) for size in layers.back_bytes[1:-1]), default=0.0)
    size = min(size, back)
    if size <= 0:
        return 0.0
    return min(link.latency_s + size / link.bandwidth_bytes_per_s for link in used if link is not None)
