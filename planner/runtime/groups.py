"""Groups of ranks, and what their members do together beside the pipeline's own channels."""

from __future__ import annotations

import fcntl
import os
import re
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

FOREVER = timedelta(days=30)
"""Waits end by their message or with the process: the launcher sees all ranks and tells a hang from a long action."""


class LostContactError(Exception):
    """The connection to another rank broke: mostly because that rank failed, which it says itself."""

    def __init__(self, whom: str, cause: object) -> None:
        said = re.sub(r"^\[[^\]]*\]\s*", "", str(cause).splitlines()[0]).split(". ")[0]
        super().__init__(f"lost contact with {whom}: {said}")


@contextmanager
def _contact(whom: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise LostContactError(whom, error) from None


@contextmanager
def _threads_that_wait() -> Iterator[None]:
    """Threads that are started inside do not take the core of one that runs when they wake up (Linux).

    gloo writes a message under a lock. On a crowded machine its thread at the receiver would take the writer's core,
    and its thread at the sender would then spin on that lock: that took a third of a step without work.
    """
    if not hasattr(os, "SCHED_BATCH") or os.sched_getscheduler(0) != os.SCHED_OTHER:
        yield
        return
    usual = os.sched_param(0)
    os.sched_setscheduler(0, os.SCHED_BATCH, usual)
    try:
        yield
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, usual)


class Communicators:
    """Makes groups of ranks over one store; each member calls with the same name."""

    def __init__(self, store: Store, *, device: torch.device, one_node: bool) -> None:
        self.store = store
        self.device = device
        self.host = _own_address(one_node)
        """The address at which the other ranks reach this one."""
        with _threads_that_wait():
            self._cpu = dist.ProcessGroupGloo.create_device(hostname=self.host)

    def make(self, name: str, rank: int, size: int, *, on_cpu: bool = False) -> Any:
        """A group of ``size`` processes, this one with ``rank`` in it."""
        with _contact(f"the others of group {name}"):
            return self._make(name, rank, size, on_cpu)

    def _make(self, name: str, rank: int, size: int, on_cpu: bool) -> Any:
        store = PrefixStore(f"group/{name}", self.store)
        if on_cpu or self.device.type == "cpu":
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._devices = [self._cpu]  # one thread moves the bytes of all groups
            options._threads = 1
            options._timeout = FOREVER
            return dist.ProcessGroupGloo(store, rank, size, options)
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = FOREVER
        made = dist.ProcessGroupNCCL(store, rank, size, nccl)
        # connected now: else a sender waits for its receiver at the first message, and a round of such waits never ends
        made.eager_connect_single_device(self.device)
        return made


def _own_address(one_node: bool) -> str:
    """Where this process listens: here alone, or at the address by which this machine reaches the first one.

    A machine's name may stand for another of its addresses, which the other machines do not reach.
    """
    if one_node:
        return "127.0.0.1"
    if interface := os.environ.get("GLOO_SOCKET_IFNAME"):
        return _address_of(interface.partition(",")[0])
    family, kind, _, _, address = socket.getaddrinfo(os.environ["MASTER_ADDR"], 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as towards:
        towards.connect(address)  # sends nothing
        return str(towards.getsockname()[0])


def _address_of(interface: str) -> str:
    """The IPv4 address of a network interface (Linux's ioctl SIOCGIFADDR: an address at byte 20 of what it fills)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            found = fcntl.ioctl(any_socket, 0x8915, struct.pack("256s", interface.encode()[:15]))
        except OSError as error:
            raise LostContactError(
                "the other machines", f"no address at GLOO_SOCKET_IFNAME={interface}: {error}"
            ) from None
    return socket.inet_ntoa(found[20:24])


class Group:
    """What several processes do together, beside the pipeline's own links; all but ``start_...`` wait for the end."""

    def __init__(self, group: Any, *, whom: str = "other replicas") -> None:
        """``whom``: the others, where contact with them is lost."""
        self._group = group
        self._whom = whom

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Send a contiguous tensor."""
        with _contact(f"process {to}"):
            self._group.send([tensor], to, 0).wait()

    def receive(self, tensor: torch.Tensor, source: int) -> None:
        """Fill a tensor with what another process sends."""
        with _contact(f"process {source}"):
            self._group.recv([tensor], source, 0).wait()

    def barrier(self) -> None:
        """Wait for all."""
        with _contact("other processes"):
            self._group.barrier().wait()

    def sum(self, tensor: torch.Tensor) -> None:
        """Put the sum over all processes into a tensor."""
        self.finish_sum(self.start_sum(tensor))

    def start_sum(self, tensor: torch.Tensor) -> Any:
        """Begin to put the sum over all processes into a tensor: what ``finish_sum`` waits for."""
        with _contact(self._whom):
            return self._group.allreduce([tensor])

    def start_scatter(self, own: torch.Tensor, whole: torch.Tensor) -> Any:
        """Begin to put into ``own`` this process's part of a sum over all, for ``finish_sum``; parts are alike."""
        with _contact(self._whom):
            return self._group._reduce_scatter_base(own, whole)

    def finish_sum(self, work: Any) -> None:
        """Wait for a sum (on CUDA: let the current stream wait)."""
        with _contact(self._whom):
            work.wait()

    def max(self, tensor: torch.Tensor) -> None:
        """Put the largest over all processes into a tensor, element by element."""
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX  # type: ignore[assignment]
        with _contact(self._whom):
            self._group.allreduce([tensor], options).wait()

    def gather(self, tensor: torch.Tensor, size: int) -> list[torch.Tensor]:
        """The tensors of all ``size`` processes, in their order."""
        found = [torch.empty_like(tensor) for _ in range(size)]
        with _contact(self._whom):
            self._group.allgather([found], [tensor]).wait()
        return found
