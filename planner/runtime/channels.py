"""One-way channels between two ranks: what is handed over at one end arrives at the other in the same order.

On the CPU a channel is a plain socket. The sender writes into it at once, from the thread that computes, and leaves to
another thread only what the kernel's buffer does not take. The receiver reads when it needs a message, or, where a
large one is to come before it is needed, has a thread read beside the compute. So a message of a few kilobytes costs
two system calls and wakes nobody but who waits for it: tens of microseconds, where gloo's send and receive take
hundreds. On CUDA it is an NCCL communicator of two.
"""

from __future__ import annotations

import ctypes
import secrets
import socket
import threading
from collections import deque
from queue import SimpleQueue
from typing import Any, Protocol

import torch
from torch.distributed.distributed_c10d import Store

from planner.runtime.groups import Communicators, LostContactError

BULKY_BYTES = 32 << 10
"""A message of more bytes may be read by a thread, beside the compute; waking that takes as long as reading less."""
KERNEL_BYTES = 4 << 20
"""What the kernel may hold of a channel at each end; it grants less where the system says so."""
_NO_WAIT = getattr(socket, "MSG_DONTWAIT", 0)
_PATIENCE_S = 600.0
"""How long a rank may take to come to its end of a channel."""


class Work(Protocol):
    """A message on its way."""

    def wait(self) -> Any:
        """Return when it is there (on CUDA: let the current stream wait)."""


class Sender(Protocol):
    """The end of a channel at which messages are handed over."""

    @property
    def held_bytes(self) -> int:
        """Of messages that have not left yet."""

    def send(self, tensor: torch.Tensor, num_bytes: int) -> None:
        """Hand over so many bytes from a tensor's first element on; does not wait. They must stay as they are."""

    def drain(self) -> None:
        """Wait until everything has left."""


class Receiver(Protocol):
    """The end of a channel at which messages arrive."""

    def post(self, tensor: torch.Tensor, num_bytes: int, *, ahead: bool) -> Work:
        """Let the next message be put where a tensor's first element is, and on from there; does not wait.

        ``ahead``: it will be waited for later, and is to come in beside the compute.
        """


def open_sender(communicators: Communicators, name: str, receiver: int) -> Sender:
    """This rank's end of the channel ``name``, which the other opens at the same time."""
    if communicators.device.type == "cpu":
        return SocketSender(communicators.store, name, receiver)
    return NcclSender(communicators.make(name, 0, 2), receiver)


def open_receiver(communicators: Communicators, name: str, sender: int) -> Receiver:
    """The other end."""
    if communicators.device.type == "cpu":
        return SocketReceiver(communicators.store, name, sender, communicators.host)
    return NcclReceiver(communicators.make(name, 1, 2), sender)


# --- CPU --------------------------------------------------------------------------------------------------------------


def _ready(made: socket.socket) -> socket.socket:
    made.settimeout(None)  # the launcher sees all ranks and tells a hang from a long action
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made


def _memory(tensor: torch.Tensor, num_bytes: int) -> ctypes.Array[ctypes.c_char]:
    """The bytes from a tensor's first element on; whoever uses them keeps the tensor."""
    return (ctypes.c_char * num_bytes).from_address(tensor.data_ptr())


class SocketSender:
    """Writes at once what the kernel's buffer takes; a thread writes the rest."""

    def __init__(self, store: Store, name: str, receiver: int) -> None:
        """Connect to the other end, which tells the store where it listens."""
        host, port, token = store.get(f"channel/{name}").decode().rsplit(":", 2)
        try:
            made = socket.create_connection((host, int(port)), timeout=_PATIENCE_S)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, KERNEL_BYTES)
            made.sendall(token.encode())
        except OSError as error:
            raise LostContactError(f"rank {receiver}", error) from None
        self._socket = _ready(made)
        self._receiver = receiver
        self._lock = threading.Lock()
        self._rest: SimpleQueue[tuple[memoryview, torch.Tensor] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self.held_bytes = 0

    def send(self, tensor: torch.Tensor, num_bytes: int) -> None:
        """Hand over a message."""
        memory = _memory(tensor, num_bytes)
        sent = 0
        if not self.held_bytes and _NO_WAIT:
            try:
                sent = self._socket.send(memory, _NO_WAIT)
            except BlockingIOError:
                pass
            except OSError as error:
                raise LostContactError(f"rank {self._receiver}", error) from None
            if sent == num_bytes:
                return
        self._count(num_bytes - sent)
        self._rest.put((memoryview(memory).cast("B")[sent:], tensor))
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_rest, name="sends", daemon=True)
            self._thread.start()

    def drain(self) -> None:
        """Wait until everything has left."""
        if self._thread is not None:
            self._rest.put(None)
            self._thread.join()
            self._thread = None

    def _count(self, num_bytes: int) -> None:
        with self._lock:
            self.held_bytes += num_bytes

    def _write_rest(self) -> None:
        while (entry := self._rest.get()) is not None:
            rest, tensor = entry
            try:
                self._socket.sendall(rest)
            except OSError:
                return  # the other rank is gone: this one's own next message, or the launcher, says so
            self._count(-len(rest))
            del entry, rest, tensor


class _Arrival:
    """A message that is to come; ``landed`` is locked until it is there, where a thread reads it."""

    __slots__ = ("_receiver", "error", "is_here", "landed", "num_bytes", "tensor")

    def __init__(self, receiver: SocketReceiver, tensor: torch.Tensor, num_bytes: int) -> None:
        self._receiver = receiver
        self.tensor: torch.Tensor | None = tensor
        self.num_bytes = num_bytes
        self.is_here = False
        self.landed: threading.Lock | None = None
        self.error: Exception | None = None

    def wait(self) -> None:
        """Return when the message is there."""
        if self.landed is None:
            self._receiver.read_until(self)
        else:
            self.landed.acquire()
            self.landed.release()
        if self.error is not None:
            raise self.error


class SocketReceiver:
    """Reads when a message is waited for; a thread reads bulky ones that are posted ahead."""

    def __init__(self, store: Store, name: str, sender: int, host: str) -> None:
        """Listen at an address of this machine, and wait for the other end: it knows the token in the store."""
        self._sender = sender
        token = secrets.token_hex(16)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            with socket.create_server((host, 0), family=family) as server:
                server.settimeout(_PATIENCE_S)
                server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, KERNEL_BYTES)  # accepted ones inherit it
                store.set(f"channel/{name}", f"{host}:{server.getsockname()[1]}:{token}")
                while True:
                    made, _ = server.accept()
                    made.settimeout(_PATIENCE_S)
                    if made.recv(len(token), socket.MSG_WAITALL) == token.encode():
                        break
                    made.close()
        except OSError as error:
            raise LostContactError(f"rank {sender}", error) from None
        self._socket = _ready(made)
        self._posted: deque[_Arrival] = deque()
        self._ahead: SimpleQueue[_Arrival] = SimpleQueue()
        self._last_left: _Arrival | None = None

    def post(self, tensor: torch.Tensor, num_bytes: int, *, ahead: bool) -> _Arrival:
        """Let the next message be put into a tensor."""
        arrival = _Arrival(self, tensor, num_bytes)
        self._posted.append(arrival)
        if (ahead and num_bytes > BULKY_BYTES) or not (self._last_left is None or self._last_left.is_here):
            while self._posted:
                self._leave(self._posted.popleft())
        return arrival

    def read_until(self, arrival: _Arrival) -> None:
        """Read all messages up to this one."""
        while not arrival.is_here and arrival.error is None:
            self._read(self._posted.popleft())

    def _leave(self, arrival: _Arrival) -> None:
        """Leave a message to the thread."""
        if self._last_left is None:
            threading.Thread(target=self._read_ahead, name="receives", daemon=True).start()
        self._last_left = arrival
        arrival.landed = threading.Lock()
        arrival.landed.acquire()
        self._ahead.put(arrival)

    def _read_ahead(self) -> None:
        while True:
            arrival = self._ahead.get()
            self._read(arrival)
            assert arrival.landed is not None
            arrival.landed.release()

    def _read(self, arrival: _Arrival) -> None:
        num_bytes = arrival.num_bytes
        assert arrival.tensor is not None
        memory = _memory(arrival.tensor, num_bytes)
        count = 0
        try:
            while count < num_bytes:
                rest = memoryview(memory)[count:] if count else memory
                came = self._socket.recv_into(rest, 0, socket.MSG_WAITALL)
                if not came:
                    raise ConnectionResetError("Connection closed by peer")
                count += came
        except OSError as error:
            arrival.error = LostContactError(f"rank {self._sender}", error)
        arrival.tensor = None  # whoever took it lets go of it when it will
        arrival.is_here = True


# --- CUDA -------------------------------------------------------------------------------------------------------------


def _row(tensor: torch.Tensor, num_bytes: int) -> torch.Tensor:
    """The bytes from a tensor's first element on."""
    return tensor.as_strided((num_bytes // tensor.itemsize,), (1,)).view(torch.uint8)


class NcclSender:
    """Messages live until NCCL, which is asked at the next one, has sent them."""

    def __init__(self, group: Any, receiver: int) -> None:
        self._group = group
        self._receiver = receiver
        self._flying: deque[tuple[Any, torch.Tensor]] = deque()
        self.held_bytes = 0

    def send(self, tensor: torch.Tensor, num_bytes: int) -> None:
        """Hand over a message."""
        flat = _row(tensor, num_bytes)
        try:
            work = self._group.send([flat], 1, 0)
        except RuntimeError as error:
            raise LostContactError(f"rank {self._receiver}", error) from None
        self._flying.append((work, flat))
        self.held_bytes += flat.nbytes
        while self._flying and self._flying[0][0].is_completed():
            self.held_bytes -= self._flying.popleft()[1].nbytes

    def drain(self) -> None:
        """Wait until everything has left."""
        for work, _ in self._flying:
            work.wait()
        self._flying.clear()
        self.held_bytes = 0


class NcclReceiver:
    """Receives are posted on the communicator's own stream."""

    def __init__(self, group: Any, sender: int) -> None:
        self._group = group
        self._sender = sender

    def post(self, tensor: torch.Tensor, num_bytes: int, *, ahead: bool) -> _NcclArrival:
        """Let the next message be put into a tensor."""
        try:
            return _NcclArrival(self._group.recv([_row(tensor, num_bytes)], 0, 0), self._sender)
        except RuntimeError as error:
            raise LostContactError(f"rank {self._sender}", error) from None


class _NcclArrival:
    __slots__ = ("_sender", "_work")

    def __init__(self, work: Any, sender: int) -> None:
        self._work = work
        self._sender = sender

    def wait(self) -> None:
        """Let the current stream wait for the message."""
        try:
            self._work.wait()
        except RuntimeError as error:
            raise LostContactError(f"rank {self._sender}", error) from None
