"""What bounds each of some cuts of a chain, or what is begun of them, as arrays with an entry for each cut.

With heads and tails as in planner.search.bound, per rank with stages k0 < k1 < ..., for every order of actions:

    loads       T >= head(F of ka) + M · (what has no smaller head) + step
    backwards   T >= head + M · (what has no smaller head nor tail) + tail, for heads and tails of F's and I's
    links       per ordered pair of ranks: T >= first message's start + M · (seconds of all messages) + what follows
    reduces     the rank's stages end in some order, each with all that leads to it, and so do their all-reduces one
                after another: the least over all orders (a recursion over sets of stages)

What a rank's memory bounds stands in memory_rows.
A linear program over stages knows neither what crosses a boundary nor what a stage reduces: these rows do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Final

import numpy as np

from planner.cluster import Cluster, Link, link_between, memory_limit, ring_link
from planner.schedules import ranks_of
from planner.search.figures import LayerFigures, tied
from planner.search.lattice import Bools, Floats, Ints
from planner.search.space import Configuration

_MOST_SETS: Final = 5
"""Stages of a rank of whose sets all are gone through."""


class ChainSums:
    """A configuration of a chain: sums over its layers (entry p of the layers before p), its links and rings."""

    def __init__(
        self, layers: LayerFigures, configuration: Configuration, recompute: Sequence[bool], *, fused: bool
    ) -> None:
        assert layers.cluster is not None
        self.layers: Final = layers
        self.cluster: Final[Cluster] = layers.cluster
        self.shape: Final = configuration
        self.choices: Final = tuple(recompute)
        self.count: Final = configuration.num_microbatches
        self.rank_of: Final = ranks_of(configuration.pipeline, configuration.virtual, configuration.placement)
        self.own: Final = [
            [k for k, home in enumerate(self.rank_of) if home == rank] for rank in range(configuration.pipeline)
        ]
        self.limit: Final = memory_limit(self.cluster)
        again = layers.forward_s if self.choices == (True,) else 0.0 * layers.forward_s
        self.forward: Final = _sums(layers.forward_s)
        weight = layers.weight_s  # a whole backward is an I that takes as long
        self.input: Final = _sums(layers.input_s + again + (weight if fused else 0.0))
        self.weight: Final = _sums(0.0 * weight if fused else weight)
        self.load: Final[Floats] = self.forward + self.input + self.weight
        self.trainable: Final = _sums(_untied(layers))
        self.fixed: Final = _sums(_always(layers))
        self.saved: Final = _sums(np.array([float(cost.saved_bytes) for cost in layers.costs]))
        self.saved_for_weight: Final = _sums(np.array([float(cost.saved_for_weight_bytes) for cost in layers.costs]))
        self.saved_again: Final = _saved_again(layers)
        self.links: Final = [self._link(one, other) for one, other in zip(self.rank_of, self.rank_of[1:], strict=False)]
        self.step_s: Final = layers.graph.profile.optimizer.step_s_per_trainable_byte
        data, tensor = configuration.data, layers.tensor
        self.rings: Final = [
            ring_link(rank, data=data, tensor=tensor, cluster=self.cluster) if data > 1 else None
            for rank in range(configuration.pipeline)
        ]

    def _link(self, one: int, other: int) -> Link | None:
        if one == other:
            return None
        return link_between(one, other, data=self.shape.data, tensor=self.layers.tensor, cluster=self.cluster)


def _saved_again(layers: LayerFigures) -> Floats:
    """Per boundary the bytes that a stage behind it saves of what comes over it, and another one has made."""
    following = {source: (place, target) for place, (source, target) in enumerate(pairwise(layers.spine), start=1)}
    made = np.zeros(len(layers.spine) + 1)
    for tensor in layers.graph.tensors:
        place, target = following.get(tensor.source, (0, -1))
        if any(reader.layer == target and reader.saved for reader in tensor.readers):
            made[place] += tensor.bytes(layers.microbatch_size, layers.tensor)
    return made


def _untied(layers: LayerFigures) -> Floats:
    """Trainable bytes of each layer, without those of tied parameters: a stage has these once or not at all."""
    sizes: Floats = np.array([float(cost.trainable_bytes) for cost in layers.costs])
    for users, size, trainable in tied(layers.graph):
        sizes[users] -= size if trainable else 0
    made: Floats = np.maximum(sizes, 0.0)
    return made


def _always(layers: LayerFigures) -> Floats:
    """What each layer holds at all times, in bytes, without tied parameters."""
    factor = layers.fixed_factor()
    sizes: Floats = np.array(
        [cost.parameter_bytes + factor * cost.trainable_bytes + cost.buffer_bytes for cost in layers.costs]
    )
    for users, size, trainable in tied(layers.graph):
        sizes[users] -= size * (1 + (factor if trainable else 0))
    made: Floats = np.maximum(sizes, 0.0)
    return made


def _sums(per_layer: Floats) -> Floats:
    return np.concatenate([[0.0], np.cumsum(per_layer)])


def _total(arrays: Sequence[Floats]) -> Floats:
    made: Floats = np.add.reduce(arrays)
    return made


class CutRows:
    """Some cuts, or what is begun of them, as arrays: an entry for each cut."""

    def __init__(self, cuts: ChainSums, marks: Ints) -> None:
        self.cuts: Final = cuts
        self.marks: Final = marks
        self.num_stages: Final = marks.shape[1] - 1
        stages, layers = range(self.num_stages), cuts.layers
        self.forward: Final = [self.between(cuts.forward, k) for k in stages]
        inputs = [self.between(cuts.input, k) for k in stages]
        weights = [self.between(cuts.weight, k) for k in stages]
        self.returns: Final = [layers.comes_back[marks[:, k]] for k in stages]
        # a stage that returns nothing has no I: its W takes I + W, or all of B
        self.input: Final = [np.where(r, i, 0.0) for r, i in zip(self.returns, inputs, strict=True)]
        self.weight: Final = [np.where(r, w, i + w) for r, i, w in zip(self.returns, inputs, weights, strict=True)]
        self.ahead: Final[list[tuple[Floats, Floats]]] = []  # busy and arrival, over each boundary
        self.back: Final[list[tuple[Floats, Floats]]] = []
        self._messages()
        self.heads: Final[list[Floats]] = [np.zeros(len(marks))]
        for k in range(self.num_stages - 1):
            self.heads.append(self.heads[k] + self.forward[k] + self.ahead[k][1])

    def between(self, sums: Floats, stage: int) -> Floats:
        """Of each cut the sum over the layers of one stage."""
        made: Floats = np.maximum(sums[self.marks[:, stage + 1]] - sums[self.marks[:, stage]], 0.0)
        return made

    def _messages(self) -> None:
        """Over each boundary how long its link is busy and until the message is there; without overlap in actions."""
        nothing = np.zeros(len(self.marks))
        for k in range(self.num_stages - 1):
            link, place = self.cuts.links[k], self.marks[:, k + 1]
            for sizes, into in ((self.cuts.layers.ahead_bytes, self.ahead), (self.cuts.layers.back_bytes, self.back)):
                size = sizes[place]
                if link is None:
                    into.append((nothing, nothing))
                    continue
                busy = size / link.bandwidth_bytes_per_s
                into.append((busy, busy + np.where(size > 0, link.latency_s, 0.0)))
            if not self.cuts.cluster.overlap:
                self.forward[k] = self.forward[k] + self.ahead[k][1]
                self.input[k + 1] = self.input[k + 1] + self.back[k][1]
                self.ahead[k] = self.back[k] = (nothing, nothing)

    def follow(self) -> None:
        """Heads of I's and W's, tails of all actions, of whole cuts."""
        last = self.num_stages - 1
        self.heads_back: list[Floats] = [head + forward for head, forward in zip(self.heads, self.forward, strict=True)]
        for k in range(last - 1, -1, -1):
            through = self.heads_back[k + 1] + self.input[k + 1] + self.back[k][1]
            self.heads_back[k] = np.where(self.returns[k + 1], through, self.heads_back[k])
        steps = [self.step_s(own) for own in self.cuts.own]
        # of a rank the least of its all-reduces surely follows all it does, of a stage its own
        self.after_stage = [self.reduce_s(k) + steps[self.cuts.rank_of[k]] for k in range(self.num_stages)]
        self.after_rank = [np.minimum.reduce([self.after_stage[k] for k in own]) for own in self.cuts.own]
        self.tails_back: list[Floats] = []
        for k in range(self.num_stages):
            tail = self.weight[k] + self.after_stage[k]
            if k:
                through = self.back[k - 1][1] + self.input[k - 1] + self.tails_back[k - 1]
                tail = np.where(self.returns[k], np.maximum(tail, through), tail)
            self.tails_back.append(tail)
        self.tails: list[Floats] = [self.input[k] + self.tails_back[k] for k in range(self.num_stages)]
        for k in range(last - 1, -1, -1):
            through = self.ahead[k][1] + self.forward[k + 1] + self.tails[k + 1]
            self.tails[k] = np.maximum(self.tails[k], through)

    def reduce_s(self, stage: int) -> Floats:
        """Seconds of a stage's all-reduce."""
        shape, ring = self.cuts.shape, self.cuts.rings[self.cuts.rank_of[stage]]
        if ring is None:
            return np.zeros(len(self.marks))
        size = self.between(self.cuts.trainable, stage)
        per_byte = self.cuts.layers.graph.profile.gradient_bytes_per_trainable_byte / ring.bandwidth_bytes_per_s
        hops = 2 * (shape.data - 1)
        made: Floats = np.where(size > 0, hops * ring.latency_s + hops / shape.data * per_byte * size, 0.0)
        return made

    def fixed_bytes(self, own: Sequence[int]) -> Floats:
        """What a rank holds at all times, as far as it is placed."""
        return _total([self.between(self.cuts.fixed, k) for k in own])

    def fits(self, own: Sequence[int]) -> Bools:
        """Whether what a rank holds at all times fits, as far as it is placed."""
        if self.cuts.limit is None:
            return np.ones(len(self.marks), dtype=np.bool_)
        fine: Bools = self.fixed_bytes(own) <= self.cuts.limit + 1
        return fine

    def step_s(self, own: Sequence[int]) -> Floats:
        """Seconds of a rank's optimizer step, as far as it is placed."""
        return self.cuts.step_s * _total([self.between(self.cuts.trainable, k) for k in own])

    # --- rows ---------------------------------------------------------------------------------------------------------

    def loads(self, own: Sequence[int]) -> Floats:
        """The largest load row of a rank, as far as its stages are placed."""
        works = self.cuts.count * _total([self.forward[k] + self.input[k] + self.weight[k] for k in own])
        row: Floats = self.heads[own[0]] + works
        whole = np.ones(len(self.marks), dtype=np.bool_)  # gradients come back all the way to the rank's first stage
        for place, k in enumerate(own[1:], start=1):
            works = works - self.cuts.count * self.forward[own[place - 1]]
            for between in range(own[0] + 1, k + 1):
                whole = whole & self.returns[between]
            row = np.maximum(row, np.where(whole, self.heads[k] + works, 0.0))
        return row + self.step_s(own)

    def reduced_at_least(self, rank: int, own: Sequence[int]) -> Floats:
        """All of a rank's all-reduces, after the F's of its first stage."""
        if self.cuts.rings[rank] is None:
            return np.zeros(len(self.marks))
        reduces = _total([self.reduce_s(k) for k in own])
        made: Floats = self.heads[own[0]] + self.cuts.count * self.forward[own[0]] + reduces + self.step_s(own)
        return made

    def busy(
        self, after: tuple[Mapping[int, Floats], Mapping[int, Floats]] | None = None
    ) -> dict[tuple[int, int], Floats]:
        """Of each ordered pair of ranks: its first message's start, all its messages, the least of what follows.

        ``after``: what follows the F's and the I's of stages, and only the messages to such count; None: what is begun.
        """
        if not self.cuts.cluster.overlap:
            return {}
        used: dict[tuple[int, int], list[tuple[Floats, Floats, Floats]]] = defaultdict(list)
        nothing = np.zeros(len(self.marks))
        for k in range(self.num_stages - 1):
            one, other = self.cuts.rank_of[k], self.cuts.rank_of[k + 1]
            if self.cuts.links[k] is None:
                continue
            (busy, there), start = self.ahead[k], self.heads[k] + self.forward[k]
            follows = nothing if after is None else there - busy + self.forward[k + 1] + after[0][k + 1]
            used[one, other].append((start, busy, follows))
            busy, there = self.back[k]
            if after is None:
                used[other, one].append((start, busy, nothing))
            elif k in after[1]:
                start = self.heads_back[k + 1] + self.input[k + 1]
                used[other, one].append((start, busy, there - busy + self.input[k] + after[1][k]))
        made = {}
        for pair, row in used.items():  # where nothing crosses, nothing starts or follows
            total = _total([busy for _, busy, _ in row])
            starts = np.minimum.reduce([np.where(busy > 0, start, np.inf) for start, busy, _ in row])
            follows = np.minimum.reduce([np.where(busy > 0, after_s, np.inf) for _, busy, after_s in row])
            with np.errstate(invalid="ignore"):
                made[pair] = np.where(total > 0, starts + self.cuts.count * total + follows, 0.0)
        return made

    def rank_rows(self, own: Sequence[int]) -> Iterator[Floats]:
        """What a rank has to do from each head of an F or an I on: all of it, or what has a tail as well."""
        count, post = self.cuts.count, self.after_rank[self.cuts.rank_of[own[0]]]
        ends = [self.heads_back[k] + self.input[k] for k in own]
        for start in (*(self.heads[k] for k in own), *(self.heads_back[k] for k in own)):
            forward = [np.where(self.heads[k] >= start, self.forward[k], 0.0) for k in own]
            inputs = [np.where(self.heads_back[k] >= start, self.input[k], 0.0) for k in own]
            weights = [np.where(end >= start, self.weight[k], 0.0) for k, end in zip(own, ends, strict=True)]
            yield start + count * _total([*forward, *inputs, *weights]) + post
            for tail in (*(self.tails_back[k] for k in own), *(self.tails[k] for k in own)):
                ends_after = (
                    (self.tails, forward),
                    (self.tails_back, inputs),
                    (self.after_stage, weights),
                )
                works = _total(
                    [
                        np.where(tails[k] >= tail, seconds, 0.0)
                        for tails, many in ends_after
                        for k, seconds in zip(own, many, strict=True)
                    ]
                )
                yield np.where(works > 0, start + count * works + tail, 0.0)

    def reduced(self, rank: int, own: Sequence[int]) -> Floats:
        """The all-reduces of a rank, in whichever order its stages end."""
        if self.cuts.rings[rank] is None:
            return np.zeros(len(self.marks))
        reduces = [self.reduce_s(k) for k in own]
        if len(own) > _MOST_SETS:
            return self.reduced_at_least(rank, own)
        ends = [self._ended(k) if len(own) > 1 else np.zeros(len(self.marks)) for k in own]
        ended = {0: np.zeros(len(self.marks))}
        for chosen in range(1, 1 << len(own)):
            among = [place for place in range(len(own)) if chosen >> place & 1]
            works = self.heads[own[0]] + self.cuts.count * self._leading(own, among)
            works = np.maximum.reduce([works, *(ends[place] for place in among)])
            ways = [np.maximum(ended[chosen & ~(1 << last)], works) + reduces[last] for last in among]
            ended[chosen] = np.minimum.reduce(ways)
        made: Floats = ended[(1 << len(own)) - 1] + self.step_s(own)
        return made

    def _ended(self, goal: int) -> Floats:
        """When a stage's last action of all micro-batches may have ended: what other ranks and links do before it.

        Where gradients come back all the way to the stage, all F's lead to it, and the I's of the stages from it on.
        """
        count, stages = self.cuts.count, range(self.num_stages)
        left_back: dict[int, Floats] = {goal: self.weight[goal]}  # from the end of an action to that of the goal
        for k in stages[goal + 1 :]:
            left_back[k] = self.back[k - 1][1] + self.input[k - 1] + left_back[k - 1]
        left = {stages[-1]: self.input[stages[-1]] + left_back[stages[-1]]}
        for k in stages[-2::-1]:
            left[k] = self.ahead[k][1] + self.forward[k + 1] + left[k + 1]
        ended = np.zeros(len(self.marks))
        for own in self.cuts.own:
            returned = [k for k in own if k >= goal]
            works = _total([*(self.forward[k] for k in own), *(self.input[k] for k in returned)])
            if goal in own:
                works, last = works + self.weight[goal], np.zeros(len(self.marks))
            else:
                last = left_back[returned[0]] if returned else left[own[-1]]
            for k in own:
                ended = np.maximum(ended, self.heads[k] + count * works + last)
                works = works - self.forward[k]
        for row in self.busy(after=(left, left_back)).values():
            ended = np.maximum(ended, row)
        whole = np.ones(len(self.marks), dtype=np.bool_)
        for k in stages[goal + 1 :]:
            whole = whole & self.returns[k]
        return np.where(whole, ended, 0.0)

    def _leading(self, own: Sequence[int], among: Sequence[int]) -> Floats:
        """Seconds of all actions of a rank, of one micro-batch, that lead to the W's of some of its stages."""
        made = _total([self.weight[own[place]] for place in among])
        reached = np.zeros(len(self.marks), dtype=np.bool_)  # gradients come from here to one of them
        for place, k in enumerate(own):
            if place:
                for between in range(own[place - 1] + 1, k + 1):
                    reached = reached & self.returns[between]
            if place in among:
                reached = np.ones(len(self.marks), dtype=np.bool_)
            made = made + np.where(reached, self.input[k], 0.0)
            made = made + (self.forward[k] if place <= max(among) else np.where(reached, self.forward[k], 0.0))
        return made
