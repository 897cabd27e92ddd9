"""The bound of every single cut of a short chain with several stages a rank, all at once as arrays over the cuts.

Per rank with stages k0 < k1 < ..., for every order of actions:

    loads       T >= F's and links before ka + M · (load of the rank - F of its first a) + step, where a > 0 only if all
                gradients come back
    links       per ordered pair of ranks:  T >= first message's start + M · (seconds of all messages, both ways)
    reduces     T >= least over trained k of M · (F of own stages up to k, I from k on, W of k)
                     + all of the rank's all-reduces + step
    memory      parameters, gradients, optimizer state and buffers fit, or there is no such cut

A linear program over stages knows neither what crosses a boundary nor what a stage reduces: these rows do.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from typing import Final

import numpy as np

from planner.cluster import Link, link_between, memory_limit, ring_link
from planner.schedules import ranks_of
from planner.search.figures import LayerFigures, tied
from planner.search.lattice import Floats, Ints
from planner.search.space import Configuration

MOST_LISTED: Final = 60_000
"""Cuts of a configuration that are listed; where there are more, there is no list."""


class Listed:
    """All cuts of one configuration of a chain: ``marks[i]`` its boundaries, ``bounds_s[i]`` no order is faster."""

    def __init__(self, layers: LayerFigures, configuration: Configuration) -> None:
        self.layers: Final = layers
        self.shape: Final = configuration
        stages, count = configuration.pipeline * configuration.virtual, len(layers.graph)
        inner = list(itertools.combinations(range(1, count), stages - 1))
        self.marks: Final[Ints] = np.empty((len(inner), stages + 1), dtype=np.int64)
        self.marks[:, 0], self.marks[:, -1] = 0, count
        self.marks[:, 1:-1] = np.array(inner, dtype=np.int64).reshape(len(inner), stages - 1)
        self.rank_of: Final = ranks_of(configuration.pipeline, configuration.virtual, configuration.placement)
        self.forward: Final = self._between(layers.forward_s)
        self.inputs: Final = self._between(layers.input_s)
        self.load: Final = self._between(layers.load_s)
        self.trainable: Final = self._trainable()
        self._links()
        self.bounds_s: Final[Floats] = self._rows()

    def below(self, seconds: float) -> list[tuple[int, ...]]:
        """The boundaries of the cuts that may be faster than a time, least bound first."""
        near = np.flatnonzero(self.bounds_s < seconds)
        return [tuple(self.marks[i].tolist()) for i in near[np.argsort(self.bounds_s[near], kind="stable")]]

    def _between(self, per_layer: Floats) -> Floats:
        """Sums over the layers of each stage, a row for each cut."""
        sums = np.concatenate([[0.0], np.cumsum(per_layer)])
        made: Floats = np.diff(sums[self.marks], axis=1)
        return np.maximum(made, 0.0)

    def _trainable(self) -> Floats:
        """Trainable bytes of each stage; tied parameters are left out."""
        users = {layer for held, _, _ in tied(self.layers.graph) for layer in held}
        sizes = [0.0 if i in users else float(cost.trainable_bytes) for i, cost in enumerate(self.layers.costs)]
        return self._between(np.array(sizes))

    def _links(self) -> None:
        """When each stage may have its first input; how long each link is busy with the messages of a micro-batch."""
        cluster, layers = self.layers.cluster, self.layers
        assert cluster is not None
        cuts = len(self.marks)
        hops: Floats = np.zeros((cuts, len(self.rank_of)))
        self.busy_s: dict[tuple[int, int], Floats] = defaultdict(lambda: np.zeros(cuts))
        for k, (one, other) in enumerate(itertools.pairwise(self.rank_of)):
            link = self._link(one, other)
            if one == other or link is None or not cluster.overlap:
                continue
            place = self.marks[:, k + 1]
            ahead = layers.ahead_bytes[place] / link.bandwidth_bytes_per_s
            self.busy_s[one, other] = self.busy_s[one, other] + ahead
            self.busy_s[other, one] = self.busy_s[other, one] + layers.back_bytes[place] / link.bandwidth_bytes_per_s
            hops[:, k + 1] = ahead + np.where(ahead > 0, link.latency_s, 0.0)
        before = np.cumsum(self.forward, axis=1) - self.forward
        self.heads: Floats = before + np.cumsum(hops, axis=1)

    def _link(self, one: int, other: int) -> Link | None:
        cluster = self.layers.cluster
        assert cluster is not None
        return link_between(one, other, data=self.shape.data, tensor=self.layers.tensor, cluster=cluster)

    def _rows(self) -> Floats:
        count = self.shape.num_microbatches
        step_s = self.layers.graph.profile.optimizer.step_s_per_trainable_byte
        bounds: Floats = np.zeros(len(self.marks))
        for rank in range(self.shape.pipeline):
            own = [k for k, home in enumerate(self.rank_of) if home == rank]
            step = self.trainable[:, own].sum(axis=1) * step_s
            works = count * self.load[:, own].sum(axis=1)
            for k in own if self.layers.comes_back[1:-1].all() else own[:1]:  # else backwards may come before ka
                bounds = np.maximum(bounds, self.heads[:, k] + works + step)
                works = works - count * self.forward[:, k]
            bounds = np.maximum(bounds, self._reduced(rank, own) + step)
        for (one, _), busy in self.busy_s.items():
            first = [self.heads[:, k] + self.forward[:, k] for k, home in enumerate(self.rank_of) if home == one]
            bounds = np.maximum(bounds, np.where(busy > 0, np.min(first, axis=0) + count * busy, 0.0))
        bounds[~self._fits()] = math.inf
        return bounds

    def _reduced(self, rank: int, own: list[int]) -> Floats:
        """When a rank's all-reduces may have ended."""
        shape, cluster, profile = self.shape, self.layers.cluster, self.layers.graph.profile
        assert cluster is not None
        ring = ring_link(rank, data=shape.data, tensor=self.layers.tensor, cluster=cluster)
        returned = self.layers.comes_back[2:-1].all() and (
            self.layers.comes_back[1] or not self.layers.costs[0].trainable_bytes
        )
        if shape.data == 1 or ring is None or not returned:
            return np.zeros(len(self.marks))
        per_byte = 2 * (shape.data - 1) / shape.data * profile.gradient_bytes_per_trainable_byte
        reduces = self.trainable[:, own].sum(axis=1) * per_byte / ring.bandwidth_bytes_per_s
        first: Floats = np.full(len(self.marks), math.inf)
        for place, k in enumerate(own):
            leading = self.forward[:, own[: place + 1]].sum(axis=1) + self.inputs[:, own[place:]].sum(axis=1)
            leading = leading + self.load[:, k] - self.forward[:, k] - self.inputs[:, k]
            first = np.minimum(first, np.where(self.trainable[:, k] > 0, shape.num_microbatches * leading, math.inf))
        made: Floats = np.where(np.isfinite(first), first + reduces, 0.0)
        return made

    def _fits(self) -> np.typing.NDArray[np.bool_]:
        cluster, costs = self.layers.cluster, self.layers.costs
        limit = memory_limit(cluster) if cluster is not None else None
        fits = np.ones(len(self.marks), dtype=np.bool_)
        if limit is None or tied(self.layers.graph):
            return fits
        factor = self.layers.fixed_factor()
        sizes = [cost.parameter_bytes + factor * cost.trainable_bytes + cost.buffer_bytes for cost in costs]
        fixed = self._between(np.array(sizes))
        for rank in range(self.shape.pipeline):
            own = [k for k, home in enumerate(self.rank_of) if home == rank]
            fits &= fixed[:, own].sum(axis=1) <= limit + 1
        return fits


def listed(layers: LayerFigures, configuration: Configuration) -> Listed | None:
    """All cuts of a configuration of a chain, each bounded; None where they are too many, or it is no chain."""
    stages = configuration.pipeline * configuration.virtual
    if not layers.graph.is_chain or math.comb(len(layers.graph) - 1, stages - 1) > MOST_LISTED:
        return None
    return Listed(layers, configuration)
