"""Sums gradients over a stage's replicas: one bucket a stage, under way as soon as its last backward has run.

    rank 0   ... 1W6  0W7  1W7 |      actions; stage 0 is done before stage 1
                           └─ all-reduce of stage 0 ─┘└─ of stage 1 ─┘ └─ tied parameters ─┘ optimizer

The communicator works through what it is given one by one, on a thread or stream of its own, beside the actions that
remain. Parameters that other stages use too go alone, after their sum over the stages: a sum's order hangs on the place
in the bucket, and the copies of all ranks must get the same sum.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from planner.runtime.groups import Group


class Replicas:
    """The sums of one rank over its replicas on other processes, step after step."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._flying: list[tuple[Any, Tensor]] = []

    def start(self, parameters: Iterable[nn.Parameter]) -> None:
        """Begin to sum these parameters' gradients, each scaled by 1/(M · D) already; does not wait.

        Each ``.grad`` becomes a part of the bucket, laid out as it was, and holds the sum after ``finish``.
        """
        rows: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in parameters:
            if parameter.grad is not None:
                rows.setdefault(parameter.grad.dtype, []).append(parameter)
        for row in rows.values():
            bucket = _bucket(row)
            self._flying.append((self._group.start_sum(bucket), bucket))

    def finish(self) -> None:
        """Wait until all sums are there (on CUDA: let the compute stream wait)."""
        for work, _ in self._flying:
            self._group.finish_sum(work)
        self._flying.clear()


def _bucket(parameters: list[nn.Parameter]) -> Tensor:
    """One flat tensor that holds the parameters' gradients, which become parts of it."""
    gradients: list[Tensor] = [parameter.grad for parameter in parameters if parameter.grad is not None]
    flat = gradients[0].new_empty(sum(gradient.numel() for gradient in gradients))
    start = 0
    for parameter, gradient in zip(parameters, gradients, strict=True):
        part = flat[start : start + gradient.numel()]
        start += gradient.numel()
        strides = gradient.stride() if _is_dense(gradient) else part.view(gradient.shape).stride()
        part = part.as_strided(gradient.shape, strides, part.storage_offset())
        parameter.grad = part.copy_(gradient)
    return flat


def _is_dense(tensor: Tensor) -> bool:
    """Whether a tensor fills the memory that it spans, each place once."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
