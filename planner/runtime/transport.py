"""Tensors between ranks: one channel per ordered pair, receives posted ahead, sends that do not wait.

What travels is the dense stretch of storage that a tensor spans; the receiver rebuilds shape and strides over it, so a
tensor arrives laid out as it left (dropout draws in memory order; a kernel may choose by strides). The first message of
a kind tells its layout in a header; all later ones have the same. Sums of tied gradients tell it each time, as there
may be none in one step and one in the next. A buffer is used again as soon as nothing shares its storage any more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from planner.runtime.channels import Receiver, Sender, Work, open_receiver, open_sender
from planner.runtime.groups import Communicators
from planner.runtime.messages import Key, Kind

_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32, torch.uint64,
)  # fmt: skip
_MAX_DIMS = 16
HEADER_NUMBERS = 2 + 2 * _MAX_DIMS
_ABSENT = -1
"""In place of a type: there is no such tensor."""


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

    def __init__(self, channel: Receiver, kinds: Sequence[Kind], window: int, device: torch.device) -> None:
        self._channel = channel
        self._kinds = kinds
        self._window = window
        self._device = device
        self._layouts: dict[Kind, tuple[Layout, int] | None] = {}
        self._flying: dict[int, tuple[Work | None, torch.Tensor | None]] = {}
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
            if kind.is_tied:
                del self._layouts[kind]
        work, tensor = self._flying.pop(number)
        self._taken += 1
        if work is not None:
            work.wait()
        return tensor

    def _post(self, told: tuple[Layout, int] | None, buffers: _Buffers) -> None:
        tensor = work = None
        if told is not None:
            layout, num_bytes = told
            if num_bytes:
                buffer = buffers.take(num_bytes)
                tensor = buffer.shaped(layout)
                work = self._channel.post(buffer.flat)
            else:
                tensor = torch.empty_strided(layout.shape, layout.strides, dtype=layout.dtype, device=self._device)
        self._flying[self._posted] = (work, tensor)
        self._posted += 1

    def _told(self) -> tuple[Layout, int] | None:
        header = torch.empty(HEADER_NUMBERS, dtype=torch.int64, device=self._device)
        self._channel.post(header).wait()
        numbers = header.tolist()
        if numbers[0] == _ABSENT:
            return None
        layout = Layout.from_numbers(numbers)
        return layout, layout.num_bytes


# --- sending ----------------------------------------------------------------------------------------------------------


class _Outbox:
    """This rank's messages to one other."""

    def __init__(self, channel: Sender, device: torch.device) -> None:
        self.channel = channel
        self._device = device
        self._layouts: dict[Kind, tuple[Layout, int] | None] = {}
        """With the bytes of each."""

    def send(self, key: Key, tensor: torch.Tensor | None) -> None:
        """Hand a tensor over; does not wait."""
        kind = Kind(*key[:3])
        if kind.is_tied or kind not in self._layouts:
            self._tell(kind, None if tensor is None else Layout.of(tensor))
        told = self._layouts[kind]
        if tensor is None or told is None:
            assert (tensor is None) == (told is None), f"{key.name} is there in some steps and not in others"
            return
        layout, num_bytes = told
        if tensor.stride() != layout.strides or tensor.shape != layout.shape or tensor.dtype is not layout.dtype:
            tensor = self._laid_out(tensor, layout, key.name)
        if tensor.is_conj() or tensor.is_neg():
            tensor = tensor.resolve_conj().resolve_neg()
        if num_bytes:
            self.channel.send(tensor, num_bytes)

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
        self._layouts[kind] = None if layout is None else (layout, layout.num_bytes)
        numbers = [_ABSENT] * HEADER_NUMBERS if layout is None else layout.numbers()
        header = torch.tensor(numbers, dtype=torch.int64, device=self._device)
        self.channel.send(header, header.nbytes)


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
        device: torch.device,
    ) -> None:
        """The links; ``inbox`` and ``windows`` as a RankProgram has them.

        ``pairs``: all ordered pairs of ranks that exchange messages, in an order that is the same on every rank.
        """
        self._buffers = _Buffers(device)
        self._came: set[int] = set()
        self._inboxes: dict[int, _Inbox] = {}
        self._outboxes: dict[int, _Outbox] = {}
        for sender, receiver in pairs:
            if rank not in (sender, receiver):
                continue
            name = f"{prefix}/{sender}-{receiver}"
            if rank == sender:
                self._outboxes[receiver] = _Outbox(open_sender(communicators, name, receiver), device)
            else:
                channel = open_receiver(communicators, name, sender)
                self._inboxes[sender] = _Inbox(channel, inbox[sender], windows[sender], device)

    @property
    def message_bytes(self) -> int:
        """Bytes in receive buffers and in sends that have not left."""
        return self._buffers.total_bytes + sum(outbox.channel.held_bytes for outbox in self._outboxes.values())

    def begin(self, num_steps: int) -> None:
        """Expect the messages of ``num_steps`` more steps."""
        for inbox in self._inboxes.values():
            inbox.begin(num_steps)
            inbox.post_ahead(self._buffers)

    def take(self, sender: int, place: int) -> torch.Tensor | None:
        """The tensor of message number ``place`` of this step from a rank, waited for; None where there is none."""
        tensor = self._inboxes[sender].take(place, self._buffers)
        self._came.add(sender)
        return tensor

    def post_ahead(self) -> None:
        """After messages were taken: post the receives that have room now."""
        for sender in self._came:
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

    def close(self) -> None:
        """Wait until everything sent has left."""
        for outbox in self._outboxes.values():
            outbox.channel.drain()
