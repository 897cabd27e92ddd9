"""Bytes: what autograd saves, and what lives while something runs.

On a CUDA device the allocator tells what lives. On a CPU every tensor that an op makes is counted while its storage
lives, which tells the same of the same program; scratch space within a kernel is seen on neither side of torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Protocol, Self, TypeGuard

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def storage_of(tensor: Tensor) -> int:
    """The identity of a tensor's storage, for as long as something holds it."""
    return int(tensor.untyped_storage()._cdata)


def bytes_of(tensor: Tensor) -> int:
    """The bytes of a tensor's whole storage."""
    return int(tensor.untyped_storage().nbytes())


class SavedTensors:
    """The tensors that autograd saved, one for each storage, held so that no storage's place is used again."""

    def __init__(self) -> None:
        self.tensors: dict[int, Tensor] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record what is saved within."""

        def pack(tensor: Tensor) -> Tensor:
            self.tensors.setdefault(storage_of(tensor), tensor.detach())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield


class MemoryMeter(Protocol):
    """Bytes that live on a device, counted from when the meter was entered."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def live_bytes(self) -> int:
        """Bytes now in tensors made since the meter was entered."""

    def reset_peak(self) -> None:
        """Forget earlier peaks."""

    def peak_bytes(self) -> int:
        """The most that lived at once since the last reset."""


class CudaMeter:
    """What torch's CUDA allocator says."""

    def __enter__(self) -> Self:
        torch.cuda.synchronize()
        self._base = torch.cuda.memory_allocated()
        self.reset_peak()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def live_bytes(self) -> int:
        """Allocated bytes over those at the start."""
        return torch.cuda.memory_allocated() - self._base

    def reset_peak(self) -> None:
        """Forget earlier peaks."""
        torch.cuda.reset_peak_memory_stats()

    def peak_bytes(self) -> int:
        """The highest allocation over that at the start."""
        return torch.cuda.max_memory_allocated() - self._base


class CpuMeter(TorchDispatchMode):
    """Counts the storages of all tensors that ops return, until each is freed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._living: dict[int, tuple[StorageWeakRef, int]] = {}
        self._peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op and count what it made; storages it was given and never made here are not ours."""
        kwargs = kwargs or {}
        given = {storage_of(leaf) for leaf in tree_leaves((args, kwargs)) if counts(leaf)}
        self._prune()
        made = func(*args, **kwargs)
        for leaf in tree_leaves(made):
            if counts(leaf):
                key = storage_of(leaf)
                if key not in self._living and key not in given:
                    self._living[key] = (StorageWeakRef(leaf.untyped_storage()), bytes_of(leaf))
        self._peak = max(self._peak, self._sum())
        return made

    def _prune(self) -> None:
        for key in [key for key, (reference, _) in self._living.items() if reference.expired()]:
            del self._living[key]

    def _sum(self) -> int:
        return sum(size for _, size in self._living.values())

    def live_bytes(self) -> int:
        """Bytes of the counted storages that live."""
        self._prune()
        return self._sum()

    def reset_peak(self) -> None:
        """Forget earlier peaks."""
        self._peak = self.live_bytes()

    def peak_bytes(self) -> int:
        """The highest sum of living storages."""
        return max(self._peak, self.live_bytes())


def counts(leaf: Any) -> TypeGuard[Tensor]:
    """Whether it is a tensor with one storage of its own."""
    return isinstance(leaf, Tensor) and leaf.layout is torch.strided and not leaf.is_meta


def meter_for(device: torch.device | str) -> MemoryMeter:
    """The meter of a device."""
    return CudaMeter() if torch.device(device).type == "cuda" else CpuMeter()
