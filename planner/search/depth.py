"""Warm-up depths: how many forwards each rank of 1F1B runs ahead of its first backward, as a planned quantity.

P - r depths cover the round trip only where links are free. Deeper is not better everywhere: depths that are equal
and deep delay the last rank's first B. So: a start from each rank's round trip, then a climb by one and two on single
ranks and on runs of ranks; and, where it pays to know, a branch and bound over all depths that ends in a proof.

    fixed ranks      run 1F1B at their depth
    open ranks       run all F's and all B's side by side, each in order: never later than under any depth

so the time at which everything ends with some ranks open bounds every way to fix them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from planner.errors import InputError
from planner.schedules import Action, Letter, Order, Placement, Schedule, ScheduleName, build
from planner.search.bound import Endings, most_in_flight
from planner.simulate import Timeline, Walk, simulate
from planner.simulate.greedy import Rule, Turn, greedy
from planner.simulate.memory import resident_bytes

Depths = tuple[int, ...]
_EQUAL: Final = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """A warm-up and the iteration that the time model gives it, memory included."""

    iteration_s: float
    depths: Depths
    timeline: Timeline


class Depths1F1B:
    """The depths of one job with one stage a rank; orders and times are made once each.

    ``spent``: simulated actions so far, the measure of effort that limits every search here.
    """

    def __init__(self, walk: Walk, limit_bytes: int | None) -> None:
        self.walk: Final = walk
        self.job: Final = walk.job
        self.limit_bytes: Final = limit_bytes
        self.most: Final = tuple(most_in_flight(walk.job, stage) for stage in walk.job.stages)
        self.endings: Final = Endings(walk.job)
        self.spent = 0
        self._orders: dict[tuple[int, int], Order] = {}
        self._times: dict[Depths, float] = {}

    def schedule(self, depths: Depths) -> Schedule:
        """1F1B at these depths."""
        return tuple(self._order(rank, depth) for rank, depth in enumerate(depths))

    def _order(self, rank: int, depth: int) -> Order:
        if (rank, depth) not in self._orders:
            made = build(
                ScheduleName.ONE_F_ONE_B,
                num_ranks=1,
                virtual=1,
                num_microbatches=self.job.num_microbatches,
                placement=Placement.LOOP,
                warmup=(depth,),
            )[0]
            self._orders[rank, depth] = tuple(Action(rank, letter, m) for _, letter, m in made)
        return self._orders[rank, depth]

    def seconds(self, depths: Depths) -> float:
        """The iteration at these depths; infinite where memory does not hold so many, or ranks wait for ever."""
        if depths not in self._times:
            fits = all(depth <= most for depth, most in zip(depths, self.most, strict=True))
            if fits:
                self.spent += 2 * self.job.num_microbatches * len(depths)
                try:
                    self._times[depths] = simulate(self.walk, self.schedule(depths), memory=False).iteration_s
                except InputError:  # a rank that waits for more forwards than the one before it lets out
                    self._times[depths] = math.inf
            else:
                self._times[depths] = math.inf
        return self._times[depths]

    def timed(self, depths: Depths) -> Timed | None:
        """The whole timeline at these depths; None where it does not fit, messages included."""
        if not math.isfinite(self.seconds(depths)):
            return None
        self.spent += 6 * self.job.num_microbatches * len(depths)
        timeline = simulate(self.walk, self.schedule(depths))
        if self.limit_bytes is not None and max(use.peak_memory_bytes for use in timeline.ranks) > self.limit_bytes:
            return None
        return Timed(iteration_s=timeline.iteration_s, depths=depths, timeline=timeline)

    # --- start and climb ----------------------------------------------------------------------------------------------

    def starts(self) -> list[Depths]:
        """Where climbs begin: the default, each rank's round trip over its pace with some slack, and all at once."""
        count, ranks = self.job.num_microbatches, len(self.most)
        trips, pace = self._round_trips()
        made = [tuple(ranks - rank for rank in range(ranks)), *self._greedy()]
        if pace > 0:
            made += [tuple(math.ceil(trip / pace - _EQUAL) + slack for trip in trips) for slack in (0, 1, 2)]
        made.append((count,) * ranks)
        made.append((1,) * ranks)
        capped = (tuple(max(1, min(d, count, m)) for d, m in zip(depths, self.most, strict=True)) for depths in made)
        return list(dict.fromkeys(capped))

    def _greedy(self) -> Iterator[Depths]:
        """The warm-ups of orders that never wait: a backward where one is ready, else a forward."""
        limit = self.limit_bytes
        budgets = tuple(
            None if limit is None else limit - resident_bytes(self.job, rank) for rank in range(len(self.most))
        )
        for alternate in (False, True):
            self.spent += 16 * self.job.num_microbatches * len(self.most)
            rule = Rule(split=False, turn=Turn.DEEPEST, alternate=alternate, patience=0.0, budget_bytes=budgets)
            order = greedy(self.walk, rule)
            if order is not None:
                yield tuple(
                    next(place for place, action in enumerate(row) if action.letter is not Letter.FORWARD)
                    for row in order
                )

    def _round_trips(self) -> tuple[list[float], float]:
        """Per rank the seconds from F's start to B's end of a lone micro-batch; and the slowest rank's load."""
        lone = self.walk.run(_lone(len(self.most)))
        trips = [lone.ends_s[rank][1] - lone.starts_s[rank][0] for rank in range(len(self.most))]
        pace = max(cost.forward_s + cost.backward_s for cost in self.walk.durations)
        return trips, pace

    def climb(self, target_s: float, effort: int) -> Timed | None:
        """The best depths found that fit: from every start, downhill until nothing near is faster.

        Ends early at ``target_s`` (a bound), or after about ``effort`` simulated actions.
        """
        until = self.spent + effort
        best: Timed | None = None
        for start in sorted(self.starts(), key=lambda depths: (self.seconds(depths), depths)):
            found = self._downhill(start, target_s, until)
            if found is not None and (best is None or _less(found.iteration_s, best.iteration_s)):
                best = found
            if (best is not None and best.iteration_s <= target_s * (1 + _EQUAL)) or self.spent > until:
                break
        return best

    def _downhill(self, depths: Depths, target_s: float, until: int) -> Timed | None:
        best = self.timed(depths)
        moved = best is not None
        while moved and self.spent <= until:
            moved = False
            for near in self._near(depths):
                if self.spent > until or self.seconds(depths) <= target_s * (1 + _EQUAL):
                    break
                if _less(self.seconds(near), self.seconds(depths)):
                    found = self.timed(near)
                    if found is not None:
                        best, depths, moved = found, near, True
        return best

    def _near(self, depths: Depths) -> Iterator[Depths]:
        """One and two more or fewer on one rank, one more or fewer on a run of ranks from either end."""
        ranks = len(depths)
        changes = [(rank, rank + 1, by) for rank in range(ranks) for by in (1, -1, 2, -2)]
        changes += [(0, rank, by) for rank in range(2, ranks + 1) for by in (1, -1)]
        changes += [(rank, ranks, by) for rank in range(1, ranks - 1) for by in (1, -1)]
        for low, high, by in changes:
            moved = [depth + by if low <= rank < high else depth for rank, depth in enumerate(depths)]
            if all(1 <= d <= min(m, self.job.num_microbatches) for d, m in zip(moved, self.most, strict=True)):
                yield tuple(moved)

    # --- proof --------------------------------------------------------------------------------------------------------

    def none_faster(self, below_s: float, effort: int, found: Callable[[Timed], float]) -> bool:
        """Whether it is proven that no depths that fit are faster than ``below_s``.

        Whatever fits and is faster goes to ``found``, which says what has to be beaten from then on. False where the
        effort (simulated actions) runs out.
        """
        until = self.spent + effort
        tails = self._tails()
        limit = below_s
        stack: list[tuple[int, Depths]] = [(len(self.most), ())]  # ranks from the last one on are fixed
        while stack:
            if self.spent > until:
                return False
            rank, fixed = stack.pop()
            if self._bound(rank, fixed, tails) >= limit * (1 - _EQUAL):
                continue
            if rank:
                deepest = min(self.most[rank - 1], self.job.num_microbatches)
                stack += [(rank - 1, (depth, *fixed)) for depth in range(deepest, 0, -1)]
            elif _less(self.seconds(fixed), limit):
                timed = self.timed(fixed)
                if timed is not None:
                    limit = min(limit, found(timed))
        return True

    def _tails(self) -> list[float]:
        """Per rank the least time from the end of its last B to the end of the iteration."""
        tails = list(self.endings.post_s)
        for rank, given in enumerate(self.walk.returns):
            delays = [(low, 0.0) for low in given.at_once]
            delays += [(parcel.to_stage, parcel.busy_s + parcel.latency_s) for parcel in given.parcels]
            for low, delay_s in delays:
                tails[rank] = max(tails[rank], delay_s + self._backward_s(low) + tails[low])
        return tails

    def _backward_s(self, stage: int) -> float:
        """How long a B of a stage keeps its rank."""
        return self.walk.durations[stage].backward_s + self.walk.returns[stage].added_s

    @cached_property
    def _side_by_side(self) -> tuple[list[Order], list[Order]]:
        """All forwards of each rank, and all backwards."""

        def each(letter: Letter) -> list[Order]:
            microbatches = range(self.job.num_microbatches)
            return [tuple(Action(rank, letter, m) for m in microbatches) for rank in range(len(self.most))]

        return each(Letter.FORWARD), each(Letter.BACKWARD)

    def _bound(self, rank: int, fixed: Depths, tails: Sequence[float]) -> float:
        """No choice of depths for the ranks below ``rank`` ends sooner."""
        count = self.job.num_microbatches
        forwards, backwards = self._side_by_side[0][:rank], self._side_by_side[1][:rank]
        orders = [self._order(rank + place, depth) for place, depth in enumerate(fixed)]
        self.spent += 2 * count * len(self.most)
        try:
            walked = self.walk.run((*forwards, *orders, *backwards))
        except InputError:
            return math.inf
        lasts = [0.0] * len(self.most)
        for r in range(rank):
            load = walked.ends_s[r][0] - walked.starts_s[r][0] + self._backward_s(r)
            lasts[r] = walked.starts_s[r][0] + count * load
        backwards_of = [*range(rank, len(self.most)), *range(rank)]
        for r, ends in zip(backwards_of, walked.ends_s[rank:], strict=True):
            lasts[r] = max(lasts[r], ends[-1])
        through = max(last + tail for last, tail in zip(lasts, tails, strict=True))
        return max(through, self.endings.iteration_s(lasts))


def _lone(ranks: int) -> Schedule:
    """One micro-batch through the pipeline and back."""
    return tuple((Action(rank, Letter.FORWARD, 0), Action(rank, Letter.BACKWARD, 0)) for rank in range(ranks))


def _less(one: float, other: float) -> bool:
    return one < other * (1 - _EQUAL)
