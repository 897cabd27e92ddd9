"""Memory of a rank on the CPU, where no allocator keeps count: by the storages that live while a step runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from planner.measure.memory import bytes_of, counts, storage_of

_SLACK = 1.01
"""Dead storages are looked for only where the count passes the peak by this factor: the peak is true within it."""


class LivePeak(TorchDispatchMode):
    """The most bytes that lived at once in tensors that ops made since this was entered; given ones are left out."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._living: dict[int, tuple[StorageWeakRef, int]] = {}
        self._count = 0
        self.peak_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op and count what it made."""
        made = func(*args, **(kwargs or {}))
        given: set[int] | None = None
        for leaf in tree_leaves(made):
            if not counts(leaf):
                continue
            storage = storage_of(leaf)
            entry = self._living.get(storage)
            if entry is not None and not entry[0].expired():
                continue
            if given is None:
                given = {storage_of(value) for value in tree_leaves((args, kwargs)) if counts(value)}
            if storage not in given:
                self._count += bytes_of(leaf) - (entry[1] if entry else 0)
                self._living[storage] = (StorageWeakRef(leaf.untyped_storage()), bytes_of(leaf))
        if self._count > self.peak_bytes * _SLACK:
            self._living = {key: entry for key, entry in self._living.items() if not entry[0].expired()}
            self._count = sum(size for _, size in self._living.values())
            self.peak_bytes = max(self.peak_bytes, self._count)
        return made


def state_bytes(optimizer: torch.optim.Optimizer | None) -> int:
    """Bytes of an optimizer's state."""
    states = optimizer.state.values() if optimizer is not None else ()
    return total_bytes(leaf for state in states for leaf in tree_leaves(dict(state)))


def total_bytes(values: Iterable[Any]) -> int:
    """Bytes of those of the values that are tensors; none of them shares storage with another."""
    return sum(value.nbytes for value in values if isinstance(value, Tensor))
