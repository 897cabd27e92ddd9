"""What ends an iteration: the replicas' all-reduce, the sums of tied parameters, the optimizer's step.

all-reduce of n bytes over D replicas   2(D-1) · latency + 2(D-1)/D · n / bandwidth
half of that each for a reduce-scatter and an all-gather, which take its place where the optimizer is sharded (ZeRO-1)
tied parameter of n gradient bytes      latency + n / bandwidth for each hop between ranks, down and back
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from planner.cluster import ring_link
from planner.schedules.action import Letter, Schedule
from planner.simulate.costs import Links
from planner.simulate.job import Job, Tie
from planner.simulate.timeline import Closing, ClosingKind


def closings(job: Job, schedule: Schedule, ends_s: list[list[float]]) -> tuple[Closing, ...]:
    """All that each rank does beside and after its actions, in the order in which it is settled."""
    found: list[Closing] = []
    done = [ended[-1] if ended else 0.0 for ended in ends_s]
    share, kind = (0.5, ClosingKind.REDUCE_SCATTER) if job.zero1 else (1.0, ClosingKind.ALL_REDUCE)
    if job.data > 1:
        counts = Counter(stage.rank for stage in job.stages)
        for rank, order in enumerate(schedule):
            free = 0.0
            for stage, ready in _last_backwards(order, ends_s[rank], counts[rank]):
                seconds = share * all_reduce_s(job, stage)
                start, free = max(free, ready), max(free, ready) + seconds
                found.append(Closing(rank, kind, str(stage), start, free))
            done[rank] = max(done[rank], free)
    links = Links(job)
    for tie in sorted(job.ties, key=lambda tie: tie.name):
        ranks = {job.stages[stage].rank for stage in tie.stages}
        if tie.trainable and len(ranks) > 1:
            start = max(done[rank] for rank in ranks)
            for rank in sorted(ranks):
                done[rank] = start + tied_sum_s(job, tie, links)
                found.append(Closing(rank, ClosingKind.TIED, tie.name, start, done[rank]))
    for rank in range(job.num_ranks):
        seconds = trainable_bytes(job, rank) * job.step_s_per_trainable_byte
        if seconds:
            found.append(Closing(rank, ClosingKind.OPTIMIZER, "", done[rank], done[rank] + seconds))
        if job.zero1 and job.data > 1:
            start = done[rank] + seconds
            gather_s = share * sum(all_reduce_s(job, k) for k, stage in enumerate(job.stages) if stage.rank == rank)
            found.append(Closing(rank, ClosingKind.ALL_GATHER, "", start, start + gather_s))
    return tuple(found)


def all_reduce_s(job: Job, stage: int) -> float:
    """Seconds of the all-reduce of one stage's gradients over its replicas; 0 where nothing is trained."""
    link = ring_link(job.stages[stage].rank, data=job.data, tensor=job.tensor, cluster=job.cluster)
    size = job.stages[stage].trainable_bytes * job.gradient_bytes_per_trainable_byte
    if link is None or not size or job.data == 1:
        return 0.0
    hops = 2 * (job.data - 1)
    return hops * link.latency_s + hops / job.data * size / link.bandwidth_bytes_per_s


def tied_sum_s(job: Job, tie: Tie, links: Links) -> float:
    """Seconds to sum a tied parameter's gradients down its stages, last to first, and to send the sum back."""
    size = tie.bytes * job.gradient_bytes_per_trainable_byte
    seconds = 0.0
    for low, high in pairwise(job.stages[stage].rank for stage in sorted(tie.stages)):
        for link in (links.between(high, low), links.between(low, high)) if low != high else ():
            seconds += link.latency_s + size / link.bandwidth_bytes_per_s if link else 0.0
    return seconds


def trainable_bytes(job: Job, rank: int) -> int:
    """Bytes that a rank's optimizer steps: a parameter tied within the rank once."""
    own = sum(stage.trainable_bytes for stage in job.stages if stage.rank == rank)
    return own - sum(tie.bytes * _repeats(job, tie, rank) for tie in job.ties if tie.trainable)


def parameter_bytes(job: Job, rank: int) -> int:
    """Bytes of a rank's parameters: one tied within the rank once."""
    own = sum(stage.parameter_bytes for stage in job.stages if stage.rank == rank)
    return own - sum(tie.bytes * _repeats(job, tie, rank) for tie in job.ties)


def _repeats(job: Job, tie: Tie, rank: int) -> int:
    """How many of a tied parameter's stages on a rank find it there already."""
    return max(0, sum(job.stages[stage].rank == rank for stage in tie.stages) - 1)


def _last_backwards(
    order: tuple[tuple[int, Letter, int], ...], ended: list[float], stages: int
) -> list[tuple[int, float]]:
    """The ``stages`` stages of a rank and the end of the last B or W of each, in the order in which they end."""
    found: dict[int, float] = {}
    for position in range(len(order) - 1, -1, -1):
        stage, letter, _ = order[position]
        if letter is Letter.BACKWARD or letter is Letter.BACKWARD_WEIGHT:
            found.setdefault(stage, ended[position])
            if len(found) == stages:
                break
    return list(reversed(found.items()))
