"""Interleaved 1F1B (Narayanan et al., 2021): 1F1B with v stages a rank, for any M and any warm-up depth.

    P=2, v=2, M=4, warm-up 5 3   rank 0: 0F0 0F1 2F0 2F1         0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1     2B2     2B3     ...
                                 rank 1:     1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3     1B2     1B3

A rank takes its stages in rounds of g = min(P, M) micro-batches: the round through its lowest stage, then through the
next, ...; backwards the same, highest stage first. Where M is no multiple of P, the last round keeps the places of a
whole one, and the micro-batches that there are not are left out: that keeps the ranks in step.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from planner.schedules.action import Action, Letter, Order, Schedule

_Places = list[tuple[int, int]]


def interleaved_1f1b(num_ranks: int, virtual: int, num_microbatches: int, warmup: Sequence[int]) -> Schedule:
    """On rank r ``warmup[r]`` forwards, then a backward and a forward in turn, then the backwards that remain."""
    size = min(num_ranks, num_microbatches)
    places = -(-num_microbatches // size) * size

    def order(rank: int) -> Order:
        forwards, backwards = in_rounds(rank, num_ranks, virtual, places)
        there_before = [0, *accumulate(m < num_microbatches for _, m in forwards)]
        forwards = [(stage, m) for stage, m in forwards if m < num_microbatches]
        behind = _needed(forwards, num_ranks, max(warmup))
        actions: list[Action] = []
        done = 0
        for turn, (stage, m) in enumerate(backwards):
            if m < num_microbatches:
                in_step = there_before[min(warmup[rank] + turn, len(there_before) - 1)]
                ahead = max(warmup[rank], in_step, behind if turn >= size else 0)
                actions += [Action(below, Letter.FORWARD, n) for below, n in forwards[done:ahead]]
                done = max(done, ahead)
                actions.append(Action(stage, Letter.BACKWARD, m))
        return tuple(actions)

    return tuple(map(order, range(num_ranks)))


def _needed(forwards: _Places, num_ranks: int, depth: int) -> int:
    """How many of its forwards a rank must have run before it may wait for a rank that first runs ``depth`` of its own.

    Forwards i of all ranks are of the same chunk and micro-batch; those above the lowest chunk need the chunk below.
    """
    at = {place: count for count, place in enumerate(forwards, start=1)}
    return max((at.get((stage - num_ranks, m), 0) for stage, m in forwards[:depth]), default=0)


def in_rounds(rank: int, num_ranks: int, virtual: int, num_microbatches: int) -> tuple[_Places, _Places]:
    """A rank's (stage, micro-batch) pairs, in the order of its forwards and in that of its backwards."""
    size = min(num_ranks, num_microbatches)
    rounds = [range(first, min(first + size, num_microbatches)) for first in range(0, num_microbatches, size)]
    stages = [rank + chunk * num_ranks for chunk in range(virtual)]
    forwards = [(stage, m) for microbatches in rounds for stage in stages for m in microbatches]
    backwards = [(stage, m) for microbatches in rounds for stage in reversed(stages) for m in microbatches]
    return forwards, backwards


def default_depths(num_ranks: int, virtual: int, num_microbatches: int) -> tuple[int, ...]:
    """Forwards before rank r's first B: 2(P-1-r) + (v-1)g + 1 with g = min(P, M), at most v·M."""
    size = min(num_ranks, num_microbatches)
    hops = range(num_ranks - 1, -1, -1)
    return tuple(min(2 * hop + (virtual - 1) * size + 1, virtual * num_microbatches) for hop in hops)
