"""What each rank holds over time.

    always        parameters, gradients, optimizer state, buffers
    F .. B or I   saved_bytes of the stage and micro-batch (a stage that recomputes: input_bytes, and saved_bytes in
                  their place while the action that recomputes runs)
    I .. W        saved_for_weight_bytes (a stage that returns nothing: saved_bytes still)
    messages      at the sender from the action's end until they have left, at the receiver from then until they are
                  taken in
    an action     its stage's workspace, while it runs

At one instant frees come first, and what lasts no time holds nothing. Times within 1e-9 of the iteration are one
instant.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import numpy as np

from planner.graph.stage import Stage
from planner.schedules.action import Action, Letter, Order, Schedule
from planner.simulate.closing import parameter_bytes, trainable_bytes
from planner.simulate.job import Job
from planner.simulate.timeline import Level, Passage
from planner.simulate.walk import Walk, Walked

_ONE_INSTANT = 1e-9

_Hold = tuple[float, float, int]
"""From, until, bytes."""


def passages(walk: Walk, schedule: Schedule, walked: Walked) -> tuple[Passage, ...]:
    """Every message with bytes between two ranks, rank by rank in the order handed over."""
    stages = walk.job.stages
    forwards, backwards = _taken(walk.job, schedule, walked)
    served = {pair: iter(departures[1:]) for pair, departures in walked.departures_s.items()}
    found: list[Passage] = []
    for rank, order in enumerate(schedule):
        for action, end in zip(order, walked.ends_s[rank], strict=True):
            stage, letter, m = action
            if letter is Letter.BACKWARD_WEIGHT:
                continue
            forward = letter is Letter.FORWARD
            taken = forwards if forward else backwards
            parcels = {parcel.to_stage: parcel for parcel in (walk.sends if forward else walk.returns)[stage].parcels}
            for entry in stages[stage].sends if forward else stages[stage].returns:
                to_stage, to_rank = entry.to_stage, stages[entry.to_stage].rank
                if to_rank != rank and entry.bytes:
                    parcel = parcels.get(to_stage)
                    left = next(served[rank, to_rank]) if parcel else end
                    arrived = left + parcel.latency_s if parcel else end
                    found.append(
                        Passage(action, to_stage, rank, to_rank, entry.bytes, end, left, arrived, taken[to_stage][m])
                    )
    return tuple(found)


def levels(
    job: Job, schedule: Schedule, walked: Walked, messages: tuple[Passage, ...], iteration_s: float
) -> tuple[tuple[Level, ...], ...]:
    """What every rank holds over time."""
    holds: list[list[_Hold]] = [
        list(_held_by_actions(job, order, walked.starts_s[rank], walked.ends_s[rank]))
        for rank, order in enumerate(schedule)
    ]
    for message in messages:
        holds[message.from_rank].append((message.handed_s, message.left_s, message.bytes))
        holds[message.to_rank].append((message.left_s, message.taken_s, message.bytes))
    return tuple(_sum(resident_bytes(job, rank), held, iteration_s) for rank, held in enumerate(holds))


def resident_bytes(job: Job, rank: int) -> int:
    """Parameters, gradients (a tied parameter's once per using stage), optimizer state and buffers of a rank."""
    own = [stage for stage in job.stages if stage.rank == rank]
    gradients = sum(stage.trainable_bytes for stage in own) * job.gradient_bytes_per_trainable_byte
    state = trainable_bytes(job, rank) * job.state_bytes_per_trainable_byte
    return parameter_bytes(job, rank) + sum(stage.buffer_bytes for stage in own) + math.ceil(gradients + state)


def held_by(stage: Stage, letter: Letter) -> tuple[int, int]:
    """How much more a rank holds while an action of a stage runs, and after it, than before it (messages aside)."""
    kept = stage.input_bytes if stage.recompute else stage.saved_bytes
    again, workspace = stage.saved_bytes - kept, stage.workspace_bytes
    match letter:
        case Letter.FORWARD:
            return kept + workspace, kept
        case Letter.BACKWARD_INPUT if stage.returns:
            return again + workspace, stage.saved_for_weight_bytes - kept
        case Letter.BACKWARD_WEIGHT if stage.returns:
            return workspace, -stage.saved_for_weight_bytes
        case Letter.BACKWARD_INPUT:
            return workspace, 0
        case _:
            return again + workspace, -kept


def held_in_order(job: Job, order: Iterable[Action]) -> int:
    """The most that a rank's actions hold beyond what it always holds (messages aside), if each lasts some time."""
    held = most = 0
    for stage, letter, _ in order:
        during, after = held_by(job.stages[stage], letter)
        most = max(most, held + during, held + after)
        held += after
    return most


def _taken(job: Job, schedule: Schedule, walked: Walked) -> tuple[list[list[float]], list[list[float]]]:
    """When each stage's F, and its B or I, of each micro-batch starts."""
    forwards = [[0.0] * job.num_microbatches for _ in job.stages]
    backwards = [[0.0] * job.num_microbatches for _ in job.stages]
    for order, begun in zip(schedule, walked.starts_s, strict=True):
        for (stage, letter, m), start in zip(order, begun, strict=True):
            if letter is Letter.FORWARD:
                forwards[stage][m] = start
            elif letter is not Letter.BACKWARD_WEIGHT:
                backwards[stage][m] = start
    return forwards, backwards


def _held_by_actions(job: Job, order: Order, starts_s: list[float], ends_s: list[float]) -> Iterator[_Hold]:
    """What one rank's stages hold for their micro-batches, and while they run."""
    since: dict[tuple[int, int], float] = {}
    for (stage_number, letter, m), start, end in zip(order, starts_s, ends_s, strict=True):
        stage = job.stages[stage_number]
        yield start, end, stage.workspace_bytes
        if letter is Letter.FORWARD:
            since[stage_number, m] = start
        elif letter is Letter.BACKWARD_INPUT and not stage.returns:
            continue
        elif letter is Letter.BACKWARD_WEIGHT and stage.returns:
            yield since[stage_number, m], end, stage.saved_for_weight_bytes
        else:
            kept_since = since[stage_number, m]
            if stage.recompute:
                yield kept_since, start, stage.input_bytes
                kept_since = start
            yield kept_since, end, stage.saved_bytes
            since[stage_number, m] = end


def _sum(resident: int, holds: list[_Hold], iteration_s: float) -> tuple[Level, ...]:
    """The sum of all holds over time, on top of what is always there."""
    holds = [hold for hold in holds if hold[2]]
    if not holds:
        return (Level(0.0, resident),)
    begin, end = np.array([hold[0] for hold in holds]), np.array([hold[1] for hold in holds])
    size = np.array([hold[2] for hold in holds], dtype=np.int64)
    times, place = np.unique(np.concatenate([begin, end]), return_inverse=True)
    instant = np.concatenate([[0], np.cumsum(np.diff(times) > _ONE_INSTANT * iteration_s)])
    first, last = instant[place[: len(holds)]], instant[place[len(holds) :]]
    lasts = first < last
    change = np.zeros(instant[-1] + 1, dtype=np.int64)
    np.add.at(change, first[lasts], size[lasts])
    np.subtract.at(change, last[lasts], size[lasts])
    at = times[np.searchsorted(instant, np.arange(len(change)))]
    held = resident + np.cumsum(change)
    return (Level(0.0, resident), *map(Level, at.tolist(), held.tolist()))
