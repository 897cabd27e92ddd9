"""Tensors between ranks: one channel per ordered pair, receives posted ahead, sends that do not wait.

What travels is the dense stretch of storage that a tensor spans, or, where its elements lie apart, these alone; the
receiver rebuilds shape and strides, so a tensor arrives laid out as it left (dropout draws in memory order; a kernel
may choose by strides). The first message of a kind tells its layout in a header; all later ones have the same. Sums of
tied gradients tell it each time, as there may be none in one step and one in the next.
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
        """Bytes of that."""
        return self.span * self.dtype.itemsize

    @property
    def apart(self) -> tuple[int, ...] | None:
        """The dimensions, outermost in memory first, where elements lie apart; None where they fill it, or share it."""
        order = sorted(range(len(self.shape)), key=lambda dim: self.strides[dim])
        reach, count = 1, 1
        for dim in order:
            size, stride = self.shape[dim], self.strides[dim]
            if size == 0 or (size > 1 and stride < reach):
                return None
            reach += (size - 1) * stride
            count *= size
        return tuple(reversed(order)) if reach > count else None

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


class _Wire(NamedTuple):
    """How a tensor travels: itself, or ``packed``, with its dimensions in this order and no gaps."""

    layout: Layout
    packed: tuple[int, ...] | None
    num_bytes: int

    @classmethod
    def of(cls, layout: Layout) -> _Wire:
        """That of tensors of a layout."""
        packed = layout.apart
        if packed is None:
            return cls(layout, None, layout.num_bytes)
        return cls(layout, packed, torch.Size(layout.shape).numel() * layout.dtype.itemsize)

    def empty(self, device: torch.device) -> torch.Tensor:
        """Memory to receive into."""
        dtype, shape, strides = self.layout
        if self.packed is None:
            return torch.empty_strided(shape, strides, dtype=dtype, device=device)
        return torch.empty([shape[dim] for dim in self.packed], dtype=dtype, device=device)

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """What goes over the wire of a tensor, from its first element on."""
        if tensor.is_conj() or tensor.is_neg():
            tensor = tensor.resolve_conj().resolve_neg()
        if self.packed is not None:
            return tensor.permute(self.packed).contiguous()
        if tensor.stride() == self.layout.strides:
            return tensor
        dtype, shape, strides = self.layout
        return torch.empty_strided(shape, strides, dtype=dtype, device=tensor.device).copy_(tensor)

    def unpack(self, received: torch.Tensor) -> torch.Tensor:
        """The tensor as it left."""
        if self.packed is None:
            return received
        dtype, shape, strides = self.layout
        made = torch.empty_strided(shape, strides, dtype=dtype, device=received.device)
        made.permute(self.packed).copy_(received)
        return made


# --- receiving --------------------------------------------------------------------------------------------------------


class _Inbox:
    """All messages of one rank to this one, step after step in the same order."""

    def __init__(self, channel: Receiver, kinds: Sequence[Kind], device: torch.device) -> None:
        self._channel = channel
        self._kinds = kinds
        self._device = device
        self._wires: dict[Kind, _Wire | None] = {}
        self._flying: dict[int, tuple[_Wire, torch.Tensor, Work | None] | None] = {}
        self._posted = 0

    def next_step(self) -> None:
        self._posted = 0

    def post(self, count: int) -> None:
        """Post the receives of the step's first ``count`` messages, as far as it is known how they travel."""
        while self._posted < count:
            kind = self._kinds[self._posted]
            if kind not in self._wires:
                return
            self._post(self._wires[kind], ahead=True)

    def take(self, place: int) -> torch.Tensor | None:
        """The tensor of the step's message number ``place``, waited for."""
        while self._posted <= place:
            kind = self._kinds[self._posted]
            if kind not in self._wires:
                self._wires[kind] = self._told()
            self._post(self._wires[kind], ahead=False)
            if kind.is_tied:
                del self._wires[kind]
        flying = self._flying.pop(place)
        if flying is None:
            return None
        wire, tensor, work = flying
        if work is not None:
            work.wait()
        return wire.unpack(tensor)

    def _post(self, wire: _Wire | None, *, ahead: bool) -> None:
        flying = None
        if wire is not None:
            tensor = wire.empty(self._device)
            work = self._channel.post(tensor, wire.num_bytes, ahead=ahead) if wire.num_bytes else None
            flying = (wire, tensor, work)
        self._flying[self._posted] = flying
        self._posted += 1

    def _told(self) -> _Wire | None:
        header = torch.empty(HEADER_NUMBERS, dtype=torch.int64, device=self._device)
        self._channel.post(header, header.nbytes, ahead=False).wait()
        numbers = header.tolist()
        return None if numbers[0] == _ABSENT else _Wire.of(Layout.from_numbers(numbers))


# --- sending ----------------------------------------------------------------------------------------------------------


class _Outbox:
    """This rank's messages to one other."""

    def __init__(self, channel: Sender, device: torch.device) -> None:
        self.channel = channel
        self._device = device
        self._wires: dict[Kind, _Wire | None] = {}

    def send(self, key: Key, tensor: torch.Tensor | None) -> None:
        """Hand a tensor over; does not wait."""
        kind = Kind(*key[:3])
        if kind.is_tied or kind not in self._wires:
            self._tell(kind, None if tensor is None else Layout.of(tensor))
        wire = self._wires[kind]
        if tensor is None or wire is None:
            assert (tensor is None) == (wire is None), f"{key.name} is there in some steps and not in others"
            return
        dtype, shape, _ = wire.layout
        if tensor.shape != shape or tensor.dtype is not dtype:
            raise TypeError(
                f"{key.name} is {tensor.dtype} {list(tensor.shape)} now and was {dtype} {list(shape)} "
                "before: what passes between stages must keep its shape"
            )
        if wire.num_bytes:
            self.channel.send(wire.pack(tensor), wire.num_bytes)

    def _tell(self, kind: Kind, layout: Layout | None) -> None:
        if layout is not None and (layout.dtype not in _DTYPES or len(layout.shape) > _MAX_DIMS):
            raise TypeError(f"{kind.name}: {layout.dtype} with {len(layout.shape)} dimensions cannot be sent")
        self._wires[kind] = None if layout is None else _Wire.of(layout)
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
        device: torch.device,
    ) -> None:
        """The links; ``inbox`` as a RankProgram has it.

        ``pairs``: all ordered pairs of ranks that exchange messages, in an order that is the same on every rank.
        """
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
                self._inboxes[sender] = _Inbox(channel, inbox[sender], device)

    @property
    def unsent_bytes(self) -> int:
        """Bytes handed over that have not left."""
        return sum(outbox.channel.held_bytes for outbox in self._outboxes.values())

    def post(self, sender: int, count: int) -> None:
        """Let the step's first ``count`` messages from a rank come in beside the compute, once it is known how."""
        self._inboxes[sender].post(count)

    def take(self, sender: int, place: int) -> torch.Tensor | None:
        """The tensor of message number ``place`` of this step from a rank, waited for; None where there is none."""
        return self._inboxes[sender].take(place)

    def send(self, receiver: int, key: Key, tensor: torch.Tensor | None) -> None:
        """Hand a tensor over to a rank; does not wait."""
        self._outboxes[receiver].send(key, tensor)

    def next_step(self) -> None:
        """The step's messages are all taken."""
        for inbox in self._inboxes.values():
            inbox.next_step()

    def close(self) -> None:
        """Wait until everything sent has left."""
        for outbox in self._outboxes.values():
            outbox.channel.drain()
