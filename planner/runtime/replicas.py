"""Sums gradients over a stage's replicas: one bucket a stage, under way as soon as its last backward has run.

    rank 0   ... 1W6  0W7  1W7 |      actions; stage 0 is done before stage 1
                           └─ all-reduce of stage 0 ─┘└─ of stage 1 ─┘ └─ tied parameters ─┘ optimizer

The communicator works through what it is given one by one, on a thread or stream of its own, beside the actions that
remain. Parameters that other stages use too go alone, after their sum over the stages: a sum's order hangs on the place
in the bucket, and the copies of all ranks must get the same sum.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from planner.runtime.groups import Group


class _Bucket:
    """Gradients of one type that are summed together, each in a place laid out as its parameter.

    Behind them stands, for each parameter, whether a replica has a gradient of it: which experts a batch reaches is not
    the same on all of them.
    """

    def __init__(self, named: Mapping[str, nn.Parameter]) -> None:
        self._named = named
        first = next(iter(named.values()))
        count = sum(parameter.numel() for parameter in named.values())
        self.flat = torch.zeros(count + len(named), dtype=first.dtype, device=first.device)
        self.places: dict[str, Tensor] = {}
        start = 0
        for name, parameter in named.items():
            end = start + parameter.numel()
            self.places[name] = self.flat.as_strided(parameter.shape, dense_strides(parameter), start)
            start = end
        self._there = self.flat[count:]
        self._missing: list[int] = []

    def fill(self) -> None:
        """What is to be summed: this replica's gradients, where they do not lie in their places already."""
        self._missing = []
        self._there.fill_(1)
        for number, (name, parameter) in enumerate(self._named.items()):
            place, gradient = self.places[name], parameter.grad
            if gradient is None:
                place.zero_()
                self._there[number] = 0
                self._missing.append(number)
            elif gradient is not place:
                parameter.grad = place.copy_(gradient.to_dense() if gradient.is_sparse else gradient)

    def settle(self) -> None:
        """Hand out the sums of those parameters of which only other replicas have a gradient."""
        if self._missing:
            there = self._there[self._missing].tolist()
            names = list(self._named)
            for number, found in zip(self._missing, there, strict=True):
                if found:
                    self._named[names[number]].grad = self.places[names[number]]


class Replicas:
    """The sums of one rank over its replicas on other processes, step after step.

    Args:
        rows: trainable parameters by name; the gradients of a row are summed together.
        group: of the replicas.
    """

    def __init__(self, rows: Sequence[Mapping[str, nn.Parameter]], group: Group) -> None:
        self._group = group
        self._buckets = [bucket for row in rows for bucket in _buckets(row)]
        self._flying: list[tuple[Any, _Bucket]] = []
        self.places = {name: place for bucket in self._buckets for name, place in bucket.places.items()}
        """Where the gradient of each parameter is summed: best made there."""

    def start(self, names: Iterable[str]) -> None:
        """Begin to sum the gradients of whole rows, each scaled by 1/(M · D) already; does not wait.

        Each ``.grad`` becomes a part of the bucket, and holds the sum after ``finish``.
        """
        wanted = set(names)
        for bucket in self._buckets:
            if not wanted.isdisjoint(bucket.places):
                bucket.fill()
                self._flying.append((self._group.start_sum(bucket.flat), bucket))

    def finish(self) -> None:
        """Wait until all sums are there (on CUDA: let the compute stream wait)."""
        for work, bucket in self._flying:
            self._group.finish_sum(work)
            bucket.settle()
        self._flying.clear()


def _buckets(row: Mapping[str, nn.Parameter]) -> list[_Bucket]:
    """One for each type."""
    dtypes = dict.fromkeys(parameter.dtype for parameter in row.values())
    return [_Bucket({name: value for name, value in row.items() if value.dtype is dtype}) for dtype in dtypes]


def dense_strides(tensor: Tensor) -> tuple[int, ...]:
    """The strides of a gradient, as autograd makes it: those of its parameter, where this is dense."""
    return torch.empty_like(tensor, device="meta").stride()
