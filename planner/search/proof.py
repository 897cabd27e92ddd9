"""The bound of a configuration as an ILP: the rows that any order of actions obeys, over every cut of any graph.

With PF and PB the prefix sums of F and B = I + W through a stage (links ahead and back included), for rank r with
stages k0 < k1 < ... and every a, b below v:

    fused   T >= PF[ka - 1] + M · (load of r - F of its first a - B of its lowest b) + PB[kb - 1]
    split   T >= PF[ka - 1] + M · (load of r - F of its first a),   with v = 1 also T >= PF[r-1] + M · (F + I) + PI[r-1]

On a DAG a stage surely follows the stages that hold layers of the spine only if it holds one itself: a binary h[k] says
so, and the prefix sums and rows of a stage without one fall back to what holds alone, T >= M · load.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from planner.cluster import Link, link_between, memory_limit, ring_link
from planner.graph import LayerGraph
from planner.schedules import Placement, ranks_of
from planner.search.figures import LayerFigures, tied
from planner.search.ilp import CutModel, Linear, Solved
from planner.search.suffix import Shape

Windows = Sequence[tuple[int, int]]


def prove(
    layers: LayerFigures,
    shape: Shape,
    *,
    virtual: int = 1,
    placement: Placement = Placement.LOOP,
    windows: Windows | None = None,
    below_s: float = math.inf,
    most_nodes: int | None = None,
    relaxed: bool = False,
    without: Sequence[Sequence[int]] = (),
) -> Solved:
    """The least time that the rows allow over every cut into P·v stages: the solver's bound, and its cut (seconds).

    ``below_s``: a time that is known to be reached; where no cut is under it, the bound is that time. ``windows``:
    first and last stage of each layer in any such cut. ``relaxed``: the LP. ``without``: cuts that are left out.
    """
    scale = below_s if math.isfinite(below_s) and below_s > 0 else shape.num_microbatches * float(layers.load_s.sum())
    rows = _Rows(layers, shape, virtual, placement, scale or 1.0, windows, relaxed)
    for stage_of in without:
        rows.model.exclude(stage_of)
    plain = layers.graph.is_chain or relaxed
    solved = rows.model.solve(below=below_s / rows.scale, most_nodes=most_nodes, gap=1e-7, presolve=plain)
    return Solved(
        bound=solved.bound * rows.scale,
        value=solved.value * rows.scale,
        stage_of=solved.stage_of,
        nodes=solved.nodes,
    )


class _Rows:
    """The model of one configuration; every time in it is divided by ``scale``, every size by the memory limit."""

    def __init__(
        self,
        layers: LayerFigures,
        shape: Shape,
        virtual: int,
        placement: Placement,
        scale: float,
        windows: Windows | None,
        relaxed: bool,
    ) -> None:
        self.layers: Final = layers
        self.graph: Final[LayerGraph] = layers.graph
        self.shape: Final = shape
        self.scale: Final = scale
        self.num_stages: Final = shape.num_ranks * virtual
        self.ranks: Final = ranks_of(shape.num_ranks, virtual, placement)
        again = layers.forward_s if shape.recompute == (True,) else 0.0 * layers.forward_s
        forward, backward = layers.forward_s, layers.input_s + layers.weight_s + again
        # one stage a rank, fused: rows hold F and B in equal parts, so that one sum does for both
        self.merged: Final = shape.fused and virtual == 1 and bool(layers.comes_back[1:-1].all())
        if self.merged:
            forward, backward = forward + backward, 0.0 * backward
        self.forward: Final = [float(value) / scale for value in forward]
        self.backward: Final = [float(value) / scale for value in backward]
        self.most: Final = sum(self.forward) + sum(self.backward)
        self.most_post = 0.0
        self.model: Final = CutModel(
            len(self.graph), self.graph.edges, self.num_stages, windows=windows, relaxed=relaxed
        )
        self.F: Final = self._loads(self.forward)
        self.B: Final = self._loads(self.backward)
        # what lies on the way back: B, or I where it is split
        self.handed: Final = self.B if shape.fused else self._loads([float(i) / scale for i in layers.input_s + again])
        self._messages()
        self._prefixes()
        posts = [self._post(rank, self._stages_of(rank)) for rank in range(shape.num_ranks)]
        self.post_first = posts[0] if all(layers.comes_back[1:-1]) else Linear()
        for rank, post in enumerate(posts):
            self._rank_rows(self._stages_of(rank), post)
        self._memory()

    def _loads(self, weights: Sequence[float]) -> list[Linear]:
        """The load of every stage, as the difference of two sums through a stage."""
        sums = [Linear(), *(self.model.stored(self.model.prefix(weights, k)) for k in range(self.num_stages))]
        return [upper - lower for lower, upper in pairwise(sums)]

    def _messages(self) -> None:
        """Seconds of the spine's messages ahead and back over each boundary k | k + 1, and where nothing comes back."""
        self.ahead, self.back, self.broken = [], [], []
        for k in range(self.num_stages - 1):
            ahead, back, broken = Linear(), Linear(), Linear()
            link = self._link(self.ranks[k], self.ranks[k + 1])
            for place, (source, target) in enumerate(pairwise(self.layers.spine), start=1):
                cut = self.model.up_to(source, k) - self.model.up_to(target, k)
                ahead.add(cut, _message_s(self.layers.ahead_bytes[place], link) / self.scale)
                back.add(cut, _message_s(self.layers.back_bytes[place], link) / self.scale)
                if not self.layers.comes_back[place]:
                    broken.add(cut)
            self.ahead.append(self.model.stored(ahead))
            self.back.append(self.model.stored(back))
            self.broken.append(broken)
        backwards = self.F if self.merged else self.B
        for k in range(self.num_stages - 1):
            if not self.shape.cluster.overlap:  # what a stage hands over lasts as long as its action does
                if self.graph.is_chain:  # elsewhere the spine may pass a stage by: left out, which bounds as well
                    self.F[k] = self.F[k] + self.ahead[k]
                    backwards[k + 1] = backwards[k + 1] + self.back[k]
                    if not self.shape.fused:
                        self.handed[k + 1] = self.handed[k + 1] + self.back[k]
                self.ahead[k] = self.back[k] = Linear()
            elif self.merged:
                self.ahead[k], self.back[k] = self.model.stored(self.ahead[k] + self.back[k]), Linear()

    def _link(self, one: int, other: int) -> Link | None:
        if one == other:
            return None
        if self.graph.is_chain:
            return link_between(one, other, data=self.shape.data, tensor=self.layers.tensor, cluster=self.shape.cluster)
        links = self.shape.cluster.links
        if self.num_stages > self.shape.num_ranks:
            return None  # the next stage on the spine may lie on the same rank
        if links is None or links.intra_node is None or links.inter_node is None:
            return None
        return Link(
            latency_s=min(links.intra_node.latency_s, links.inter_node.latency_s),
            bandwidth_bytes_per_s=max(links.intra_node.bandwidth_bytes_per_s, links.inter_node.bandwidth_bytes_per_s),
        )

    def _prefixes(self) -> None:
        """PF[k] and PB[k]: at least what precedes and follows a stage on the spine after stage k, once each."""
        model = self.model
        self.holds = [self._holds_spine(k) for k in range(self.num_stages)]
        self.PF, self.PB = [], []
        before_f = before_b = Linear()
        for k in range(self.num_stages - 1):
            ahead = before_f + self.F[k] + self.ahead[k]
            back = before_b + self.handed[k] + self.back[k]
            free = Linear(constant=self.most) - self.holds[k] * self.most
            if free.terms or self.broken[k].terms or self.broken[k].constant:
                reached, returned = model.variable(), model.variable()
                model.at_most(before_f, reached)
                model.at_most(ahead - free, reached)
                model.at_most(back - free - self.broken[k] * self.most, returned)
                model.at_most(before_b - self.broken[k] * self.most, returned)
                before_f, before_b = reached, returned
            else:
                before_f, before_b = model.stored(ahead), model.stored(back)
            self.PF.append(before_f)
            self.PB.append(before_b)

    def _holds_spine(self, stage: int) -> Linear:
        """1 where the stage holds a layer of the spine: always, where the spine is all there is."""
        if self.graph.is_chain:
            return Linear(constant=1.0)
        held = Linear()
        for layer in self.layers.spine:
            held.add(self.model.inside(layer, stage))
        flag = self.model.variable(most=1.0, whole=True)
        for layer in self.layers.spine:
            self.model.at_most(self.model.inside(layer, stage), flag)
        self.model.at_most(flag, held)
        return flag

    def _stages_of(self, rank: int) -> list[int]:
        return [k for k, home in enumerate(self.ranks) if home == rank]

    def _rank_rows(self, stages: Sequence[int], post: Linear) -> None:
        count = self.shape.num_microbatches
        load = Linear()
        for k in stages:
            load.add(self.F[k]).add(self.B[k])
        self.model.row(load * count + post)
        # the order of a rank's stages is sure backwards too only where gradients come back all the way between them
        parted = Linear()
        for k in range(stages[0], stages[-1]):
            parted.add(self.broken[k], self.most)
        for a, first in enumerate(stages):
            without = Linear()
            for k in stages[:a]:
                without.add(self.F[k])
            row = self._reached(self.PF, first) + (load - without) * count
            if not self.merged or first == 0:  # merged, PF holds the way back too, which ends on rank 0
                self._guarded(row + post - parted, *stages) if a else self._guarded(row + post, first)
            if self.shape.fused:
                dropped = Linear()
                for lowest in stages:
                    if lowest > 0:
                        ended = row - dropped * count + self.PB[lowest - 1] - parted
                        self._guarded(ended + self.post_first, 0, *stages)
                        self._guarded(ended, *stages)
                    dropped.add(self.B[lowest])
            elif len(stages) == 1 and first > 0:
                ended = self.PF[first - 1] + (self.F[first] + self.handed[first]) * count + self.PB[first - 1]
                self._guarded(ended + self.post_first, 0, first)
                self._guarded(ended, first)

    def _guarded(self, row: Linear, *stages: int) -> None:
        """A row that holds only where these stages hold layers of the spine."""
        slack = Linear()
        for k in set(stages):
            slack.add(Linear(constant=1.0) - self.holds[k], self.most + self.most_post)
        self.model.row(row - slack)

    @staticmethod
    def _reached(prefix: Sequence[Linear], stage: int) -> Linear:
        return prefix[stage - 1] if stage else Linear()

    def _post(self, rank: int, stages: Sequence[int]) -> Linear:
        """What follows a rank's last action, where it has one stage: all-reduce, optimizer step."""
        profile, shape = self.graph.profile, self.shape
        per_byte = profile.optimizer.step_s_per_trainable_byte
        link = ring_link(rank, data=shape.data, tensor=self.layers.tensor, cluster=shape.cluster)
        if shape.data > 1 and link is not None and len(stages) == 1:
            share = 2 * (shape.data - 1) / shape.data * profile.gradient_bytes_per_trainable_byte
            per_byte += share / link.bandwidth_bytes_per_s
        if not per_byte:
            return Linear()
        twice = {layer for users, _, _ in tied(self.graph) for layer in users}
        sizes = [
            0.0 if layer in twice else cost.trainable_bytes * per_byte / self.scale
            for layer, cost in enumerate(self.layers.costs)
        ]
        made = Linear()
        for k in stages:
            made.add(self.model.load(sizes, k))
        self.most_post = max(self.most_post, sum(sizes))
        return self.model.stored(made)

    def _memory(self) -> None:
        """Parameters, gradients, optimizer state, buffers and one micro-batch must fit on every rank."""
        limit = memory_limit(self.shape.cluster)
        if limit is None:
            return
        factor = self.layers.fixed_factor()
        size = max(limit, 1)
        shares: dict[int, float] = {}
        for users, held, trainable in tied(self.graph):
            for layer in users:  # counted once a stage below
                shares[layer] = shares.get(layer, 0.0) + held * (1 + (factor if trainable else 0))
        fixed = [
            max(cost.parameter_bytes + factor * cost.trainable_bytes + cost.buffer_bytes - shares.get(layer, 0.0), 0.0)
            / size
            for layer, cost in enumerate(self.layers.costs)
        ]
        saved = [  # what lasts no time holds nothing
            cost.saved_bytes / size if cost.forward_s + cost.backward_input_s > 0 else 0.0 for cost in self.layers.costs
        ]
        for rank in range(self.shape.num_ranks):
            stages = self._stages_of(rank)
            held_here = Linear()
            for k in stages:
                held_here.add(self.model.load(fixed, k))
            if len(stages) == 1:
                held_here.add(self.model.load(saved, stages[0]))
            self.model.at_most(held_here, Linear(constant=limit / size))


def _message_s(size: float, link: Link | None) -> float:
    return link.latency_s + float(size) / link.bandwidth_bytes_per_s if link is not None and size > 0 else 0.0
