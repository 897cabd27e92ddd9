"""What the user's optimizer costs: bytes of state and seconds of a step, per byte of trainable parameters."""

from __future__ import annotations

from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from planner.capture.model_file import ModelFile
from planner.measure.clock import clock_for, time_calls
from planner.profile import OptimizerCost

WARM_UP, REPEATS = 2, 7
ELSEWHERE_BYTES = 64 * 2**20
"""More than the caches that a core, or a GPU, has to itself."""


def measure_optimizer(model_file: ModelFile, module: nn.Module, *, device: str) -> OptimizerCost:
    """Step the optimizer over the module's parameters with made-up gradients; parameters are put back afterwards.

    Before each step as much is written elsewhere as a step's backward would: what it reads has left the nearest caches.
    State counts wherever it lies: an optimizer that keeps it elsewhere still has it.
    """
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    kept = [parameter.detach().clone() for parameter in trained]
    for parameter in trained:
        parameter.grad = torch.full_like(parameter, 1e-6)
    optimizer = model_file.optimizer(trained)
    clock, elsewhere = clock_for(device), torch.empty(ELSEWHERE_BYTES, dtype=torch.uint8, device=device)
    try:
        seconds = []
        for _ in range(WARM_UP + REPEATS):
            elsewhere.fill_(0)
            seconds += time_calls(clock, [optimizer.step])
    except (TypeError, ValueError, RuntimeError) as error:
        raise model_file.fault(
            "optimizer",
            f"returned {type(optimizer).__name__}, whose step() raised {type(error).__name__}: {error}",
            "return one that steps on gradients alone",
        ) from error
    trainable_bytes = sum(parameter.nbytes for parameter in trained)
    state_bytes = sum(tensor.nbytes for state in optimizer.state.values() for tensor in _tensors(state))
    with torch.no_grad():
        for parameter, value in zip(trained, kept, strict=True):
            parameter.copy_(value)
            parameter.grad = None
    return OptimizerCost(
        name=type(optimizer).__name__,
        state_bytes_per_trainable_byte=state_bytes / trainable_bytes,
        step_s_per_trainable_byte=median(seconds[WARM_UP:]) / trainable_bytes,
    )


def _tensors(state: Any) -> list[Tensor]:
    if isinstance(state, Tensor):
        return [state]
    if isinstance(state, dict):
        return [tensor for value in state.values() for tensor in _tensors(value)]
    if isinstance(state, list | tuple):
        return [tensor for value in state for tensor in _tensors(value)]
    return []
