"""Tensors between ranks: one communicator per ordered pair, receives posted ahead, sends let go as they finish.

What travels is the dense stretch of storage that a tensor spans; the receiver rebuilds shape and strides over it, so a
tensor arrives laid out as it left (dropout draws in memory order; a kernel may choose by strides). The first message of
a kind tells its layout in a header; all later ones have the same. A buffer is used again as soon as nothing shares its
storage any more.
"""

from __future__ import annotations

import os
import queue
import re
import socket
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from planner.runtime.messages import Key, Kind

FOREVER = timedelta(days=30)
"""Waits end by their message or with the process: the launcher sees all ranks and tells a hang from a long action."""

_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32, torch.uint64,
)  # fmt: skip
_MAX_DIMS = 16
HEADER_NUMBERS = 2 + 2 * _MAX_DIMS
_ABSENT = -1
"""In place of a type: there is no such tensor, in any step."""


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


class Layout(NamedTuple):
    """How a tensor lies in memory."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Layout:
        """The layout of a tensor."""
        return cls(tensor.dtype, tuple(tensor.shape), tensor.stride())

    @property
    def span(self) -> int:
        """Elements from the first to the last one in memory, both counted."""
        if 0 in self.shape:
            return 0
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))

    @property
    def num_bytes(self) -> int:
        """Bytes on the wire."""
        return self.span * self.dtype.itemsize

    def numbers(self) -> list[int]:
        """The layout as a header of fixed length."""
        rest = [0] * (_MAX_DIMS - len(self.shape))
        return [_DTYPES.index(self.dtype), len(self.shape), *self.shape, *rest, *self.strides, *rest]

    @classmethod
    def from_numbers(cls, numbers: Sequence[int]) -> Layout:
        """The layout that a header tells."""
        dims = numbers[1]
        shape, strides = numbers[2 : 2 + dims], numbers[2 + _MAX_DIMS : 2 + _MAX_DIMS + dims]
        return cls(_DTYPES[numbers[0]], tuple(shape), tuple(strides))


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


# --- communicators ----------------------------------------------------------------------------------------------------


class Communicators:
    """Makes groups of ranks over one store; each member calls with the same name."""

    def __init__(self, store: Store, *, device: torch.device, one_node: bool) -> None:
        self._store = store
        self._device = device
        with _threads_that_wait():
            self._cpu = _gloo_device(one_node)

    def make(self, name: str, rank: int, size: int, *, on_cpu: bool = False) -> Any:
        """A group of ``size`` processes, this one with ``rank`` in it."""
        with _contact(f"the others of group {name}"):
            return self._make(name, rank, size, on_cpu)

    def _make(self, name: str, rank: int, size: int, on_cpu: bool) -> Any:
        store = PrefixStore(f"group/{name}", self._store)
        if on_cpu or self._device.type == "cpu":
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._devices = [self._cpu]  # one thread moves the bytes of all groups
            options._threads = 1
            options._timeout = FOREVER
            return dist.ProcessGroupGloo(store, rank, size, options)
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = FOREVER
        made = dist.ProcessGroupNCCL(store, rank, size, nccl)
        # connected now: else a sender waits for its receiver at the first message, and a round of such waits never ends
        made.eager_connect_single_device(self._device)
        return made


def _gloo_device(one_node: bool) -> Any:
    """Where gloo listens: here alone, or at the address by which this machine reaches the first one.

    A machine's name may stand for another of its addresses, which the other machines do not reach.
    """
    gloo = dist.ProcessGroupGloo
    if one_node:
        return gloo.create_device(hostname="127.0.0.1")
    if interface := os.environ.get("GLOO_SOCKET_IFNAME"):
        return gloo.create_device(interface=interface.partition(",")[0])
    family, kind, _, _, address = socket.getaddrinfo(os.environ["MASTER_ADDR"], 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as towards:
        towards.connect(address)  # sends nothing
        return gloo.create_device(hostname=towards.getsockname()[0])


class Group:
    """What several processes do together, beside the pipeline's own links; all but ``start_sum`` wait for the end."""

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


# --- receiving --------------------------------------------------------------------------------------------------------


class _Buffer:
    """Bytes that messages are received into; free when no tensor shares them."""

    __slots__ = ("_storage", "_unshared", "flat")

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.flat = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._storage = self.flat.untyped_storage()
        self._unshared = torch._C._storage_Use_Count(self._storage._cdata)

    @property
    def is_free(self) -> bool:
        return torch._C._storage_Use_Count(self._storage._cdata) <= self._unshared

    def shaped(self, layout: Layout) -> torch.Tensor:
        """A tensor over the buffer, which is in use as long as that lives."""
        made = torch.empty(0, dtype=layout.dtype, device=self.flat.device)
        return made.set_(self._storage, 0, layout.shape, layout.strides)


class _Buffers:
    """Buffers by size."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._all: dict[int, list[_Buffer]] = {}
        self.total_bytes = 0

    def take(self, num_bytes: int) -> _Buffer:
        """A free buffer of this size."""
        row = self._all.setdefault(num_bytes, [])
        for buffer in row:
            if buffer.is_free:
                return buffer
        self.total_bytes += num_bytes
        row.append(_Buffer(num_bytes, self._device))
        return row[-1]


class _Inbox:
    """All messages of one rank to this one, step after step in the same order.

    A message's tensor is made when its receive is posted: once it is there, nothing is left to do.
    """

    def __init__(self, group: Any, sender: int, kinds: Sequence[Kind], window: int, device: torch.device) -> None:
        self._group = group
        self._sender = sender
        self._kinds = kinds
        self._window = window
        self._device = device
        self._layouts: dict[Kind, Layout | None] = {}
        self._flying: dict[int, tuple[Any, torch.Tensor | None]] = {}
        self._posted = self._taken = self._base = self._end = 0

    def begin(self, num_steps: int) -> None:
        """Expect the messages of ``num_steps`` more steps."""
        self._end += num_steps * len(self._kinds)

    def next_step(self) -> None:
        self._base += len(self._kinds)

    def post_ahead(self, buffers: _Buffers) -> None:
        """Post receives as far as the window, and as layouts are known."""
        goal = min(self._taken + self._window, self._end)
        while self._posted < goal:
            kind = self._kinds[self._posted % len(self._kinds)]
            if kind not in self._layouts:
                return
            self._post(self._layouts[kind], buffers)

    def take(self, place: int, buffers: _Buffers) -> torch.Tensor | None:
        """The tensor of the step's message number ``place``, waited for."""
        number = self._base + place
        while self._posted <= number:
            kind = self._kinds[self._posted % len(self._kinds)]
            if kind not in self._layouts:
                self._layouts[kind] = self._told()
            self._post(self._layouts[kind], buffers)
        work, tensor = self._flying.pop(number)
        self._taken += 1
        if work is not None:
            self._wait(work)
        return tensor

    def _post(self, layout: Layout | None, buffers: _Buffers) -> None:
        tensor = work = None
        if layout is not None and layout.num_bytes:
            buffer = buffers.take(layout.num_bytes)
            tensor = buffer.shaped(layout)
            work = self._receive(buffer.flat)
        elif layout is not None:
            tensor = torch.empty_strided(layout.shape, layout.strides, dtype=layout.dtype, device=self._device)
        self._flying[self._posted] = (work, tensor)
        self._posted += 1

    def _told(self) -> Layout | None:
        header = torch.empty(HEADER_NUMBERS, dtype=torch.int64, device=self._device)
        self._wait(self._receive(header))
        numbers = header.tolist()
        return None if numbers[0] == _ABSENT else Layout.from_numbers(numbers)

    def _receive(self, flat: torch.Tensor) -> Any:
        try:
            return self._group.recv([flat], 0, 0)
        except RuntimeError as error:
            raise LostContactError(f"rank {self._sender}", error) from None

    def _wait(self, work: Any) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise LostContactError(f"rank {self._sender}", error) from None


# --- sending ----------------------------------------------------------------------------------------------------------


HELD_BYTES = 32 << 20
"""What may lie with a rank that has left it, but not yet told so; more, and a thread waits for the oldest to leave."""


class _Sent:
    """What was handed over to one rank and may not have left yet: tensors live until it has.

    gloo tells only a caller that waits whether a message has left. So a message is let go when one that came back shows
    that it was taken; where too many bytes would wait for that, a thread waits for the oldest. NCCL is simply asked.
    """

    def __init__(self, device: torch.device) -> None:
        self._ask = device.type == "cuda"
        self._flying: deque[tuple[int, Any, torch.Tensor]] = deque()
        self._waiting: queue.SimpleQueue[tuple[Any, torch.Tensor] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self.bytes = 0

    def hold(self, number: int, work: Any, flat: torch.Tensor) -> None:
        """Keep the bytes of message ``number``."""
        self._flying.append((number, work, flat))
        self._count(flat.nbytes)
        if self._ask:
            while self._flying and self._flying[0][1].is_completed():
                self._count(-self._flying.popleft()[2].nbytes)
            return
        while self.bytes > HELD_BYTES and len(self._flying) > 1:
            if self._thread is None:
                self._thread = threading.Thread(target=self._wait, name="sends", daemon=True)
                self._thread.start()
            self._waiting.put(self._flying.popleft()[1:])

    def let_go(self, number: int) -> None:
        """All messages before ``number`` have arrived."""
        while self._flying and self._flying[0][0] < number:
            self._count(-self._flying.popleft()[2].nbytes)

    def drain(self) -> None:
        """Wait until everything has left."""
        for _, work, _ in self._flying:
            work.wait()
        self._flying.clear()
        if self._thread is not None:
            self._waiting.put(None)
            self._thread.join()

    def _count(self, num_bytes: int) -> None:
        with self._lock:
            self.bytes += num_bytes

    def _wait(self) -> None:
        while (entry := self._waiting.get()) is not None:
            work, flat = entry
            try:
                work.wait()
            except RuntimeError:
                return  # the other rank is gone: this one's own next receive, or the launcher, says so
            self._count(-flat.nbytes)
            del entry, work, flat


def _bytes_of(tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
    """What a tensor spans in memory, as one dense row."""
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    if tensor.is_contiguous() and not tensor.is_cuda:
        return tensor  # gloo asks for no more
    return tensor.as_strided((layout.span,), (1,)).view(torch.uint8)


class _Outbox:
    """This rank's messages to one other."""

    def __init__(self, group: Any, receiver: int, device: torch.device) -> None:
        self._group = group
        self._receiver = receiver
        self._device = device
        self._layouts: dict[Kind, Layout | None] = {}
        self._number = -1
        self.base = 0
        """The number of the step's first message."""
        self.sent = _Sent(device)

    def next_step(self) -> None:
        self.base = self._number + 1

    def send(self, key: Key, tensor: torch.Tensor | None) -> None:
        """Hand a tensor over; does not wait."""
        self._number += 1
        kind = key[:3]
        if kind not in self._layouts:
            self._tell(Kind(*kind), None if tensor is None else Layout.of(tensor))
        told = self._layouts[kind]  # type: ignore[index]
        if tensor is None or told is None:
            assert (tensor is None) == (told is None), f"{key.name} is there in some steps and not in others"
            return
        if tensor.stride() != told.strides or tensor.shape != told.shape or tensor.dtype is not told.dtype:
            tensor = self._laid_out(tensor, told, key.name)
        if tensor.numel():
            self._push(_bytes_of(tensor, told))

    def _laid_out(self, tensor: torch.Tensor, told: Layout, name: str) -> torch.Tensor:
        """The tensor as all of its kind were said to be."""
        if tensor.shape != told.shape or tensor.dtype is not told.dtype:
            raise TypeError(
                f"{name} is {tensor.dtype} {list(tensor.shape)} now and was {told.dtype} {list(told.shape)} "
                "before: what passes between stages must keep its shape"
            )
        return torch.empty_strided(told.shape, told.strides, dtype=told.dtype, device=self._device).copy_(tensor)

    def _tell(self, kind: Kind, layout: Layout | None) -> None:
        if layout is not None and (layout.dtype not in _DTYPES or len(layout.shape) > _MAX_DIMS):
            raise TypeError(f"{kind.name}: {layout.dtype} with {len(layout.shape)} dimensions cannot be sent")
        self._layouts[kind] = layout
        numbers = [_ABSENT] * HEADER_NUMBERS if layout is None else layout.numbers()
        self._push(torch.tensor(numbers, dtype=torch.int64, device=self._device))

    def _push(self, flat: torch.Tensor) -> None:
        try:
            work = self._group.send([flat], 1, 0)
        except RuntimeError as error:
            raise LostContactError(f"rank {self._receiver}", error) from None
        self.sent.hold(self._number, work, flat)


# --- all of it --------------------------------------------------------------------------------------------------------


class Transport:
    """This rank's links to the other ranks of its pipeline."""

    def __init__(
        self,
        communicators: Communicators,
        *,
        prefix: str,
        rank: int,
        pairs: Sequence[tuple[int, int]],
        inbox: Mapping[int, Sequence[Kind]],
        windows: Mapping[int, int],
        arrived: Mapping[int, Sequence[int]],
        device: torch.device,
    ) -> None:
        """The links; ``inbox``, ``windows`` and ``arrived`` as a RankProgram has them.

        ``pairs``: all ordered pairs of ranks that exchange messages, in an order that is the same on every rank.
        """
        self._buffers = _Buffers(device)
        self._arrived = arrived
        self._came: list[tuple[int, int]] = []
        self._inboxes: dict[int, _Inbox] = {}
        self._outboxes: dict[int, _Outbox] = {}
        for sender, receiver in pairs:
            if rank not in (sender, receiver):
                continue
            group = communicators.make(f"{prefix}/{sender}-{receiver}", int(rank == receiver), 2)
            if rank == sender:
                self._outboxes[receiver] = _Outbox(group, receiver, device)
            else:
                self._inboxes[sender] = _Inbox(group, sender, inbox[sender], windows[sender], device)

    @property
    def message_bytes(self) -> int:
        """Bytes in receive buffers and in sends that have not left."""
        return self._buffers.total_bytes + sum(outbox.sent.bytes for outbox in self._outboxes.values())

    def begin(self, num_steps: int) -> None:
        """Expect the messages of ``num_steps`` more steps."""
        for inbox in self._inboxes.values():
            inbox.begin(num_steps)
            inbox.post_ahead(self._buffers)

    def take(self, sender: int, place: int) -> torch.Tensor | None:
        """The tensor of message number ``place`` of this step from a rank, waited for; None where there is none."""
        tensor = self._inboxes[sender].take(place, self._buffers)
        self._came.append((sender, place))
        return tensor

    def post_ahead(self) -> None:
        """After messages were taken: post the receives that have room now, and let go of what was sent and arrived.

        Not at once when a message comes: its sender may still be busy handing it over, and a receive that is posted
        then makes gloo's thread there spin on a lock that the sender holds.
        """
        for sender, place in self._came:
            outbox = self._outboxes.get(sender)
            if outbox is not None:
                outbox.sent.let_go(outbox.base + self._arrived[sender][place])
            self._inboxes[sender].post_ahead(self._buffers)
        self._came.clear()

    def send(self, receiver: int, key: Key, tensor: torch.Tensor | None) -> None:
        """Hand a tensor over to a rank; does not wait."""
        self._outboxes[receiver].send(key, tensor)

    def next_step(self) -> None:
        """The step's messages are all taken."""
        self.post_ahead()
        for inbox in self._inboxes.values():
            inbox.next_step()
        for outbox in self._outboxes.values():
            outbox.next_step()

    def close(self) -> None:
        """Wait until everything sent has left."""
        for outbox in self._outboxes.values():
            outbox.sent.drain()
