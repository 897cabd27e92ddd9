"""What a run measured of a plan's stages: where that is not as planned, and the profile that follows from it.

A run times stages, not layers. So each layer's planned time is scaled by what its stage took over what its layers were
planned to take: forward by F, the backward's two halves by I and W, or by B where the schedule does not split it.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from planner.graph import LayerGraph, Stage, derive_stages
from planner.plan import Plan, job_of, schedule_of
from planner.profile import Cost, Device, Layer, Profile, ProfiledLinks
from planner.record import Seconds, record
from planner.simulate import simulate
from planner.units import format_seconds

NEAR = 0.05
"""Measured within this of planned is as planned."""
_LEAST = 0.01
"""Of the action's time is left to the layers, where collectives were planned to take as long as all of it."""


@record
class StageSeconds:
    """One stage's actions as they were, the slowest of its replicas; what recomputing took is not in the backward.

    ``split``: I and W were timed apart. ``split_s``: what that is taken to have added, as large a part of F, I and W as
    in the plan; it is not in the backward either.
    """

    forward_s: Seconds
    backward_input_s: Seconds
    backward_weight_s: Seconds
    split_s: Seconds
    split: bool

    @property
    def all_s(self) -> float:
        """F and the backward, with what splitting it added."""
        return self.forward_s + self.backward_s + self.split_s

    @property
    def backward_s(self) -> float:
        """B, whole."""
        return self.backward_input_s + self.backward_weight_s


def stages_as_measured(plan: Plan, told: Sequence[Mapping[str, Any]]) -> tuple[StageSeconds, ...]:
    """What each stage of a plan took, from what all processes told of their actions."""
    made = []
    for stage in plan.stages:
        rows = [process["actions"] for process in told if process["rank"] == stage.rank]

        def longest(letter: str, number: int = stage.stage, rows: list[dict[str, float]] = rows) -> float:
            return max((row.get(f"{number}{letter}", 0.0) for row in rows), default=0.0)

        forward_s = longest("F")
        whole_s, first_s, second_s = longest("B"), longest("I"), longest("W")
        again_s = forward_s if stage.recompute else 0.0
        deferred = not stage.returns
        planned_s = stage.backward_input_s + stage.backward_weight_s
        part = stage.backward_input_s / planned_s if planned_s else 0.5
        split = not whole_s and not deferred
        split_s = 0.0
        if split:
            first_s = max(0.0, first_s - again_s)
            split_s = min(first_s, _split_part(stage) * (forward_s + first_s + second_s))
            first_s -= split_s
        else:
            backward_s = max(0.0, (whole_s or first_s + second_s) - again_s)
            first_s, second_s = part * backward_s, (1 - part) * backward_s
        made.append(
            StageSeconds(
                forward_s=forward_s, backward_input_s=first_s, backward_weight_s=second_s, split_s=split_s, split=split
            )
        )
    return tuple(made)


def _planned_s(stage: Stage) -> float:
    """F, I and W."""
    return stage.forward_s + stage.backward_input_s + stage.backward_weight_s + (stage.split_s or 0.0)


def _split_part(stage: Stage) -> float:
    """How much of a stage's F, I and W is for splitting, as planned: Python's share of F's and I's cannot be timed."""
    return (stage.split_s or 0.0) / (_planned_s(stage) or 1.0)


# --- what differs -----------------------------------------------------------------------------------------------------


def differences(
    plan: Plan, stages: Sequence[StageSeconds], *, iteration_s: float, profile: Profile | None
) -> tuple[str, ...]:
    """A line for each stage whose actions are not as planned, and one for the links, where it is not stages alone."""
    found = []
    for stage, measured in zip(plan.stages, stages, strict=True):
        words = [
            f"{name} {100 * abs(off):.0f} % {'longer' if off > 0 else 'shorter'}"
            for name, planned_s, seconds in _compared(stage, measured)
            if planned_s and abs(off := seconds / planned_s - 1) > NEAR
        ]
        if words:
            found.append(
                f"stage {stage.stage} on rank {stage.rank} ({_layers(stage)}): {', '.join(words)} than planned"
            )
    if profile is not None:
        foretold_s = _with_stages(plan, stages, profile)
        if foretold_s and abs(off := iteration_s / foretold_s - 1) > NEAR:
            longer = "longer" if off > 0 else "shorter"
            found.append(
                f"links and optimizer: with its stages as measured the plan would take {format_seconds(foretold_s)}; "
                f"the iteration took {100 * abs(off):.0f} % {longer}"
            )
    return tuple(found)


def _compared(stage: Stage, measured: StageSeconds) -> tuple[tuple[str, float, float], ...]:
    """Name, planned and measured seconds; a plan does not say how much of what splitting adds falls into F."""
    if measured.split_s:
        return (("F, I and W", _planned_s(stage), measured.all_s),)
    return (
        ("F", stage.forward_s, measured.forward_s),
        ("backward", stage.backward_input_s + stage.backward_weight_s, measured.backward_s),
    )


def _layers(stage: Stage) -> str:
    first, last = stage.layers[0], stage.layers[-1]
    return first if first == last else f"{first} to {last}"


def _with_stages(plan: Plan, stages: Sequence[StageSeconds], profile: Profile) -> float:
    """The simulated iteration with the stages as measured, all else as planned."""
    timed = tuple(
        dataclasses.replace(
            stage,
            forward_s=measured.forward_s,
            backward_input_s=measured.backward_input_s,
            backward_weight_s=measured.backward_weight_s,
            split_s=measured.split_s,
        )
        for stage, measured in zip(plan.stages, stages, strict=True)
    )
    job = job_of(dataclasses.replace(plan, stages=timed), profile)
    return simulate(job, schedule_of(plan), memory=False).iteration_s


# --- the profile that follows -----------------------------------------------------------------------------------------


def measured_profile(
    plan: Plan,
    profile: Profile,
    told: Sequence[Mapping[str, Any]],
    *,
    path: Path,
    model_path: Path,
    device: Device,
    links: ProfiledLinks | None,
) -> Profile:
    """The plan's profile with the run's figures: layers scaled to their stages, the optimizer, the links.

    Rows of other micro-batch sizes are scaled alike. ``path``: where it will lie; ``links`` None: as they were.
    """
    sizes = plan.parallel
    derived = derive_stages(
        LayerGraph.of(profile),
        [stage.layers for stage in plan.stages],
        ranks=[stage.rank for stage in plan.stages],
        microbatch_size=plan.batch.microbatch,
        tensor=sizes.tensor,
        cluster=plan.cluster,
    )
    factors: dict[str, _Factors] = {}
    layers = {layer.name: layer for layer in profile.layers}
    for stage, measured in zip(derived, stages_as_measured(plan, told), strict=True):
        rows = [_row(layers[name], plan.batch.microbatch, sizes.tensor) for name in stage.layers]
        made = _Factors.of(stage, measured, rows)
        factors |= dict.fromkeys(stage.layers, made)
    optimizer = profile.optimizer
    steps = [process["optimizer_s"] / process["trainable_bytes"] for process in told if process["trainable_bytes"]]
    if steps:
        optimizer = dataclasses.replace(optimizer, step_s_per_trainable_byte=max(steps))
    return dataclasses.replace(
        profile,
        model=dataclasses.replace(profile.model, source=os.path.relpath(model_path, path.parent.resolve())),
        device=device,
        provenance="measured",
        optimizer=optimizer,
        links=links or profile.links,
        accuracy=None,
        layers=tuple(
            dataclasses.replace(layer, costs=tuple(factors[layer.name].scaled(cost) for cost in layer.costs))
            for layer in profile.layers
        ),
    )


def _row(layer: Layer, microbatch: int, tensor: int) -> Cost:
    return next(cost for cost in layer.costs if (cost.microbatch_size, cost.tensor) == (microbatch, tensor))


@record
class _Factors:
    """What to multiply a layer's times by; and where its whole stage was planned to take no time, what to add."""

    forward: tuple[float, float]
    backward_input: tuple[float, float]
    backward_weight: tuple[float, float]
    split: float

    @classmethod
    def of(cls, stage: Stage, measured: StageSeconds, rows: Sequence[Cost]) -> _Factors:
        """From the figures of one stage: planned, measured, and those of its layers."""

        def factor(seconds: float, planned_s: float, layers_s: float) -> tuple[float, float]:
            collectives_s = planned_s - layers_s  # between tensor ranks: the stage has them, the layers' rows do not
            own_s = max(_LEAST * seconds, seconds - collectives_s)
            return (own_s / layers_s, 0.0) if layers_s else (0.0, own_s / len(rows))

        whole_s = _planned_s(stage) - (stage.split_s or 0.0)
        split = measured.all_s / whole_s if whole_s else 0.0
        if measured.split and stage.split_s:
            split = measured.split_s / stage.split_s
        forward = factor(measured.forward_s, stage.forward_s, sum(row.forward_s for row in rows))
        first_s, second_s = (sum(row.backward_input_s for row in rows), sum(row.backward_weight_s for row in rows))
        if measured.split:
            first = factor(measured.backward_input_s, stage.backward_input_s, first_s)
            return cls(
                forward=forward,
                backward_input=first,
                backward_weight=factor(measured.backward_weight_s, stage.backward_weight_s, second_s),
                split=split,
            )
        planned_s = stage.backward_input_s + stage.backward_weight_s
        times, more_s = factor(measured.backward_s, planned_s, first_s + second_s)
        return cls(
            forward=forward, backward_input=(times, more_s / 2), backward_weight=(times, more_s / 2), split=split
        )

    def scaled(self, cost: Cost) -> Cost:
        """A row with the run's times."""
        return dataclasses.replace(
            cost,
            forward_s=cost.forward_s * self.forward[0] + self.forward[1],
            backward_input_s=cost.backward_input_s * self.backward_input[0] + self.backward_input[1],
            backward_weight_s=cost.backward_weight_s * self.backward_weight[0] + self.backward_weight[1],
            split_s=(cost.split_s or 0.0) * self.split or None,
            spread=None,
        )
