"""From a plan to what is simulated and run: its job, and its schedule."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Final

from planner.cluster import Cluster, resolve
from planner.errors import InputError
from planner.files import as_record, plain
from planner.graph import LayerGraph, ties
from planner.plan.plan import Plan, Predicted, PredictedRank
from planner.profile import Profile
from planner.schedules import build
from planner.schedules.action import Schedule, parse_action
from planner.simulate import Job, Timeline


def job_of(plan: Plan, profile: Profile) -> Job:
    """The plan as the time model takes it: stages, sends and returns as they stand, all else from the profile.

    Raises InputError where a send or a return goes to no stage, or in the wrong direction, or bytes add up to nonsense.
    """
    for place, fault in _transfer_faults(plan):
        raise InputError(f"{place}: {fault}", hint="pipeplan check --write derives sends and returns anew")
    if _most_bytes(plan, profile) > _MOST_BYTES:
        raise InputError(
            "stages: what they hold adds up to over 4 EiB", hint="correct the bytes of the plan, or of its profile"
        )
    sizes = plan.parallel
    optimizer = profile.optimizer.sharded(sizes.data) if sizes.zero1 else profile.optimizer
    return Job(
        stages=plan.stages,
        num_ranks=sizes.pipeline,
        num_microbatches=plan.batch.microbatches,
        data=sizes.data,
        tensor=sizes.tensor,
        cluster=resolve(plan.cluster, profile),
        gradient_bytes_per_trainable_byte=profile.gradient_bytes_per_trainable_byte,
        state_bytes_per_trainable_byte=optimizer.state_bytes_per_trainable_byte,
        step_s_per_trainable_byte=optimizer.step_s_per_trainable_byte,
        ties=ties(LayerGraph.of(profile), [stage.layers for stage in plan.stages], tensor=sizes.tensor),
        zero1=bool(sizes.zero1),
    )


_MOST_BYTES: Final = 2.0**62
"""Memory is summed up in whole numbers of 64 bits."""


def _most_bytes(plan: Plan, profile: Profile) -> float:
    """More than all ranks can hold at one time, whatever the schedule."""
    optimizer, total = profile.optimizer, 0.0
    copies = 2.0 + profile.gradient_bytes_per_trainable_byte + optimizer.state_bytes_per_trainable_byte
    for stage in plan.stages:
        moved = sum(entry.bytes for entry in (*stage.sends, *stage.returns))
        held = stage.input_bytes + stage.saved_bytes + stage.saved_for_weight_bytes + moved
        total += copies * (stage.parameter_bytes + stage.trainable_bytes) + stage.buffer_bytes + stage.workspace_bytes
        total += held * float(plan.batch.microbatches)
    return total


def schedule_of(plan: Plan) -> Schedule:
    """Every rank's actions: the plan's own, or those that its schedule makes.

    Raises InputError where the schedule cannot be made in this shape.
    """
    if plan.actions is not None:
        return tuple(tuple(map(parse_action, text.split())) for text in plan.actions)
    return build(
        plan.schedule.name,
        num_ranks=plan.parallel.pipeline,
        virtual=plan.parallel.virtual,
        num_microbatches=plan.batch.microbatches,
        placement=plan.schedule.placement,
        warmup=plan.schedule.warmup,
    )


def predicted_of(timeline: Timeline, *, global_batch: int, bound_s: float | None) -> Predicted:
    """What a plan says of its simulated iteration; ``bound_s`` None: nothing is proven."""
    seconds = timeline.iteration_s
    return Predicted(
        iteration_s=seconds,
        samples_per_s=global_batch / seconds if seconds > 0 else 0.0,
        bubble_fraction=timeline.bubble_fraction,
        bound_s=bound_s,
        gap=None if bound_s is None else seconds / bound_s - 1 if bound_s > 0 else 0.0 if seconds == 0 else None,
        ranks=tuple(
            PredictedRank(rank=entry.rank, busy_s=entry.busy_s, peak_memory_bytes=entry.peak_memory_bytes)
            for entry in timeline.ranks
        ),
    )


def asked_of(*, global_batch: int, cluster: Cluster, profile_sha256: str, zero1: bool = False) -> str:
    """The hash of what a bound is proven for (``search.asked``); ``cluster`` is resolved."""
    as_read = plain(as_record(Cluster, plain(cluster), path="cluster"))  # 0 and 0.0 are one number
    asked = {"global_batch": global_batch, "cluster": as_read, "profile": profile_sha256}
    if zero1:
        asked["zero1"] = True
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()


def _transfer_faults(plan: Plan) -> Iterator[tuple[str, str]]:
    last = len(plan.stages) - 1
    for index, stage in enumerate(plan.stages):
        for kind, transfers in (("sends", stage.sends), ("returns", stage.returns)):
            goals = [transfer.to_stage for transfer in transfers]
            for row, goal in enumerate(goals):
                place = f"stages[{index}].{kind}[{row}].to_stage"
                if goal > last:
                    yield place, f"there is no stage {goal}"
                elif kind == "sends" and goal <= index:
                    yield place, f"is {goal}, but a send goes to a higher stage than {index}"
                elif kind == "returns" and goal >= index:
                    yield place, f"is {goal}, but a return goes to a lower stage than {index}"
                elif goal in goals[:row]:
                    yield place, f"is {goal} as in an earlier entry"
