"""The bound of one configuration with one stage a rank, over every cut of a lattice: an exact suffix recursion.

For a stage from ideal A to ideal B on rank r, any order of actions has (F, B = I + W its times, c the links at B):

    R_r(A) = min over B of max( M·(F+B), slot rows, link rows,  F + c + R_{r+1}(B) + c' + B )     to r's last B
    G_r(A) = min over B of max( R_r(A; B) + post_r,  F + c + G_{r+1}(B) )                         to the end of all

where post is what surely follows on a rank (all-reduce over replicas, optimizer step). With split backwards R has I for
B, to r's last I, and a rank's last W may have nothing after it: G takes in M·(F+I+W) + post_r besides. Slot rows: at
most d micro-batches fit between F and B, and a round trip lasts ``RTT``: ceil(M/d)·RTT, and RTT - B + M·B + (M-d)·F. A
stage that holds no layer of the spine (see figures) need not come after the stages before it: it only has M·(F+B), from
the very start.

G_0(empty) is the bound. The same tables complete any begun cut, so that cuts can be walked in order of their bound.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from planner.cluster import Cluster, ClusterLinks, Link, link_between, memory_limit, ring_link
from planner.search.figures import Figures
from planner.search.lattice import Bools, Floats, Ints

_LOOSE: Final = 1.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What the recursion needs of a configuration: P ranks of one stage, M micro-batches, D replicas.

    ``fused``: backwards are whole (B), else split (I, W), which also bounds every fused order. ``recompute``: which of
    False and True a stage may choose. ``spare``: how many of the micro-batches that fit are not counted on; then the
    recursion bounds nothing, but its cuts leave orders some room. ``deep``: so many more than P - r must fit on rank r.
    """

    num_ranks: int
    num_microbatches: int
    data: int = 1
    fused: bool
    recompute: tuple[bool, ...] = (False,)
    cluster: Cluster
    spare: int = 0
    deep: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundedCut:
    """A cut with its bound: the ideals between its stages (empty and whole included), and who recomputes."""

    bound_s: float
    ideals: tuple[int, ...]
    recompute: tuple[bool, ...]


class SuffixBound:
    """The recursion's tables for one shape. ``bound_s`` is infinite where no cut fits."""

    def __init__(self, figures: Figures, shape: Shape) -> None:
        self.figures: Final = figures
        self.shape: Final = shape
        self.expanded = 0
        """Options of all stages that were looked at on the way to cuts."""
        self._links()
        total = float(figures.layers.load_s.sum())
        cap = _LOOSE * max(total / shape.num_ranks, float(figures.layers.load_s.max()))
        self._tabulate(cap)
        while self.bound_s > shape.num_microbatches * self._cap_s and self._cap_s <= total:
            found = np.isfinite(self.bound_s)
            self._tabulate(self.bound_s / shape.num_microbatches if found else 2 * self._cap_s)

    def _tabulate(self, cap_s: float) -> None:
        """The tables over stages with a load up to ``cap_s``: exact for all cuts with a bound up to M times that."""
        self._cap_s = cap_s * (1 + 1e-9)
        self._choose(np.flatnonzero(self.figures.load_s <= self._cap_s))
        self._tables()
        self._rows_of: dict[tuple[int, int], tuple[Floats, Floats, Floats]] = {}
        self.bound_s = float(self.to_end[0, 0])

    # --- what holds for the whole configuration -----------------------------------------------------------------------

    def _links(self) -> None:
        """Costs of the spine's messages at each ideal between rank r and the next: [r, ideal], ahead and back."""
        figures, shape = self.figures, self.shape
        ranks, ideals = shape.num_ranks, len(figures.lattice)
        self.ahead_s = np.zeros((ranks, ideals))
        self.back_s = np.zeros((ranks, ideals))
        self.ahead_busy_s = np.zeros((ranks, ideals))
        self.back_busy_s = np.zeros((ranks, ideals))
        for rank in range(ranks - 1):
            link = self._link(rank)
            if link is not None:
                ahead, back = figures.ahead_bytes, figures.back_bytes
                self.ahead_busy_s[rank] = ahead / link.bandwidth_bytes_per_s
                self.back_busy_s[rank] = back / link.bandwidth_bytes_per_s
                self.ahead_s[rank] = self.ahead_busy_s[rank] + np.where(ahead > 0, link.latency_s, 0.0)
                self.back_s[rank] = self.back_busy_s[rank] + np.where(back > 0, link.latency_s, 0.0)
        self.most_ahead_s = np.concatenate([[0.0], np.cumsum(self.ahead_s.max(axis=1))])

    def _link(self, rank: int) -> Link | None:
        """The link from a rank to the next; where stages may skip ranks, one that is never slower than theirs."""
        shape = self.shape
        links = shape.cluster.links or ClusterLinks()
        if not self.figures.graph.is_chain and not _slower_between(links):
            if links.intra_node is None or links.inter_node is None:
                return None
            both = (links.intra_node, links.inter_node)
            return Link(
                latency_s=min(link.latency_s for link in both),
                bandwidth_bytes_per_s=max(link.bandwidth_bytes_per_s for link in both),
            )
        return link_between(rank, rank + 1, data=shape.data, tensor=self.figures.layers.tensor, cluster=shape.cluster)

    def _choose(self, steps: Ints) -> None:
        """The options: (step, recompute or not) that fit with one micro-batch in flight, and their figures."""
        figures, shape = self.figures, self.shape
        kept, flags, depths = [], [], []
        for again in shape.recompute:
            depth = self._depth(steps, again)
            fits = depth >= 1
            kept.append(steps[fits])
            flags.append(np.full(int(fits.sum()), again, dtype=np.bool_))
            depths.append(depth[fits])
        step, flag, depth = np.concatenate(kept), np.concatenate(flags), np.concatenate(depths)
        order = np.argsort(figures.lattice.start[step], kind="stable")
        self.step: Ints = step[order]
        self.recomputes: Bools = flag[order]
        self.depth: Floats = depth[order]
        self.start: Ints = figures.lattice.start[self.step]
        self.end: Ints = figures.lattice.end[self.step]
        again_s = np.where(self.recomputes, figures.forward_s[self.step], 0.0)
        self.forward_s: Floats = figures.forward_s[self.step]
        self.input_s: Floats = figures.input_s[self.step] + again_s
        self.backward_s: Floats = self.input_s + figures.weight_s[self.step]
        self.on_spine: Bools = figures.on_spine[self.step]
        self.first: Ints = np.searchsorted(self.start, np.arange(len(figures.lattice) + 1))

    def _depth(self, steps: Ints, recompute: bool) -> Floats:
        """How many micro-batches fit between F and the end of B (or I), at most M; 0: not even one."""
        figures, shape = self.figures, self.shape
        most = float(shape.num_microbatches)
        limit = memory_limit(shape.cluster)
        if limit is None:
            return np.full(len(steps), most)
        room = limit - figures.fixed_bytes[steps] - figures.workspace_bytes[steps]
        saved, received = figures.saved_bytes[steps], figures.input_bytes[steps]
        with np.errstate(divide="ignore", invalid="ignore"):
            if recompute:
                depth = np.minimum(_floor(room, received), 1 + _floor(room - saved, received))
            else:
                depth = _floor(room, saved)
        backward = figures.input_s[steps] + (figures.weight_s[steps] if shape.fused else 0.0)
        instant = (figures.forward_s[steps] == 0) & (backward == 0)  # what lasts no time holds nothing
        depth = np.where(instant & (limit >= figures.fixed_bytes[steps]), most, depth)
        depth = np.clip(depth, 0.0, most)
        if shape.spare:
            depth = np.where((depth >= 1) & (depth < most), np.maximum(depth - shape.spare, 1.0), depth)
        return depth

    def post_s(self, rank: int, options: Ints | slice) -> Floats:
        """All-reduce over the replicas, then the optimizer step."""
        figures, shape = self.figures, self.shape
        profile = figures.graph.profile
        trainable = figures.trainable_bytes[self.step[options]]
        post: Floats = trainable * profile.optimizer.step_s_per_trainable_byte
        link = (
            ring_link(rank, data=shape.data, tensor=figures.layers.tensor, cluster=shape.cluster)
            if shape.data > 1
            else None
        )
        if link is not None:
            gradients = trainable * profile.gradient_bytes_per_trainable_byte
            share = 2 * (shape.data - 1) / shape.data
            post = post + share * gradients / link.bandwidth_bytes_per_s
            post = post + np.where(gradients > 0, 2 * (shape.data - 1) * link.latency_s, 0.0)
        return post

    # --- the recursion ------------------------------------------------------------------------------------------------

    def _tables(self) -> None:
        ranks, ideals = self.shape.num_ranks, len(self.figures.lattice)
        self.to_last = np.full((ranks + 1, ideals), np.inf)
        self.to_end = np.full((ranks + 1, ideals), np.inf)
        self.round_trip = np.full((ranks + 1, ideals), np.inf)
        self.to_last[ranks, -1] = self.to_end[ranks, -1] = -np.inf
        self.round_trip[ranks, -1] = 0.0
        everything = slice(0, len(self.step))
        starts = np.flatnonzero(self.first[1:] > self.first[:-1])
        if not len(starts):
            return
        for rank in range(ranks - 1, -1, -1):
            for table, values in zip(
                (self.to_last, self.to_end, self.round_trip), self.rows(rank, everything), strict=True
            ):
                table[rank, starts] = np.minimum.reduceat(values, self.first[starts])

    def rows(self, rank: int, options: slice) -> tuple[Floats, Floats, Floats]:
        """R, G and RTT of options as stages on a rank, each completed by the tables of the next rank."""
        microbatches = self.shape.num_microbatches
        end, on_spine = self.end[options], self.on_spine[options]
        forward_s, backward_s, input_s = self.forward_s[options], self.backward_s[options], self.input_s[options]
        ahead_s, back_s = self._messages(rank, end)
        if not self.shape.cluster.overlap:  # what a stage hands over lasts as long as its action does
            forward_s = forward_s + np.where(on_spine, ahead_s, 0.0)
            handed = self._handed_back(rank, self.start[options])
            input_s = input_s + np.where(on_spine, handed, 0.0)
            backward_s = backward_s + np.where(on_spine, handed, 0.0)
            ahead_s = back_s = np.zeros(len(end))
        returns = self.figures.comes_back[end]
        last, finish, trip = (table[rank + 1][end] for table in (self.to_last, self.to_end, self.round_trip))
        out = backward_s if self.shape.fused else input_s
        own_trip = forward_s + out
        own_trip = own_trip + np.where(on_spine & returns, ahead_s + trip + back_s, 0.0)
        own, closed = self._own_rows(rank, options, forward_s, backward_s, out, own_trip, trip, ahead_s, back_s)
        through = forward_s + ahead_s + last + back_s + out
        on_rank = np.where(on_spine, np.maximum(closed, np.where(returns, through, -np.inf)), last)
        post_s = self.post_s(rank, options)
        before_s = self.figures.forward_before_s[self.start[options]] + self.most_ahead_s[rank]
        aside = microbatches * (forward_s + backward_s) + post_s - before_s
        to_end = np.where(
            on_spine,
            np.maximum(np.maximum(own, on_rank) + post_s, forward_s + ahead_s + finish),
            np.maximum(aside, finish),
        )
        unreachable = ~np.isfinite(trip)
        if self.shape.deep is not None:
            needed = min(microbatches, self.shape.num_ranks - rank + self.shape.deep)
            unreachable = unreachable | (self.depth[options] < needed)
        on_rank, to_end = np.where(unreachable, np.inf, on_rank), np.where(unreachable, np.inf, to_end)
        return on_rank, to_end, np.where(unreachable, np.inf, np.where(on_spine, own_trip, trip))

    def _messages(self, rank: int, end: Ints) -> tuple[Floats, Floats]:
        return self.ahead_s[rank][end], self.back_s[rank][end]

    def _handed_back(self, rank: int, start: Ints) -> Floats:
        return self.back_s[rank - 1][start] if rank else np.zeros(len(start))

    def _own_rows(
        self,
        rank: int,
        options: slice,
        forward_s: Floats,
        backward_s: Floats,
        out: Floats,
        own_trip: Floats,
        trip: Floats,
        ahead_s: Floats,
        back_s: Floats,
    ) -> tuple[Floats, Floats]:
        """The load, slot and link rows of a stage, from its first F: to its last action; to its last B (split: I)."""
        microbatches = self.shape.num_microbatches
        depth = self.depth[options]
        own = microbatches * (forward_s + backward_s)
        closed = microbatches * (forward_s + out)
        tight = depth < microbatches
        if bool(tight.any()):
            rounds = np.where(tight, np.ceil(microbatches / depth - 1e-9) * own_trip, 0.0)
            waits = own_trip - out + (microbatches - depth) * forward_s
            closed = np.maximum(closed, np.maximum(rounds, np.where(tight, waits + microbatches * out, 0.0)))
            own = np.maximum(own, np.where(tight, waits + microbatches * backward_s, 0.0))
        if self.shape.cluster.overlap and rank + 1 < self.shape.num_ranks:
            end = self.end[options]
            once_s = forward_s + ahead_s + trip + back_s + out
            busiest_s = np.maximum(self.ahead_busy_s[rank][end], self.back_busy_s[rank][end])
            there = once_s + (microbatches - 1) * busiest_s
            closed = np.where(self.figures.comes_back[end], np.maximum(closed, there), closed)
        return own, closed

    def windows(self, below_s: float) -> list[tuple[int, int]] | None:
        """First and last stage of every layer over the cuts with a bound under ``below_s``; None: there is no such cut.

        An ideal may lie after stage k only if it is reached in time and what is left fits behind it.
        """
        self._reach(below_s)
        ranks, lattice = self.shape.num_ranks, self.figures.lattice
        head = np.full(len(lattice), np.inf)
        head[0] = 0.0
        first = np.full(len(self.figures.graph), ranks - 1)
        last = np.zeros(len(self.figures.graph), dtype=np.int64)
        for rank in range(ranks):
            _, to_end, _ = self.rows(rank, slice(0, len(self.step)))
            viable = head[self.start] + to_end < below_s
            if not bool(viable.any()):
                return None
            reached = np.full(len(lattice), np.inf)
            np.minimum.at(reached, self.end[viable], self._heads(rank, head[self.start])[viable])
            head = reached
            held = lattice.members[np.isfinite(head)]
            first = np.where(held.any(axis=0), np.minimum(first, rank), first)
            last = np.where(held.all(axis=0), last, rank + 1)
        return [(int(low), int(high)) for low, high in zip(first, np.minimum(last, ranks - 1), strict=True)]

    def _heads(self, rank: int, head: Floats) -> Floats:
        """The head of the stage that follows each option on a rank."""
        through = np.where(self.on_spine, self.forward_s + self.ahead_s[rank][self.end], 0.0)
        return head + through

    def _reach(self, below_s: float) -> None:
        """Make the tables hold for every cut with a bound under ``below_s``."""
        if np.isfinite(below_s) and below_s > self.shape.num_microbatches * self._cap_s:
            self._tabulate(below_s / self.shape.num_microbatches)

    # --- cuts in order of their bound ---------------------------------------------------------------------------------

    def cuts(self, below_s: float, most_nodes: int) -> Iterator[BoundedCut | None]:
        """Every cut with a bound under ``below_s``, least bound first; None at the end where nodes ran out."""
        self._reach(below_s)
        ranks = self.shape.num_ranks
        counter = itertools.count()
        # bound, -rank, counter, ideal, head, bound of the rows so far, way back to the end of all, options taken
        heap: list[tuple[float, int, int, int, float, float, float, tuple[int, ...]]] = [
            (self.bound_s, 0, next(counter), 0, 0.0, -np.inf, -np.inf, ())
        ]
        expanded = 0
        while heap:
            bound_s, _, _, ideal, head, done, back, path = heapq.heappop(heap)
            rank = len(path)
            if rank == ranks:
                yield self._cut(bound_s, path)
                continue
            expanded += 1
            if expanded > most_nodes:
                yield None
                return
            options = slice(int(self.first[ideal]), int(self.first[ideal + 1]))
            for value, option, new_head, new_back in self._expand(rank, options, head, done, back):
                if value < below_s:
                    entry = (value, -rank - 1, next(counter), int(self.end[option]), new_head, value, new_back)
                    heapq.heappush(heap, (*entry, (*path, option)))

    def dive(self) -> BoundedCut | None:
        """One good cut, soon: from stage to stage the one that promises most; None where that leads nowhere."""
        ideal, head, done, back = 0, 0.0, -np.inf, -np.inf
        path: tuple[int, ...] = ()
        for rank in range(self.shape.num_ranks):
            options = slice(int(self.first[ideal]), int(self.first[ideal + 1]))
            best = min(self._expand(rank, options, head, done, back), default=None)
            if best is None:
                return None
            done, option, head, back = best
            ideal, path = int(self.end[option]), (*path, option)
        return self._cut(done, path)

    def _expand(
        self, rank: int, options: slice, head: float, done: float, back: float
    ) -> Iterator[tuple[float, int, float, float]]:
        """(bound, option, head of the next stage, way back) of each stage that may come next."""
        if options.start == options.stop:
            return
        key = (rank, options.start)
        if key not in self._rows_of:
            self._rows_of[key] = self.rows(rank, options)
        self.expanded += options.stop - options.start
        on_rank, to_end, _ = self._rows_of[key]
        end, on_spine = self.end[options], self.on_spine[options]
        value = np.maximum(head + to_end, done)
        if np.isfinite(back):
            value = np.maximum(value, head + on_rank + back)
        ahead_s, back_s = self._messages(rank, end)
        forward_s = self.forward_s[options]
        out = (self.backward_s if self.shape.fused else self.input_s)[options]
        if not self.shape.cluster.overlap:
            forward_s = forward_s + ahead_s
            out = out + self._handed_back(rank, self.start[options])
            ahead_s = back_s = np.zeros(len(end))
        heads = np.where(on_spine, head + forward_s + ahead_s, head)
        own = back_s + out + np.maximum(self.post_s(rank, options), back)
        backs = np.where(on_spine, np.where(self.figures.comes_back[end], own, -np.inf), np.full(len(end), back))
        for place in np.flatnonzero(np.isfinite(value)):
            yield float(value[place]), options.start + int(place), float(heads[place]), float(backs[place])

    def _cut(self, bound_s: float, path: Sequence[int]) -> BoundedCut:
        return BoundedCut(
            bound_s=bound_s,
            ideals=(0, *(int(self.end[option]) for option in path)),
            recompute=tuple(bool(self.recomputes[option]) for option in path),
        )


def _floor(room: Floats, size: Floats) -> Floats:
    """How many of a size fit into a room; a hair over, so that rounding never takes one away."""
    many = np.where(room >= 0, np.inf, -1.0)
    return np.where(size > 0, np.floor(room / np.where(size > 0, size, 1.0) + 1e-9), many)


def _slower_between(links: ClusterLinks) -> bool:
    """Whether a link between nodes is at no time faster than one within a node."""
    inside, between = links.intra_node, links.inter_node
    if inside is None:
        return True
    return (
        between is not None
        and between.latency_s >= inside.latency_s
        and between.bandwidth_bytes_per_s <= inside.bandwidth_bytes_per_s
    )
