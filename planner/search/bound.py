"""The bound of one cut: no order of actions at all ends its iteration sooner.

head(t) is the longest path to the start of an action of type t = (letter, stage), tail(t) the longest from its end,
over sends, returns, F -> B or I and I -> W, and what surely follows (all-reduce, tied sums, optimizer step).

    rank rows   for each rank, head value a and tail value b:  S = {t of the rank: head >= a, tail >= b}
                T >= a + M · (sum of S) + b
    link rows   for each ordered pair of ranks:
                T >= least (head + duration) + M · bytes / bandwidth + least (latency + head-to-end of what reads it)
    start rows  for each rank and head value a of its I's (or B's), S = {stages whose I has head >= a}: until a there
                are only F's of S, as many as its memory holds:  T >= a + M · (sum of S) - these F's + what follows
    closing     a rank's stages end in some order, each after all that leads to its last action on that rank, and their
                all-reduces follow one another: the least over all orders (a recursion over sets of stages)
    slot rows   where at most d micro-batches fit between F and B of a rank's only stage, with round trip RTT:
                T >= head(F) + ceil(M/d) · RTT + tail,  T >= head(B) + M · B + (M-d) · F + tail  (split: I + W for B)
    drain rows  once the last F of a stage has begun, a rank has no more left to do than what its memory holds (drain)
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from typing import Final

from planner.cluster import memory_limit
from planner.graph import Stage
from planner.search.drain import Piece, most_s, pieces
from planner.simulate import Job, Walk
from planner.simulate.closing import all_reduce_s, tied_sum_s, trainable_bytes
from planner.simulate.costs import Handover, Links
from planner.simulate.memory import resident_bytes

_Node = tuple[str, int]
_AN_INSTANT: Final = 1e-6
"""Of the bound so far: what lasts no longer is not taken to hold anything for sure."""
MOST_SETS: Final = 5
"""Stages of a rank of whose sets all are gone through."""


def cut_bound(walk: Walk, *, fused: bool) -> float:
    """A lower bound in seconds on the iteration of a job under every order of its actions.

    ``fused``: orders with whole backwards (B) only; else every order. Infinite where not even one micro-batch fits.
    """
    return _CutBound(walk, fused).bound_s


def ending_order(walk: Walk, *, fused: bool) -> tuple[int, ...]:
    """The stages of a job of one rank, in the order in which they best end for their all-reduces."""
    return _CutBound(walk, fused).closing(0)[1]


class _CutBound:
    def __init__(self, walk: Walk, fused: bool) -> None:
        self.walk, self.job, self.fused = walk, walk.job, fused
        self.stages = walk.job.stages
        self.endings = Endings(walk.job)
        self.post_s = self.endings.post_s
        self.seconds: dict[_Node, float] = {}
        self.after: dict[_Node, list[tuple[_Node, float]]] = {}
        self.leads_to: dict[_Node, tuple[int, int]] = {}
        for stage in range(len(self.stages)):
            self._add_stage(stage)
        order = self._order()
        self.head = dict.fromkeys(order, 0.0)
        for node in order:
            reached = self.head[node] + self.seconds[node]
            for target, delay in self.after[node]:
                self.head[target] = max(self.head[target], reached + delay)
        self.tail = {node: self._after_s(node) for node in order}
        for node in reversed(order):
            for target, delay in self.after[node]:
                self.tail[node] = max(self.tail[node], delay + self.seconds[target] + self.tail[target])
        self.bound_s = max(
            [*self._rank_rows(), *self._link_rows(), *self._slot_rows(), *self._start_rows(), *self._closing_rows()]
        )
        self.bound_s = max([self.bound_s, *self._drain_rows()])

    def _add_stage(self, stage: int) -> None:
        cost, sends, returns = self.walk.durations[stage], self.walk.sends[stage], self.walk.returns[stage]
        self.seconds["F", stage] = cost.forward_s + sends.added_s
        back = "B" if self.fused else "I"
        self.after["F", stage] = [((back, stage), 0.0), *_edges("F", sends)]
        self.after[back, stage] = _edges(back, returns)
        if self.fused:
            self.seconds["B", stage] = cost.backward_s + returns.added_s
        else:
            # every order: some backwards may be whole, so that splitting costs nothing
            self.seconds["I", stage] = cost.backward_input_s - cost.split_s + returns.added_s
            self.seconds["W", stage] = cost.backward_weight_s
            self.after["I", stage].append((("W", stage), 0.0))
            self.after["W", stage] = []

    def _after_s(self, node: _Node) -> float:
        """What surely follows an action: after a W (or B) its stage's own all-reduce."""
        letter, stage = node
        rank = self.stages[stage].rank
        if letter not in "BW" or self.job.data == 1:
            return self.post_s[rank]
        return self.post_s[rank] - self.endings.reduce_s[rank] + all_reduce_s(self.job, stage)

    def _order(self) -> list[_Node]:
        """Forwards up the stages, backwards down them: every path goes this way."""
        stages = range(len(self.stages))
        backward = [("B", k) for k in reversed(stages)]
        split = [(letter, k) for k in reversed(stages) for letter in "IW"]
        return [("F", k) for k in stages] + (backward if self.fused else split)

    def _rank_rows(self) -> list[float]:
        microbatches, made = self.job.num_microbatches, []
        by_rank: list[list[_Node]] = [[] for _ in range(self.job.num_ranks)]
        for node in self.seconds:
            by_rank[self.stages[node[1]].rank].append(node)
        ends = [0.0] * self.job.num_ranks
        for rank, nodes in enumerate(by_rank):
            for a in {self.head[node] for node in nodes}:
                later = [node for node in nodes if self.head[node] >= a]
                ends[rank] = max(ends[rank], a + microbatches * sum(self.seconds[node] for node in later))
                for b in {self.tail[node] for node in later}:
                    load = sum(self.seconds[node] for node in later if self.tail[node] >= b)
                    made.append(a + microbatches * load + b)
        return [*made, self.endings.iteration_s(ends)]

    def _link_rows(self) -> list[float]:
        microbatches = self.job.num_microbatches
        used: dict[tuple[int, int], list[tuple[float, float, float]]] = defaultdict(list)
        back = "B" if self.fused else "I"
        for letter, handovers in (("F", self.walk.sends), (back, self.walk.returns)):
            for stage, given in enumerate(handovers):
                ready = self.head[letter, stage] + self.seconds[letter, stage]
                for parcel in given.parcels:
                    reader = (letter, parcel.to_stage)
                    after = parcel.latency_s + self.seconds[reader] + self.tail[reader]
                    used[self.stages[stage].rank, parcel.to_rank].append((ready, parcel.busy_s, after))
        return [
            min(ready for ready, _, _ in row)
            + microbatches * sum(busy for _, busy, _ in row)
            + min(after for _, _, after in row)
            for row in used.values()
        ]

    def _slot_rows(self) -> list[float]:
        """Rows for ranks of one stage, whose memory holds fewer than M micro-batches between F and B (or I)."""
        microbatches, made = self.job.num_microbatches, [0.0]
        back = "B" if self.fused else "I"
        for rank in range(self.job.num_ranks):
            own = [stage for stage in self.stages if stage.rank == rank]
            if len(own) != 1:
                continue
            number = own[0].stage
            depth = most_in_flight(self.job, own[0], fused=self.fused)
            if depth < 1:
                return [math.inf]
            if depth >= microbatches:
                continue
            forward, backward = self.seconds["F", number], self.seconds[back, number]
            start, whole = self._longest(("F", number), (back, number)), backward
            head, tail, end = self.head["F", number], self.tail[back, number], self.tail[back, number]
            if not self.fused:
                whole, end = whole + self.seconds["W", number], self.post_s[rank]
                if not own[0].returns:  # it holds what it saved until its W ends
                    backward, tail = whole, end
            made.append(head + math.ceil(microbatches / depth) * (start + backward) + tail)
            made.append(head + start + microbatches * whole + (microbatches - depth) * forward + end)
        return made

    def _longest(self, start: _Node, end: _Node) -> float:
        """The longest path from the start of one action to the start of another."""
        reached = {start: 0.0}
        for node in self._order():
            if node in reached:
                for target, delay in self.after[node]:
                    through = reached[node] + self.seconds[node] + delay
                    reached[target] = max(reached.get(target, 0.0), through)
        return reached[end]

    def _start_rows(self) -> list[float]:
        """Before the first I (or B) of some stages of a rank their F's are limited by what its memory holds."""
        count, limit, made = self.job.num_microbatches, memory_limit(self.job.cluster), [0.0]
        back = "B" if self.fused else "I"
        for rank in range(self.job.num_ranks) if limit is not None else ():
            own = sorted(
                (stage for stage in self.stages if stage.rank == rank), key=lambda s: -self.head[back, s.stage]
            )
            room = float((limit or 0) - resident_bytes(self.job, rank))
            room -= min((stage.workspace_bytes for stage in own), default=0)
            for place, lowest in enumerate(own):
                among = own[: place + 1]
                works = count * sum(self.seconds[node] for s in among for node in self._actions(s.stage))
                begun = _most_forward_s(among, [self.seconds["F", s.stage] for s in among], room, count)
                after = min(self.tail[back, s.stage] for s in among) if self.fused else self.post_s[rank]
                made.append(self.head[back, lowest.stage] + works - begun + after)
        return made

    def _drain_rows(self) -> list[float]:
        """Once the last F of a stage has begun, its rank has no more left than what its memory holds: see drain."""
        limit, made = memory_limit(self.job.cluster), [0.0]
        for rank in range(self.job.num_ranks) if limit is not None and math.isfinite(self.bound_s) else ():
            own = [stage for stage in self.stages if stage.rank == rank]
            room = float(limit or 0) - resident_bytes(self.job, rank)
            for last in own:
                if self.seconds["F", last.stage] > _AN_INSTANT * self.bound_s:  # what lasts no time holds nothing
                    made += self._drains(own, last, room - last.workspace_bytes)
        return made

    def _drains(self, own: Sequence[Stage], last: Stage, room: float) -> Iterator[float]:
        """The rows of one rank after the last F of a stage of it: from each head on, and from the first I of some."""
        count, back, pivot = self.job.num_microbatches, "B" if self.fused else "I", ("F", last.stage)
        begun = {stage.stage for stage in own if self._leads(("F", stage.stage), pivot)}
        among = [s for s in own if s.stage in begun or self._leads(("F", s.stage), (back, last.stage))]
        follows = self.seconds[pivot] + self.tail[pivot]

        def left_s(counted: Collection[_Node]) -> float:
            seconds = {node: self.seconds[node] for node in counted}
            between = sum([lasts for node, lasts in seconds.items() if node[1] not in begun])
            held: list[Piece] = []
            for stage in among:
                k = stage.stage
                held += pieces(
                    stage,
                    backward_s=seconds.get((back, k), 0.0),
                    weight_s=None if self.fused else seconds.get(("W", k), 0.0),
                    between_s=between if stage is last else 0.0,
                )
            return most_s(held, room, count) + seconds.get(pivot, 0.0)

        nodes = [node for stage in among for node in self._actions(stage.stage)]
        for start in {self.head[node] for node in nodes}:
            counted = [node for node in nodes if self.head[node] >= start]
            works = count * sum([self.seconds[node] for node in counted]) - left_s(counted)
            if works > _AN_INSTANT * self.bound_s:
                yield start + works + follows
        by_head = sorted(among, key=lambda stage: -self.head[back, stage.stage])
        for place, lowest in enumerate(by_head):
            some = by_head[: place + 1]
            counted = [node for stage in some for node in self._actions(stage.stage)]
            works = count * sum([self.seconds[node] for node in counted]) - left_s(counted)
            works -= _most_forward_s(
                some, [self.seconds["F", s.stage] for s in some], room + last.workspace_bytes, count
            )
            if works > _AN_INSTANT * self.bound_s:
                yield self.head[back, lowest.stage] + works + follows

    def _actions(self, stage: int) -> list[_Node]:
        """The actions of a stage."""
        return [(letter, stage) for letter in ("FB" if self.fused else "FIW")]

    def _closing_rows(self) -> list[float]:
        """A rank's all-reduces run one at a time, none before all that leads to its stage's last action has ended."""
        if self.job.data == 1:
            return []
        return [self.closing(rank)[0] for rank in range(self.job.num_ranks)]

    def closing(self, rank: int) -> tuple[float, tuple[int, ...]]:
        """The least time at which a rank may be done, and the order in which its stages end then.

        Stages end one after another: when all of a set have, all that leads to one of them has, and their all-reduces
        began no sooner than each of them ended. With one rank and memory for all this is reached.
        """
        count, own = self.job.num_microbatches, [stage.stage for stage in self.stages if stage.rank == rank]
        mine = [node for k in own for node in self._actions(k)]
        last = "B" if self.fused else "W"
        leading = {k: [node for node in mine if self._leads(node, (last, k))] for k in own}
        share = 0.5 if self.job.zero1 else 1.0
        reduces = {k: share * all_reduce_s(self.job, k) for k in own}
        after_s = self.endings.post_s[rank] - self.endings.reduce_s[rank]
        after_s += (1 - share) * self.endings.all_reduces_s[rank]
        if len(own) > MOST_SETS:
            alone = [count * sum(map(self.seconds.__getitem__, leading[k])) for k in own if reduces[k]]
            return min(alone, default=0.0) + sum(reduces.values()) + after_s, tuple(reversed(own))
        ends = {k: self._ended_s((last, k)) for k in own} if len(own) > 1 else {own[0]: 0.0}
        ended: dict[frozenset[int], tuple[float, tuple[int, ...]]] = {frozenset(): (0.0, ())}
        for size in range(1, len(own) + 1):
            for some in itertools.combinations(own, size):
                before = dict.fromkeys(node for k in some for node in leading[k])
                works = min(self.head[node] for node in before) + count * sum(self.seconds[node] for node in before)
                works = max([works, *(ends[k] for k in some)])
                ways = [(ended[frozenset(some) - {k}], k) for k in some]
                ended[frozenset(some)] = min((max(at, works) + reduces[k], (*order, k)) for (at, order), k in ways)
        seconds, order = ended[frozenset(own)]
        return seconds + after_s, order

    def _ended_s(self, goal: _Node) -> float:
        """The least time at which an action of all micro-batches has ended: what other ranks and links do before it."""
        count, ended, back = self.job.num_microbatches, 0.0, "B" if self.fused else "I"
        left = {goal: 0.0}  # the longest path from a node's end to the end of the goal
        for node in reversed(self._order()):
            ways = [delay + self.seconds[to] + left[to] for to, delay in self.after[node] if to in left]
            if ways:
                left[node] = max(ways)
        by_rank: dict[int, list[_Node]] = defaultdict(list)
        for node in left:
            by_rank[self.stages[node[1]].rank].append(node)
        for nodes in by_rank.values():
            works, least = 0.0, math.inf
            for node in sorted(nodes, key=self.head.__getitem__, reverse=True):  # with each, those of no smaller head
                works, least = works + self.seconds[node], min(least, left[node])
                ended = max(ended, self.head[node] + count * works + least)
        used: dict[tuple[int, int], list[tuple[float, float, float]]] = defaultdict(list)
        for letter, handovers in (("F", self.walk.sends), (back, self.walk.returns)):
            for stage, given in enumerate(handovers):
                ready = self.head[letter, stage] + self.seconds[letter, stage]
                for parcel in given.parcels:
                    reader = (letter, parcel.to_stage)
                    if reader in left:
                        after = parcel.latency_s + self.seconds[reader] + left[reader]
                        used[self.stages[stage].rank, parcel.to_rank].append((ready, parcel.busy_s, after))
        for row in used.values():
            busy = count * sum(seconds for _, seconds, _ in row)
            ended = max(ended, min(ready for ready, _, _ in row) + busy + min(after for _, _, after in row))
        return ended

    def _leads(self, node: _Node, goal: _Node) -> bool:
        """Whether an action of one stage always precedes that of another with the same micro-batch."""
        if not self.leads_to:
            order = self._order()
            place = {node: bit for bit, node in enumerate(order)}
            reached: dict[_Node, int] = {}
            for one in reversed(order):
                reached[one] = 1 << place[one]
                for target, _ in self.after[one]:
                    reached[one] |= reached[target]
            self.leads_to = {one: (place[one], mask) for one, mask in reached.items()}
        return bool(self.leads_to[node][1] >> self.leads_to[goal][0] & 1)


def _most_forward_s(stages: Sequence[Stage], forward_s: Sequence[float], room: float, count: int) -> float:
    """The most seconds of F, at most M a stage, whose saved bytes a room holds at once: a fractional knapsack."""
    most = 0.0
    kept = [stage.input_bytes if stage.recompute else stage.saved_bytes for stage in stages]
    worth = sorted(
        range(len(stages)), key=lambda place: kept[place] / forward_s[place] if forward_s[place] else math.inf
    )
    for place in worth:
        many = float(count) if not kept[place] else min(float(count), max(room, 0.0) / kept[place])
        most += many * forward_s[place]
        room -= many * kept[place]
    return most


def _edges(letter: str, given: Handover) -> list[tuple[_Node, float]]:
    """The stages that an action hands something to, with the least delay until it is there."""
    made: list[tuple[_Node, float]] = [((letter, to), 0.0) for to in given.at_once]
    busy_s: dict[int, float] = defaultdict(float)
    for parcel in given.parcels:
        busy_s[parcel.to_rank] += parcel.busy_s
        delay = busy_s[parcel.to_rank] + parcel.latency_s
        made += [((letter, to), delay) for to in (parcel.to_stage, *parcel.riders)]
    return made


class Endings:
    """What surely follows the ranks' last actions: an all-reduce each, tied sums once all their ranks are there, steps.

    ``post_s[r]``: the least of it after the last action of rank r alone.
    """

    def __init__(self, job: Job) -> None:
        ranks, links = range(job.num_ranks), Links(job)
        own: list[list[int]] = [[] for _ in ranks]
        for stage in job.stages:
            own[stage.rank].append(stage.stage)
        reduces = [[all_reduce_s(job, stage) for stage in stages] if job.data > 1 else [0.0] for stages in own]
        self.reduce_s = [min(seconds, default=0.0) for seconds in reduces]
        self.all_reduces_s = [sum(seconds) for seconds in reduces]
        self.ties: list[tuple[list[int], float]] = []
        for tie in sorted(job.ties, key=lambda tie: tie.name):
            users = sorted({job.stages[stage].rank for stage in tie.stages})
            if tie.trainable and len(users) > 1:
                self.ties.append((users, tied_sum_s(job, tie, links)))
        trained = [sum(job.stages[stage].trainable_bytes for stage in stages) for stages in own]
        if job.ties:
            trained = [trainable_bytes(job, rank) for rank in ranks]
        self.step_s = [size * job.step_s_per_trainable_byte for size in trained]
        self.post_s = [
            self.reduce_s[rank] + sum(seconds for users, seconds in self.ties if rank in users) + self.step_s[rank]
            for rank in ranks
        ]

    def iteration_s(self, ends_s: Sequence[float]) -> float:
        """The least time of an iteration whose ranks end their last actions no sooner than this."""
        done = [end + reduce for end, reduce in zip(ends_s, self.reduce_s, strict=True)]
        for users, seconds in self.ties:
            start = max(done[rank] for rank in users)
            for rank in users:
                done[rank] = start + seconds
        return max(end + step for end, step in zip(done, self.step_s, strict=True))


def most_in_flight(job: Job, stage: Stage, *, fused: bool = True) -> int:
    """How many micro-batches a rank of one stage can hold between F and B (or I), at most M; 0: not even one.

    What messages take is left out: with them it may be fewer, never more.
    """
    limit = memory_limit(job.cluster)
    if limit is None:
        return job.num_microbatches
    room = limit - resident_bytes(job, stage.rank)
    backward = stage.backward_input_s + (stage.backward_weight_s if fused else 0.0)
    if stage.forward_s + backward > 0:  # what lasts no time holds nothing
        room -= stage.workspace_bytes
        held = stage.input_bytes if stage.recompute else stage.saved_bytes
        extra = stage.saved_bytes if stage.recompute else 0
        if room < max(held, extra):
            return 0
        if held:
            most = room // held if not stage.recompute else min(room // held, 1 + (room - extra) // held)
            return min(job.num_microbatches, most)
    return job.num_microbatches if room >= 0 else 0


def in_flight_limits(job: Job, stages: Sequence[Stage]) -> tuple[int, ...]:
    """``most_in_flight`` of every rank, for pipelines with one stage a rank."""
    return tuple(most_in_flight(job, stage) for stage in sorted(stages, key=lambda stage: stage.rank))
