"""Prediction beside measurement: the iteration, and for each rank its busy time, its peak, the messages it waited for.

    maker   ████ F ████·························
                       │◀── a message ──▶│
    taker   ······(had nothing to do)····████ F ████

A run times actions, not messages. So a message is measured where a rank waited for it: from the end of the action that
made it to the start of the one that takes it in, which had nothing else to wait for; its prediction is that message's.
"""

from __future__ import annotations

from statistics import median

from planner.cluster import link_between
from planner.graph import Stage
from planner.plan import Plan
from planner.record import record
from planner.report.overview import Overview
from planner.runtime.measured import StageSeconds, differences, stages_as_measured
from planner.runtime.recording import RecordedRank, Recording
from planner.schedules import Action, Letter
from planner.simulate import Job, Passage


@record
class Pair:
    """One figure twice; ``off``: how much more was measured, relative; None where nothing was predicted."""

    predicted: float
    measured: float

    @property
    def off(self) -> float | None:
        """E.g. 0.1 where a tenth more was measured."""
        return self.measured / self.predicted - 1 if self.predicted else None


@record
class RankBeside:
    """One pipeline rank. ``message_s``: the median of the ``waited`` messages it waited for; None: for none."""

    rank: int
    busy_s: Pair
    peak_memory_bytes: Pair
    message_s: Pair | None
    waited: int


@record
class Beside:
    """A plan as predicted beside a run of it. ``differences``: where, in sentences."""

    steps: int
    iteration_s: Pair
    samples_per_s: Pair
    bubble_fraction: Pair
    message_s: Pair | None
    ranks: tuple[RankBeside, ...]
    differences: tuple[str, ...]


def beside(shown: Overview, recording: Recording) -> Beside:
    """Lay a recording over the plan that it was made of."""
    plan, predicted = shown.plan, shown.predicted
    waited = _waited(shown, recording)
    ranks = tuple(
        RankBeside(
            rank=use.rank,
            busy_s=Pair(predicted=use.busy_s, measured=busy_s(own)),
            peak_memory_bytes=Pair(predicted=use.peak_memory_bytes, measured=own.peak_memory_bytes),
            message_s=_typical(waited[use.rank]),
            waited=len(waited[use.rank]),
        )
        for use, own in zip(shown.timeline.ranks, recording.ranks, strict=True)
    )
    rate = plan.batch.global_batch / recording.iteration_s if recording.iteration_s else 0.0
    return Beside(
        steps=recording.steps,
        iteration_s=Pair(predicted=predicted.iteration_s, measured=recording.iteration_s),
        samples_per_s=Pair(predicted=predicted.samples_per_s, measured=rate),
        bubble_fraction=Pair(predicted=predicted.bubble_fraction, measured=recording.bubble_fraction),
        message_s=_typical([pair for pairs in waited for pair in pairs]),
        ranks=ranks,
        differences=differences(
            plan, _stages(plan, recording), iteration_s=recording.iteration_s, profile=shown.profile
        ),
    )


def busy_s(rank: RecordedRank) -> float:
    """The time that a rank spent in its actions."""
    return sum(end - start for start, end in zip(rank.starts_s, rank.ends_s, strict=True))


def _typical(pairs: list[Pair]) -> Pair | None:
    if not pairs:
        return None
    return Pair(predicted=median(pair.predicted for pair in pairs), measured=median(pair.measured for pair in pairs))


def _stages(plan: Plan, recording: Recording) -> tuple[StageSeconds, ...]:
    """What each stage's actions took, by the median over micro-batches."""
    told = []
    for rank in recording.ranks:
        rows: dict[str, list[float]] = {}
        for word, start, end in zip(rank.actions.split(), rank.starts_s, rank.ends_s, strict=True):
            rows.setdefault(word.rstrip("0123456789"), []).append(end - start)
        told.append({"rank": rank.rank, "actions": {name: median(row) for name, row in rows.items()}})
    return stages_as_measured(plan, told)


def _waited(shown: Overview, recording: Recording) -> list[list[Pair]]:
    """For each rank, the messages that it had nothing else to do than to wait for."""
    plan, job = shown.plan, shown.job
    spans: dict[Action, tuple[float, float]] = {}
    before: dict[Action, float] = {}  # the end of the action before, on its rank
    for own, order in zip(recording.ranks, shown.timeline.schedule, strict=True):
        last = 0.0
        for action, start, end in zip(order, own.starts_s, own.ends_s, strict=True):
            spans[action], before[action] = (start, end), last
            last = end
    latest: dict[Action, tuple[float, Passage | None]] = {}
    handed = {(message.action, message.to_stage): message for message in shown.timeline.messages}
    for action, (_, end) in spans.items():
        for taker, to_stage in _takers(action, plan.stages, spans):
            if end >= latest.get(taker, (0.0, None))[0]:
                latest[taker] = end, handed.get((action, to_stage))
    found: list[list[Pair]] = [[] for _ in recording.ranks]
    for taker, (made_s, message) in latest.items():
        if message is not None and message.bytes and before[taker] <= made_s <= spans[taker][0]:
            pair = Pair(predicted=_message_s(message, job), measured=spans[taker][0] - made_s)
            found[message.to_rank].append(pair)
    return found


def _takers(
    action: Action, stages: tuple[Stage, ...], spans: dict[Action, tuple[float, float]]
) -> list[tuple[Action, int]]:
    """The actions that need what one made, with their stages."""
    if action.letter is Letter.BACKWARD_WEIGHT:
        return []
    forward, stage = action.letter is Letter.FORWARD, stages[action.stage]
    letters = (Letter.FORWARD,) if forward else (Letter.BACKWARD, Letter.BACKWARD_INPUT)
    takers = []
    for entry in stage.sends if forward else stage.returns:
        for letter in letters:
            taker = Action(entry.to_stage, letter, action.microbatch)
            if taker in spans:
                takers.append((taker, entry.to_stage))
    return takers


def _message_s(message: Passage, job: Job) -> float:
    """How long a message was predicted to take; where transfers do not overlap, they lengthen the action before."""
    if job.cluster.overlap is not False:
        return message.arrived_s - message.handed_s
    link = link_between(message.from_rank, message.to_rank, data=job.data, tensor=job.tensor, cluster=job.cluster)
    return link.latency_s + message.bytes / link.bandwidth_bytes_per_s if link else 0.0
