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
from itertools import chain
from typing import Final

from planner.errors import InputError
from planner.schedules import Action, Letter, Order, Schedule
from planner.search.bound import Endings, most_in_flight
from planner.simulate import Walk, simulate
from planner.simulate.greedy import Rule, Turn, greedy
from planner.simulate.memory import resident_bytes

Depths = tuple[int, ...]
_EQUAL: Final = 1e-9
_GREEDY_MOST: Final = 40_000
"""Micro-batches times ranks up to which greedy orders are made: they take as long as eight simulations each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """A warm-up and the iteration that the time model gives it; it fits, messages included."""

    iteration_s: float
    depths: Depths


class Depths1F1B:
    """The depths of one job with one stage a rank.

    ``spent``: simulated actions so far, the measure of effort that limits every search here.
    """

    def __init__(self, walk: Walk, limit_bytes: int | None) -> None:
        self.walk: Final = walk
        self.job: Final = walk.job
        self.limit_bytes: Final = limit_bytes
        self.most: Depths = tuple(most_in_flight(walk.job, stage) for stage in walk.job.stages)
        self.endings: Final = Endings(walk.job)
        self.spent = 0
        self._times: dict[Depths, float] = {}
        count, ranks = self.job.num_microbatches, range(len(self.most))
        self._forwards: Final[list[Order]] = [
            tuple(Action(rank, Letter.FORWARD, m) for m in range(count)) for rank in ranks
        ]
        self._backwards: Final[list[Order]] = [
            tuple(Action(rank, Letter.BACKWARD, m) for m in range(count)) for rank in ranks
        ]

    def schedule(self, depths: Depths) -> Schedule:
        """1F1B at these depths, as planner.schedules builds it."""
        return tuple(self._order(rank, depth) for rank, depth in enumerate(depths))

    def _order(self, rank: int, depth: int) -> Order:
        """The forwards of the warm-up, backwards and forwards in turn, the backwards that remain."""
        forwards, backwards = self._forwards[rank], self._backwards[rank]
        in_turn = chain.from_iterable(zip(backwards, forwards[depth:], strict=False))
        return (*forwards[:depth], *in_turn, *backwards[len(forwards) - depth :])

    def seconds(self, depths: Depths) -> float:
        """The iteration at these depths; infinite where memory does not hold so many, or ranks wait for ever."""
        if any(depth > most for depth, most in zip(depths, self.most, strict=True)):
            return math.inf
        if depths not in self._times:
            self.spent += 2 * self.job.num_microbatches * len(depths)
            try:
                self._times[depths] = simulate(self.walk, self.schedule(depths), memory=False).iteration_s
            except InputError:  # a rank that waits for more forwards than the one before it lets out
                self._times[depths] = math.inf
        return self._times[depths]

    def timed(self, depths: Depths) -> Timed | None:
        """The time at these depths; None where they do not fit, messages included."""
        if not math.isfinite(self.seconds(depths)) or any(self._over(depths)):
            return None
        return Timed(iteration_s=self.seconds(depths), depths=depths)

    def _over(self, depths: Depths) -> list[bool]:
        """Which ranks' peaks are over the limit."""
        if self.limit_bytes is None:
            return []
        self.spent += 4 * self.job.num_microbatches * len(depths)
        timeline = simulate(self.walk, self.schedule(depths), levels=False)
        return [use.peak_memory_bytes > self.limit_bytes for use in timeline.ranks]

    # --- start and climb ----------------------------------------------------------------------------------------------

    def starts(self, *, few: bool = False) -> list[Depths]:
        """Where climbs begin: the default, each rank's round trip over its pace with some slack, and all at once.

        ``few``: the default and the round trips alone.
        """
        count, ranks = self.job.num_microbatches, len(self.most)
        trips, pace = self._round_trips()
        made = [tuple(ranks - rank for rank in range(ranks)), *(() if few else self._greedy())]
        if pace > 0:
            slacks = (1,) if few else (0, 1, 2)
            made += [tuple(math.ceil(trip / pace - _EQUAL) + slack for trip in trips) for slack in slacks]
        if not few:
            made += [(count,) * ranks, (1,) * ranks]
        capped = (tuple(max(1, min(d, count, m)) for d, m in zip(depths, self.most, strict=True)) for depths in made)
        return list(dict.fromkeys(capped))

    def _greedy(self) -> Iterator[Depths]:
        """The warm-ups of orders that never wait: a backward where one is ready, else a forward."""
        limit = self.limit_bytes
        budgets = tuple(
            None if limit is None else limit - resident_bytes(self.job, rank) for rank in range(len(self.most))
        )
        if self.job.num_microbatches * len(self.most) > _GREEDY_MOST:
            return
        for alternate in (False, True):
            self.spent += 20 * self.job.num_microbatches * len(self.most)
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
        """The best depths found that fit: from the best starts, downhill until nothing near is faster.

        Ends early at ``target_s`` (a bound), or after about ``effort`` simulated actions. Where messages take the
        memory that the depths found would need, their ranks get less, and the climb begins anew.
        """
        whole = self.most
        try:
            while True:
                best = self._climbed(target_s, self.spent + effort)
                over = self._over(best) if best is not None else []
                if best is None or not any(over):
                    return Timed(iteration_s=self.seconds(best), depths=best) if best is not None else None
                self.most = tuple(
                    min(most, depth - 1) if beyond else most
                    for most, depth, beyond in zip(self.most, best, over, strict=True)
                )
                if min(self.most) < 1:
                    return None
        finally:
            self.most = whole

    def _climbed(self, target_s: float, until: int) -> Depths | None:
        best: Depths | None = None
        for start in sorted(self.starts(few=until <= self.spent), key=lambda depths: (self.seconds(depths), depths)):
            found = self._downhill(start, target_s, until)
            if self._allowed(found) and (best is None or _less(self.seconds(found), self.seconds(best))):
                best = found
            if (best is not None and self.seconds(best) <= target_s * (1 + _EQUAL)) or self.spent > until:
                break
        return best

    def _allowed(self, depths: Depths) -> bool:
        """Whether the depths come to an end within what each rank may hold now."""
        within = all(depth <= most for depth, most in zip(depths, self.most, strict=True))
        return within and math.isfinite(self.seconds(depths))

    def _downhill(self, depths: Depths, target_s: float, until: int) -> Depths:
        moved = math.isfinite(self.seconds(depths))
        while moved:
            moved = False
            for near in self._near(depths):
                if self.spent > until or self.seconds(depths) <= target_s * (1 + _EQUAL):
                    return depths
                if _less(self.seconds(near), self.seconds(depths)):
                    depths, moved = near, True
        return depths

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

    def trimmed(self, depths: Depths, effort: int) -> Depths:
        """Depths that are as fast, and hold less: one less on a rank, as long as that costs nothing."""
        until, most_s, made = self.spent + effort, self.seconds(depths) * (1 + _EQUAL), depths
        for rank in range(len(made)):
            while made[rank] > 1 and self.spent <= until:
                less = (*made[:rank], made[rank] - 1, *made[rank + 1 :])
                if self.seconds(less) > most_s:
                    break
                made = less
        return depths if any(self._over(made)) else made

    # --- proof --------------------------------------------------------------------------------------------------------

    def none_faster(
        self, below_s: float, effort: int, found: Callable[[Timed], float], pulse: Callable[[], None]
    ) -> bool:
        """Whether it is proven that no depths that fit are faster than ``below_s``.

        Whatever fits and is faster goes to ``found``, which says what has to be beaten from then on. ``pulse`` is
        called now and then, and may raise. False where the effort (simulated actions) runs out.
        """
        until = self.spent + effort
        tails = self._tails()
        limit = below_s
        stack: list[tuple[int, Depths]] = [(len(self.most), ())]  # ranks from the last one on are fixed
        while stack:
            if self.spent > until:
                return False
            rank, fixed = stack.pop()
            pulse()
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

    def _bound(self, rank: int, fixed: Depths, tails: Sequence[float]) -> float:
        """No choice of depths for the ranks below ``rank`` ends sooner."""
        count = self.job.num_microbatches
        forwards, backwards = self._forwards[:rank], self._backwards[:rank]
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
