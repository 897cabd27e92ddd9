"""What each kind of action costs under the time model, and what it hands over: the one place that says so.

    F = forward_s            B = I + W          a stage that recomputes adds forward_s to B or I
    I = backward_input_s     W = backward_weight_s      split_s, where a profile tells it, lengthens I

A stage that returns nothing has nothing to hand over: its I takes no time, its W does all of the backward.
"""

from __future__ import annotations

from collections.abc import Iterator

from planner.cluster import Link, link_between
from planner.graph.stage import Stage, Transfer
from planner.record import record
from planner.simulate.job import Job


@record
class Durations:
    """Seconds of one action of each letter, without messages; ``split_s``: the part of I that B has not."""

    forward_s: float
    backward_s: float
    backward_input_s: float
    backward_weight_s: float
    split_s: float


def durations(stage: Stage) -> Durations:
    """How long a stage's actions take, its recomputing included."""
    again = stage.forward_s if stage.recompute else 0.0
    whole = stage.backward_input_s + stage.backward_weight_s + again
    returns, split_s = bool(stage.returns), stage.split_s or 0.0
    return Durations(
        forward_s=stage.forward_s,
        backward_s=whole,
        backward_input_s=stage.backward_input_s + split_s + again if returns else 0.0,
        backward_weight_s=stage.backward_weight_s if returns else whole,
        split_s=split_s if returns else 0.0,
    )


@record
class Parcel:
    """A message between ranks that takes time: it keeps its link busy, and arrives ``latency_s`` after it left.

    ``riders``: stages of the same rank whose entry of 0 bytes arrives with it.
    """

    to_stage: int
    to_rank: int
    bytes: int
    busy_s: float
    latency_s: float
    riders: tuple[int, ...]


@record
class Handover:
    """What one kind of action hands over when it ends: ``at_once`` to some stages, the rest over links, in order."""

    at_once: tuple[int, ...]
    parcels: tuple[Parcel, ...]
    added_s: float
    """How much longer the action lasts for its messages (where transfers do not overlap with compute)."""

    def arrivals(self, end_s: float) -> Iterator[tuple[int, float]]:
        """The stages that get something of an action that ends then, and when it is there where links are free."""
        for goal in self.at_once:
            yield goal, end_s
        for parcel in self.parcels:
            for goal in (parcel.to_stage, *parcel.riders):
                yield goal, end_s + parcel.busy_s + parcel.latency_s


class Links:
    """The links between a job's ranks, each looked up once."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._found: dict[tuple[int, int], Link | None] = {}

    def between(self, sender: int, receiver: int) -> Link | None:
        """The link that counts between two pipeline ranks; None: free."""
        pair = (sender, receiver)
        if pair not in self._found:
            job = self._job
            self._found[pair] = link_between(*pair, data=job.data, tensor=job.tensor, cluster=job.cluster)
        return self._found[pair]


def handover(stage: Stage, transfers: tuple[Transfer, ...], job: Job, links: Links) -> Handover:
    """How the entries of ``sends`` or ``returns`` of a stage travel."""
    at_once: list[int] = []
    over_links: list[tuple[Transfer, int, Link]] = []
    waiting: list[tuple[int, int]] = []
    for entry in transfers:
        goal = job.stages[entry.to_stage].rank
        link = None if goal == stage.rank else links.between(stage.rank, goal)
        if link is None:
            at_once.append(entry.to_stage)
        elif entry.bytes:
            over_links.append((entry, goal, link))
        else:
            waiting.append((entry.to_stage, goal))
    last = {goal: row for row, (_, goal, _) in enumerate(over_links)}
    parcels = [
        Parcel(
            to_stage=entry.to_stage,
            to_rank=goal,
            bytes=entry.bytes,
            busy_s=entry.bytes / link.bandwidth_bytes_per_s,
            latency_s=link.latency_s,
            riders=tuple(rider for rider, to_rank in waiting if to_rank == goal and last[goal] == row),
        )
        for row, (entry, goal, link) in enumerate(over_links)
    ]
    at_once += [rider for rider, goal in waiting if goal not in last]
    if job.cluster.overlap is False:
        added = sum(parcel.latency_s + parcel.busy_s for parcel in parcels)
        return Handover(at_once=tuple(entry.to_stage for entry in transfers), parcels=(), added_s=added)
    return Handover(at_once=tuple(at_once), parcels=tuple(parcels), added_s=0.0)
