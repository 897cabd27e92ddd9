"""Bytes that a layer holds between I and W, and what its actions need beside: every layer alone, once.

F ──────────▶ I ──────────▶ W        saved_bytes (the capture tells it) lives from F to I's end,
|saved_bytes |   |for weight|        saved_for_weight_bytes from there to W's end;
  + workspace      + workspace       the workspace is what an action needs over that, at its fullest moment
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from planner.capture import Batch, Capture, RandomKey, Stage
from planner.measure.memory import MemoryMeter, meter_for
from planner.measure.passes import Pipeline


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldBytes:
    """Of one layer at one micro-batch size."""

    saved_for_weight: int
    workspace: int


def measure_held(captured: Capture) -> tuple[HeldBytes, ...]:
    """Bytes of all layers of a captured model."""
    pipeline = Pipeline(captured, [[layer.name] for layer in captured.layers], captured.batch)
    handed = pipeline.handed()
    inputs = saved_inputs(captured)
    held = tuple(
        held_by(captured, stage, captured.batch, *handed[index], layer.saved_bytes + inputs[index])
        for index, (layer, stage) in enumerate(zip(captured.layers, pipeline.stages, strict=True))
    )
    pipeline.drop_gradients()
    return held


def saved_inputs(captured: Capture) -> list[int]:
    """For each layer the bytes of the tensors from other layers that it keeps for its backward."""
    found = [0] * len(captured.layers)
    number = {layer.name: index for index, layer in enumerate(captured.layers)}
    for edge in captured.edges:
        found[number[edge.target]] += sum(
            tensor.bytes_per_sample * captured.microbatch_size + tensor.fixed_bytes
            for tensor in edge.tensors
            if tensor.saved
        )
    return found


def held_by(
    captured: Capture,
    stage: Stage,
    batch: Batch,
    received: Mapping[str, Tensor],
    gradients: Mapping[str, Tensor],
    saved_bytes: int,
) -> HeldBytes:
    """Run one stage on copies that nothing else holds: what lives after an action is what the stage keeps.

    Its gradients are there already, from an earlier pass: they are counted apart.
    """
    with meter_for(captured.device) as meter:
        _forward(stage, batch, received, meter, split=True)
        peaks = [meter.peak_bytes() - saved_bytes]
        for_weight = _backward(stage.backward_input, gradients, meter)
        peaks.append(meter.peak_bytes() - saved_bytes)
        meter.reset_peak()
        stage.backward_weight(0)
        peaks.append(meter.peak_bytes() - for_weight)
        _forward(stage, batch, received, meter, split=False)
        peaks.append(meter.peak_bytes() - saved_bytes)
        _backward(stage.backward, gradients, meter)
        peaks.append(meter.peak_bytes() - saved_bytes)
    return HeldBytes(saved_for_weight=for_weight, workspace=max(0, *peaks))


def fill_gradients(stage: Stage, batch: Batch, received: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> None:
    """A first pass."""
    inputs, target = batch
    stage.forward(0, inputs, target, received, RandomKey(0, 0, 0), split=True)
    stage.backward_input(0, dict(gradients), 1.0)
    stage.backward_weight(0)


def _forward(stage: Stage, batch: Batch, received: Mapping[str, Tensor], meter: MemoryMeter, *, split: bool) -> None:
    inputs, target = batch
    meter.reset_peak()
    stage.forward(0, inputs, target, _copies(received), RandomKey(0, 0, 0), split=split)


def _backward(action: Any, gradients: Mapping[str, Tensor], meter: MemoryMeter) -> int:
    """Run I or B; bytes that are held after it."""
    given = _copies(gradients)
    meter.reset_peak()
    action(0, given, 1.0)
    del given
    return meter.live_bytes()


def _copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies in memory of their own, laid out as the tensors are."""
    return {
        name: torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)
        for name, tensor in tensors.items()
    }
