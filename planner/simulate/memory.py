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
import numpy.typing as npt

from planner.graph.stage import Stage
from planner.schedules.action import Action, Letter, Order, Schedule
from planner.simulate.closing import parameter_bytes, trainable_bytes
from planner.simulate.job import Job
from planner.simulate.timeline import Level, Passage
from planner.simulate.walk import Walk, Walked

_ONE_INSTANT = 1e-9

_Hold = tuple[float, float, int]
"""From, until, bytes."""

_Holds = tuple[npt.NDArray[np.float64], npt.NDArray[np.float64], int]
"""The same for every micro-batch of a stage."""

_FORWARD, _BACK, _WEIGHT = Letter.FORWARD, Letter.BACKWARD, Letter.BACKWARD_WEIGHT
_ROWS = {_FORWARD: 0, _BACK: 1, Letter.BACKWARD_INPUT: 1, _WEIGHT: 2}
"""Where the times of each letter stand: a micro-batch of a stage has either a B or an I."""


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


def peaks(walk: Walk, schedule: Schedule, walked: Walked, iteration_s: float) -> list[int]:
    """The largest of ``levels`` on every rank, several times faster: what is alike for all micro-batches at once."""
    job, times = walk.job, _Times(walk, schedule, walked)
    holds: list[list[_Holds]] = [[] for _ in range(job.num_ranks)]
    for stage in job.stages:
        holds[stage.rank] += _held_by_stage(stage, times)
        for forward, given in ((True, walk.sends), (False, walk.returns)):
            handed = times.ends[_FORWARD if forward else _BACK, stage.stage]
            entries = stage.sends if forward else stage.returns
            parcels = {parcel.to_stage: (place, parcel) for place, parcel in enumerate(given[stage.stage].parcels)}
            for entry in entries:
                to_rank = job.stages[entry.to_stage].rank
                if to_rank == stage.rank or not entry.bytes:
                    continue
                left = handed
                if entry.to_stage in parcels:
                    place, parcel = parcels[entry.to_stage]
                    left = np.array(walked.arrivals_s[forward, stage.stage, place]) - parcel.latency_s
                taken = times.starts[_FORWARD if forward else _BACK, entry.to_stage]
                holds[stage.rank].append((handed, left, entry.bytes))
                holds[to_rank].append((left, taken, entry.bytes))
    return [resident_bytes(job, rank) + _most(held, iteration_s) for rank, held in enumerate(holds)]


class _Times:
    """Start and end of every action by letter and stage, an entry for each micro-batch; _BACK: of its B or I.

    ``split[stage]``: the micro-batches with I and W: a schedule may have both kinds.
    """

    def __init__(self, walk: Walk, schedule: Schedule, walked: Walked) -> None:
        stages, count = len(walk.job.stages), walk.job.num_microbatches
        self._starts = np.zeros((3, stages, count))
        self._ends = np.zeros((3, stages, count))
        split = np.zeros((stages, count), dtype=np.bool_)
        for order, begun, ended in zip(schedule, walked.starts_s, walked.ends_s, strict=True):
            if not order:
                continue
            stage, letters, microbatch = zip(*order, strict=True)
            row = [_ROWS[letter] for letter in letters]
            place = (np.array(row), np.array(stage), np.array(microbatch))
            self._starts[place] = begun
            self._ends[place] = ended
            weights = place[0] == _ROWS[Letter.BACKWARD_WEIGHT]
            split[place[1][weights], place[2][weights]] = True
        self.split = [np.flatnonzero(own) for own in split]
        self.starts = {(key, stage): self._starts[row, stage] for key, row in _ROWS.items() for stage in range(stages)}
        self.ends = {(key, stage): self._ends[row, stage] for key, row in _ROWS.items() for stage in range(stages)}


def _held_by_stage(stage: Stage, times: _Times) -> Iterator[_Holds]:
    """What a stage holds for its micro-batches, and while it runs."""
    number, split = stage.stage, times.split[stage.stage]
    back, weight = (_BACK, number), (_WEIGHT, number)
    for key in ((_FORWARD, number), back):
        yield times.starts[key], times.ends[key], stage.workspace_bytes
    if len(split):
        yield times.starts[weight][split], times.ends[weight][split], stage.workspace_bytes
    begun, last_start, last_end = times.starts[_FORWARD, number], times.starts[back], times.ends[back]
    if len(split) and stage.returns:
        yield last_end[split], times.ends[weight][split], stage.saved_for_weight_bytes
    elif len(split):
        last_start, last_end = last_start.copy(), last_end.copy()
        last_start[split], last_end[split] = times.starts[weight][split], times.ends[weight][split]
    if stage.recompute:
        yield begun, last_start, stage.input_bytes
        begun = last_start
    yield begun, last_end, stage.saved_bytes


def _most(holds: list[_Holds], iteration_s: float) -> int:
    """The largest sum of holds at an instant; no less than nothing."""
    holds = [hold for hold in holds if hold[2]]
    if not holds:
        return 0
    begin, end = np.concatenate([hold[0] for hold in holds]), np.concatenate([hold[1] for hold in holds])
    size = np.concatenate([np.full(len(hold[0]), hold[2], dtype=np.int64) for hold in holds])
    times, change = np.concatenate([begin, np.maximum(begin, end)]), np.concatenate([size, -size])
    order = times.argsort()
    later = np.diff(times[order]) > _ONE_INSTANT * iteration_s
    held = np.cumsum(change[order])  # at one instant all come and go at once: only its last sum counts
    return max(0, int(held[np.append(later, True)].max()))


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
    at, change = _changes(begin, end, np.array([hold[2] for hold in holds], dtype=np.int64), iteration_s)
    held = resident + np.cumsum(change)
    return (Level(0.0, resident), *map(Level, at.tolist(), held.tolist()))


def _changes(
    begin: npt.NDArray[np.float64], end: npt.NDArray[np.float64], size: npt.NDArray[np.int64], iteration_s: float
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """Every instant, and by how much the sum of all holds changes there."""
    times, place = np.unique(np.concatenate([begin, end]), return_inverse=True)
    instant = np.concatenate([[0], np.cumsum(np.diff(times) > _ONE_INSTANT * iteration_s)])
    first, last = instant[place[: len(begin)]], instant[place[len(begin) :]]
    lasts = first < last
    change = np.zeros(instant[-1] + 1, dtype=np.int64)
    np.add.at(change, first[lasts], size[lasts])
    np.subtract.at(change, last[lasts], size[lasts])
    return times[np.searchsorted(instant, np.arange(len(change)))], change
