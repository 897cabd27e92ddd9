"""What bounds a rank of each of some cuts of a chain, where memory is limited: arrays with an entry for each cut.

    start   T >= head(I of ka) + M · (work of the stages up to ka) - the F's of these that memory holds at once
    drain   once the last F of a stage has begun, that micro-batch goes all the way back, and of the others
            the rank has no more left than its memory holds: see planner.search.drain
    both    no sooner than the rank's first I, and what neither is begun before nor left after

Each stage may recompute where that is asked: then it keeps its input alone, and its F's run again. The row of a rank is
the least over who does; what other ranks' choices would add to heads and tails is left out.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np

from planner.search.cut_rows import CutRows
from planner.search.lattice import Bools, Floats

_AN_INSTANT: Final = 1e-6
"""Of the work of a rank: what lasts no longer is not taken to hold anything for sure."""
_MOST_CHOICES: Final = 4
"""Stages of a rank of which all choices of who recomputes are gone through."""


class _Piece(NamedTuple):
    """Work of a micro-batch, and what a rank holds for it (bytes, seconds)."""

    bytes: Floats
    seconds: Floats


def memory_row(cut: CutRows, own: Sequence[int]) -> Floats:
    """The largest row of a rank with these stages, at the choice of who recomputes that makes it least (seconds)."""
    nothing = np.zeros(len(cut.marks))
    if cut.cuts.limit is None or len(own) > _MOST_CHOICES:
        return nothing
    least = nothing + np.inf
    for again in itertools.product(cut.cuts.choices, repeat=len(own)):
        held = _Held(cut, own, again)
        row = nothing
        for one in (*held.loads(), *held.starts(), *held.drains()):
            row = np.maximum(row, one)
        least = np.minimum(least, np.where(held.fits(), row, np.inf))
    return least


class _Held:
    """One rank, and a choice of who recomputes."""

    def __init__(self, cut: CutRows, own: Sequence[int], again: Sequence[bool]) -> None:
        self.cut: Final = cut
        self.own: Final = own
        sums, layers = cut.cuts, cut.cuts.layers
        self.count: Final = sums.count
        self.room: Final[Floats] = float(sums.limit or 0) - cut.fixed_bytes(own)
        self.after: Final = cut.after_rank[sums.rank_of[own[0]]]
        self.kept: Final[list[Floats]] = []
        self.back: Final[list[Floats]] = []  # I and W, and what runs again
        self.pieces: Final[list[list[_Piece]]] = []
        more = sums.choices != (True,)  # else it is in the times already
        for k, recomputes in zip(own, again, strict=True):
            received = layers.ahead_bytes[cut.marks[:, k]]
            saved = cut.between(sums.saved, k) + sums.saved_again[cut.marks[:, k]]
            kept = received if recomputes else saved
            waiting = np.where(cut.returns[k], cut.between(sums.saved_for_weight, k), kept)
            first = cut.input[k] + (cut.forward[k] if recomputes and more else 0.0)
            self.kept.append(kept)
            self.back.append(first + cut.weight[k])
            self.pieces.append(_pieces(kept, first + cut.weight[k], waiting, cut.weight[k]))
        self.most_saved: Final = np.maximum.reduce([cut.between(sums.saved, k) for k in own])

    def fits(self) -> Bools:
        """Whether a rank of one stage holds one micro-batch."""
        if len(self.own) > 1:
            return self.room >= -1
        busy = self.cut.forward[self.own[0]] + self.cut.input[self.own[0]] > 0
        fine: Bools = self.room >= np.where(busy, self.most_saved, 0.0) - 1
        return fine

    def loads(self) -> Iterator[Floats]:
        """What a rank has to do from the head of each of its stages on, with what runs again."""
        works = self.count * np.add.reduce([self.cut.forward[k] for k in self.own])
        works = works + self.count * np.add.reduce(self.back)
        yield self.cut.heads[self.own[0]] + works + self.after

    def _works(self, stages: int) -> Floats:
        """Seconds of all micro-batches in the first so many stages of the rank."""
        each = [self.cut.forward[k] + back for k, back in zip(self.own[:stages], self.back[:stages], strict=True)]
        made: Floats = self.count * np.add.reduce(each)
        return made

    def _first_back(self, stages: int) -> Floats:
        """When the first I of these stages may start."""
        made: Floats = np.minimum.reduce([self.cut.heads_back[k] for k in self.own[:stages]])
        return made

    def _begun(self, stages: int) -> Floats:
        """The most seconds of F before that."""
        return self._most([_Piece(self.kept[at], self.cut.forward[self.own[at]]) for at in range(stages)])

    def starts(self) -> Iterator[Floats]:
        """What is left once a rank's memory is full of what its first F's save."""
        for stages in range(1, len(self.own) + 1):
            yield self._first_back(stages) + self._works(stages) - self._begun(stages) + self.after

    def drains(self) -> Iterator[Floats]:
        """What is done before the last F of a stage, and that micro-batch's way."""
        cut = self.cut
        for place, last in enumerate(self.own):
            instant = _AN_INSTANT * self._works(len(self.own))
            lasts = cut.forward[last] > instant
            follows = cut.forward[last] + cut.tails[last]
            whole = np.ones(len(cut.marks), dtype=np.bool_)
            for stages in range(place + 1, len(self.own) + 1):
                if stages > place + 1:
                    for between in range(self.own[stages - 2] + 1, self.own[stages - 1] + 1):
                        whole = whole & cut.returns[between]
                left = self._works(stages) - self._left(place, stages)
                for start, works in (
                    (cut.heads[self.own[0]], left),
                    (self._first_back(stages), left - self._begun(stages)),
                ):
                    yield np.where(whole & lasts & (works > instant), start + works + follows, 0.0)

    def _left(self, place: int, stages: int) -> Floats:
        """The most seconds of the first so many stages that are left once the last F of one of them has begun."""
        held = [piece for pieces in self.pieces[: place + 1] for piece in pieces]
        if stages > place + 1:  # what a micro-batch that is held there may have before it on its way
            between = [self.cut.forward[k] for k in self.own[place + 1 : stages]]
            ahead = np.add.reduce([*between, *self.back[place + 1 : stages]])
            whole = _Piece(self.kept[place], self.back[place] + ahead)
            held = [piece for pieces in self.pieces[:place] for piece in pieces] + [whole, *self.pieces[place]]
            held += [piece for pieces in self.pieces[place + 1 : stages] for piece in pieces]
        return self._most(held) + self.cut.forward[self.own[place]]

    def _most(self, pieces: Sequence[_Piece]) -> Floats:
        """The most seconds, at most M of each piece, that the rank's room holds at once: a fractional knapsack."""
        size, seconds = np.stack([one.bytes for one in pieces]), np.stack([one.seconds for one in pieces])
        with np.errstate(divide="ignore", invalid="ignore"):
            order = np.argsort(np.where(seconds > 0, size / seconds, np.inf), axis=0, kind="stable")
            made, left = np.zeros(size.shape[1]), np.maximum(self.room, 0.0)
            for place in range(len(pieces)):
                takes = np.take_along_axis(size, order[place : place + 1], axis=0)[0]
                gives = np.take_along_axis(seconds, order[place : place + 1], axis=0)[0]
                many = np.where(takes > 0, np.minimum(self.count, left / takes), self.count)
                many = np.where(gives > 0, many, 0.0)
                made, left = made + many * gives, left - many * takes
        return made


def _pieces(kept: Floats, works: Floats, waiting: Floats, weight: Floats) -> list[_Piece]:
    """What may be left of a micro-batch whose F is done, in a stage: its I and W, or its W alone where that is more."""
    better = weight * kept > works * waiting
    first = _Piece(np.where(better, waiting, kept), np.where(better, weight, works))
    return [first, _Piece(np.where(better, kept - waiting, 0.0), np.where(better, works - weight, 0.0))]
