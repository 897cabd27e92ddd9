"""What a run did, and how far it is from what was predicted."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from planner.plan import schedule_of
from planner.plan.plan import Plan, Predicted
from planner.profile import Profile
from planner.record import Bytes, Index, Seconds, record
from planner.runtime.measured import NEAR, differences, stages_as_measured
from planner.runtime.recording import Recording, recording_of


@record
class StepTime:
    """From the end of the step before, on the last rank to end, to that of this one."""

    iteration_s: Seconds


@record
class RankResult:
    """What one pipeline rank measured: medians over the steps after the first, the largest over its replicas."""

    rank: Index
    busy_s: Seconds
    peak_memory_bytes: Bytes


@record
class Verified:
    """A run beside one process; differences are absolute, of the first steps' losses and of the weights after them.

    ``eager_difference``: of the losses of the captured model and the user's own; None: they draw random numbers apart.
    """

    equal: bool
    loss_difference: float
    largest_weight_difference: float
    eager_difference: float | None = None


@record
class RunResult:
    """What ``pipeplan run --json`` prints."""

    losses: tuple[float | None, ...]
    weights_sha256: str
    steps: tuple[StepTime, ...]
    ranks: tuple[RankResult, ...]
    predicted: Predicted | None = None
    verify: Verified | None = None


@record
class Measured:
    """One iteration as it was, in the words of ``Predicted``: medians over the steps after the first."""

    iteration_s: Seconds
    bubble_fraction: float


@record
class Outcome:
    """A run's result, and what is said about it; ``measured`` is None where no step was left to do.

    ``differences``: a line for each stage that is not as planned. ``recording``: a step, action by action, where that
    was asked for.
    """

    result: RunResult
    measured: Measured | None
    advice: str
    differences: tuple[str, ...] = ()
    recording: Recording | None = None


def outcome_of(
    plan: Plan, told: Sequence[Mapping[str, Any]], *, crowded: bool, profile: Profile | None = None
) -> Outcome:
    """Put together what all processes told, in the order of their global ranks.

    ``crowded``: processes outnumber cores, so that times mean little. ``profile``: the plan's own, where it is there.
    """
    num_steps = len(told[0]["ends"])
    iterations, bubbles = [], []
    begins = [dict(map(tuple, process["begins"])) for process in told]
    ended = 0.0
    for step in range(num_steps):
        start = max(row[step] for row in begins) if step in begins[0] else ended
        ended = max(process["ends"][step] for process in told)
        makespan = max(process["last_actions"][step] for process in told) - start
        iterations.append(ended - start)
        bubbles.append(1 - sum(process["busy"][step] for process in told) / (len(told) * makespan))
    steady = slice(1, None) if num_steps > 1 else slice(None)
    measured = None
    if num_steps:
        measured = Measured(iteration_s=median(iterations[steady]), bubble_fraction=median(bubbles[steady]))
    ranks = []
    for rank in range(plan.parallel.pipeline):
        mine = [process for process in told if process["rank"] == rank]
        ranks.append(
            RankResult(
                rank=rank,
                busy_s=max(median(process["busy"][steady] or [0.0]) for process in mine),
                peak_memory_bytes=max(process["peak_memory_bytes"] for process in mine),
            )
        )
    losses = next(process["losses"] for process in told if process["has_loss"])
    verified = told[0]["verify"]
    result = RunResult(
        losses=tuple(loss if math.isfinite(loss) else None for loss in losses),
        weights_sha256=told[0]["weights_sha256"],
        steps=tuple(StepTime(iteration_s=seconds) for seconds in iterations),
        ranks=tuple(ranks),
        predicted=plan.predicted,
        verify=Verified(**verified) if verified else None,
    )
    differing: tuple[str, ...] = ()
    if measured is not None and plan.predicted is not None and not crowded:
        stages = stages_as_measured(plan, told)
        differing = differences(plan, stages, iteration_s=measured.iteration_s, profile=profile)
    return Outcome(
        result=result,
        differences=differing,
        measured=measured,
        advice=_advice(plan, result, measured, crowded=crowded),
        recording=_recording(plan, told, measured),
    )


def _recording(plan: Plan, told: Sequence[Mapping[str, Any]], measured: Measured | None) -> Recording | None:
    if measured is None or "starts" not in told[0]:
        return None
    return recording_of(
        plan,
        schedule_of(plan),
        told,
        iteration_s=measured.iteration_s,
        bubble_fraction=max(0.0, measured.bubble_fraction),
    )


def _advice(plan: Plan, result: RunResult, measured: Measured | None, *, crowded: bool) -> str:
    """One line: where the run differs from the prediction, and what to do about it."""
    predicted = plan.predicted
    if measured is None:
        return "the checkpoint has all steps already: nothing was left to do"
    if predicted is None:
        return "the plan holds no prediction; pipeplan check --write adds it"
    over = measured.iteration_s / predicted.iteration_s - 1 if predicted.iteration_s else 0.0
    memory = max(
        result.ranks, key=lambda rank: rank.peak_memory_bytes / max(1, predicted.ranks[rank.rank].peak_memory_bytes)
    )
    extra = memory.peak_memory_bytes / max(1, predicted.ranks[memory.rank].peak_memory_bytes) - 1
    busy = [
        (own.busy_s / foretold.busy_s - 1, own.rank)
        for own, foretold in zip(result.ranks, predicted.ranks, strict=True)
        if foretold.busy_s
    ]
    most, rank = max(busy, key=lambda entry: abs(entry[0]), default=(0.0, 0))
    word = "longer" if most > 0 else "shorter"
    if abs(over) <= NEAR:
        if extra > NEAR:
            return f"time as predicted; rank {memory.rank} held {100 * extra:.0f} % more memory: leave a larger reserve"
        if abs(most) > NEAR and not crowded:
            return (
                f"the iteration is as predicted, though rank {rank} computes {100 * abs(most):.0f} % {word}: a cut for "
                "what is measured may be faster (keep it with --save-profile, and solve again)"
            )
        return "as predicted, nothing to do"
    if crowded:
        return "processes outnumber cores here, so times mean little: run on as many cores or GPUs as ranks"
    if abs(most) > NEAR:
        return (
            f"rank {rank} computes {100 * abs(most):.0f} % {word} than predicted: profile on this machine as it is now "
            f"(pipeplan profile {plan.model.name}.py --fresh), or keep what a run measures (--save-profile), and solve "
            "again"
        )
    if over > 0:
        return (
            f"computing takes as long as predicted, but the iteration {100 * over:.0f} % longer: links or the "
            "optimizer are slower than planned; measure them again (pipeplan profile), or name them in a cluster file"
        )
    return f"the iteration is {100 * -over:.0f} % shorter than predicted: profile again for a tighter plan"
