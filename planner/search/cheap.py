"""Bounds of configurations from totals alone, cheap enough to sort tens of thousands by.

way        a micro-batch goes forward along the heaviest path of layers, and its gradients all the way back
loads      a rank's M · load, then its optimizer step; over all ranks, the mean of that
spread     one stage a rank on a chain, links free: with loads l_0..l_{P-1} and R_r = max(M · l_r, l_r + R_{r+1}) the
           least R_0 over all ways to part the whole load has every l_r = R_{r+1} / (M - 1), so that
           T >= α · tot / (1 - (1 - α/M)^P),  α = 1 fused; split: the least F / (F + I + W) of a layer
reduces    a rank's all-reduces follow one another, none before all that leads to some trained layer's W: on a chain,
           for every micro-batch where there is one rank, F's through that layer, I's from it on, its W
memory     a layer's activations of a micro-batch are held from its stage's F until that stage's I has ended, while all
           layers after it run their F and I: what all ranks hold over time, sum of saved · (F + I from here on) · M, is
           at most T · (P · limit - what is always there). Layers that recompute hold nothing here, but add their F to
           the load: the early ones of long F-to-I are dear to hold, and recompute first (a fractional knapsack).
start      before a rank's first I, which all F's precede, it runs F's alone, and holds what they save: on a chain
           T >= all F's + M · load - the F's that its memory holds at once (a fractional knapsack), then its optimizer
           step; over all ranks, the mean of that. A stage that recomputes runs M more F's than are counted: they pay
           for those that its memory does not limit.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from planner.cluster import Cluster, ClusterLinks, memory_limit, ring_link
from planner.search.figures import LayerFigures, tied
from planner.search.lattice import Floats
from planner.search.space import Configuration


class Totals:
    """What the bounds need of the layers at one micro-batch size and tensor size (seconds, bytes)."""

    def __init__(self, layers: LayerFigures, cluster: Cluster, recompute: str) -> None:
        load, graph = layers.load_s, layers.graph
        self.layers: Final = layers
        self.cluster: Final = cluster
        self.limit: Final = memory_limit(cluster)
        self.again: Final = recompute
        self.returns: Final = bool(layers.comes_back[1:-1].all())
        self.chain: Final = graph.is_chain
        self.plain_s: Final = float(load.sum())
        self.load_s: Final = self.plain_s + (float(layers.forward_s.sum()) if recompute == "all" else 0.0)
        self.most_s: Final = float(load.max())
        self.spine_s: Final = float(load[list(layers.spine)].sum())
        self.way_s: Final = float((load - layers.weight_s)[list(layers.spine)].sum())
        self.share: Final = float(np.min(layers.forward_s[load > 0] / load[load > 0], initial=1.0))
        factor = layers.fixed_factor()
        users = tied(graph)
        shared = sum(len(held) * size * (1 + (factor if trainable else 0)) for held, size, trainable in users)
        held = sum(cost.parameter_bytes + factor * cost.trainable_bytes + cost.buffer_bytes for cost in layers.costs)
        self.fixed_bytes: Final = held - shared
        self.trainable_bytes: Final = sum(cost.trainable_bytes for cost in layers.costs) - sum(
            len(held) * size for held, size, trainable in users if trainable
        )
        profile = graph.profile
        self.step_s: Final = max(self.trainable_bytes, 0) * profile.optimizer.step_s_per_trainable_byte
        self.gradient_bytes: Final = max(self.trainable_bytes, 0) * profile.gradient_bytes_per_trainable_byte
        trained = np.array([cost.trainable_bytes > 0 for cost in layers.costs])
        leading = np.cumsum(layers.forward_s) + self._returned_s() + layers.weight_s
        self.leading_s: Final = float(leading[trained].min()) if self.chain and trained.any() else 0.0
        self._paces: dict[int, float] = {}
        self._reduces: dict[int, float] = {}
        self._least_workspace: Final = min(cost.workspace_bytes for cost in layers.costs)
        self._pareto()
        self._forwards()

    def _returned_s(self) -> Floats:
        """Seconds of I from each layer of a chain on, as far as gradients come back from there (else its own)."""
        layers = self.layers
        if not self.chain:
            return layers.input_s
        whole = np.flip(np.logical_and.accumulate(np.flip(np.append(layers.comes_back[1:-1], True))))
        return np.where(whole, np.cumsum(layers.input_s[::-1])[::-1], layers.input_s)

    def _pareto(self) -> None:
        """Seconds that layers which recompute add to a micro-batch, and byte-seconds that the others then hold."""
        layers = self.layers
        passes = layers.forward_s + layers.input_s
        behind = np.cumsum(passes[::-1])[::-1]
        saved = np.array([float(cost.saved_bytes) for cost in layers.costs])
        running = np.array([float(cost.workspace_bytes) for cost in layers.costs])
        area = saved * behind if self.chain and self.returns else saved * passes
        always = float((running * layers.load_s).sum())
        if self.again == "all":
            self.added_s, self.held_byte_s = np.array([0.0]), np.array([always])
            return
        if self.again == "none":
            self.added_s, self.held_byte_s = np.array([0.0]), np.array([always + float(area.sum())])
            return
        with np.errstate(divide="ignore", invalid="ignore"):
            worth = np.where(area > 0, area / layers.forward_s, -1.0)
        order = np.argsort(-worth, kind="stable")
        self.added_s = np.concatenate([[0.0], np.cumsum(layers.forward_s[order])])
        self.held_byte_s = always + np.maximum(float(area.sum()) - np.concatenate([[0.0], np.cumsum(area[order])]), 0.0)

    def _forwards(self) -> None:
        """Seconds of F of the layers, those with the most of it for a byte that they save first."""
        layers = self.layers
        saved = np.array([float(cost.saved_bytes) for cost in layers.costs])
        with np.errstate(divide="ignore", invalid="ignore"):
            worth = np.where(saved > 0, layers.forward_s / saved, np.inf)
        order = np.argsort(-worth, kind="stable")
        self._forward_to_s = np.concatenate([[0.0], np.cumsum(layers.forward_s[order])])
        self._saved_to_bytes = np.concatenate([[0.0], np.cumsum(saved[order])])

    def held_forward_s(self, ranks: int, count: int) -> float:
        """The most seconds of F that P ranks can have run, of M micro-batches, while they hold all that it saves."""
        if self.limit is None:
            return count * float(self._forward_to_s[-1])
        room = ranks * (self.limit - self._least_workspace) - self.fixed_bytes
        if room <= 0:
            return float(count * self._forward_to_s[np.searchsorted(self._saved_to_bytes, 0.0, side="right") - 1])
        return count * float(np.interp(room / count, self._saved_to_bytes, self._forward_to_s))

    def start_s(self, ranks: int, count: int) -> float:
        """A lower bound on T: what cannot be begun while the first micro-batch goes forward comes after that."""
        if self.limit is None or not (self.chain and self.returns):
            return 0.0
        after_s = (count * self.plain_s - self.held_forward_s(ranks, count) + self.step_s) / ranks
        return float(self.layers.forward_s.sum()) + after_s

    def pace_s(self, ranks: int) -> float:
        """A lower bound on T / M over P ranks: every rank's share of the load, as much recomputed as memory demands."""
        if ranks not in self._paces:
            self._paces[ranks] = self._pace_s(ranks)
        return self._paces[ranks]

    def _pace_s(self, ranks: int) -> float:
        even = self.load_s / ranks
        if self.limit is None:
            return even
        room = ranks * self.limit - self.fixed_bytes
        if room < 0:
            return math.inf
        if room == 0:
            return even if self.held_byte_s[-1] <= 0 else math.inf
        by_load, by_area = (self.load_s + self.added_s) / ranks, self.held_byte_s / room
        enough = by_area <= by_load
        place = int(np.argmax(enough)) if bool(enough.any()) else len(by_load) - 1
        if place == 0 or not enough[place]:
            return float(max(by_load[place], by_area[place]))
        before = by_area[place - 1] - by_load[place - 1]  # the two lines cross in between
        part = before / (before + by_load[place] - by_area[place])
        return float(by_load[place - 1] + part * (by_load[place] - by_load[place - 1]))

    def all_reduce_s(self, data: int) -> float:
        """Seconds to sum all gradients over D replicas, over the fastest ring that a rank may have."""
        if data not in self._reduces:
            self._reduces[data] = self._all_reduce_s(data)
        return self._reduces[data]

    def _all_reduce_s(self, data: int) -> float:
        links = self.cluster.links or ClusterLinks()
        tensor, per_node = self.layers.tensor, self.cluster.gpus_per_node
        used = [links.intra_node] if per_node is None else [links.intra_node, links.inter_node]
        if per_node is not None and data * tensor > per_node:  # every ring is alike: over nodes
            used = [ring_link(0, data=data, tensor=tensor, cluster=self.cluster)]
        rates = [math.inf if link is None else link.bandwidth_bytes_per_s for link in used]
        return 2 * (data - 1) / data * self.gradient_bytes / max(rates)


def cheap_bound(totals: Totals, configuration: Configuration, *, fused: bool) -> float:
    """A lower bound in seconds; infinite where the parameters cannot fit at all."""
    ranks, count = configuration.pipeline, configuration.num_microbatches
    pace_s = totals.pace_s(ranks)
    if math.isinf(pace_s):
        return math.inf
    after_s = totals.step_s / ranks
    bound = max(count * pace_s + after_s, count * totals.most_s)
    if configuration.data > 1:
        reduce_s = totals.all_reduce_s(configuration.data) / ranks
        bound = max(bound, count * pace_s + after_s + reduce_s) if configuration.virtual == 1 else bound
        leading_s = totals.leading_s * (count if ranks == 1 else 1)
        bound = max(bound, leading_s + reduce_s + after_s)
    if configuration.virtual == 1 and totals.chain and totals.returns:
        share = 1.0 if fused else totals.share
        part = share / count
        spread = 1 - (1 - part) ** ranks if part < 1 else 1.0
        bound = max(bound, share * totals.plain_s / spread if spread > 0 else 0.0)
    bound = max(bound, totals.start_s(ranks, count))
    way_s = totals.spine_s if fused else totals.way_s
    return max(bound, way_s if totals.returns else 0.0)
