"""What each of two processes does that send each other tensors; they are started by tests/runtime/test_transport.py."""

from __future__ import annotations

import time
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from torch import Tensor

from planner.runtime.groups import Communicators
from planner.runtime.memory import LivePeak
from planner.runtime.messages import Key, Kind
from planner.runtime.transport import Layout, Transport

CPU = torch.device("cpu")
PATIENCE_S = 60
COUNT = 100_000
"""Floats of a tensor that is more than a few in the kernel's buffer."""


def tensors() -> dict[str, Tensor]:
    """One of every sort that can pass between stages."""
    torch.manual_seed(0)
    base = torch.randn(4, 6, 5)
    return {
        "dense": base,
        "permuted": base.permute(2, 0, 1),
        "channels last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "offset": base[1:3],
        "gaps": base[:, 2:4],
        "expanded": torch.randn(4, 1).expand(4, 7),
        "scalar": torch.tensor(3.5),
        "one element": torch.randn(1, 1, 1),
        "nothing": torch.zeros(0, 3),
        "bool": base > 0,
        "int64": torch.arange(10).view(2, 5).t(),
        "uint8": torch.arange(9, dtype=torch.uint8),
        "bfloat16": base.bfloat16(),
        "float16": base.half(),
        "float64": base.double(),
        "complex": torch.complex(base, base + 1),
        "conjugate": torch.complex(base, base + 1).conj(),
        "large": torch.randn(1_000_000),
    }


def transport_of(rank: int, port: int, names: list[str]) -> Transport:
    """Two ranks that send each other the same list of tensors."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=PATIENCE_S))
    return Transport(
        Communicators(store, device=CPU, one_node=True),
        prefix="test",
        rank=rank,
        pairs=((0, 1), (1, 0)),
        inbox={1 - rank: tuple(Kind("F", name, rank) for name in names)},
        device=CPU,
    )


def exchange(rank: int, port: int, ahead: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    sent = tensors()
    transport = transport_of(rank, port, list(sent))
    steps = 3
    faults = []
    for step in range(steps):
        for name, tensor in sent.items():
            transport.send(1 - rank, Key("F", name, 1 - rank, 0), tensor)
        # Taken in an order other than that in which they were sent, as stages of one rank may take them.
        places = sorted(range(len(sent)), key=lambda place: (place * 7 + step) % len(sent))
        for place in places:
            name = list(sent)[place]
            transport.post(1 - rank, min(len(sent), place + ahead))
            came = transport.take(1 - rank, place)
            if Layout.of(came) != Layout.of(sent[name]) or not torch.equal(came, sent[name]):
                faults.append(f"step {step}: {name}: {Layout.of(came)}, sent {Layout.of(sent[name])}")
        transport.next_step()
    transport.close()
    pipe.send(faults)


def reuse(rank: int, port: int, ahead: int, pipe: Connection) -> None:
    """Received tensors that are let go are gone, however they came; one that is kept keeps its bytes."""
    torch.set_num_threads(1)
    transport = transport_of(rank, port, ["x", "y"])
    kept: list[Tensor] = []
    with LivePeak() as live:
        for step in range(20):
            for place, name in enumerate("xy"):
                transport.post(1 - rank, min(2, place + ahead))
                transport.send(1 - rank, Key("F", name, 1 - rank, 0), torch.full((COUNT,), float(step)))
                came = transport.take(1 - rank, place)
                if step in (3, 7) and name == "x":
                    kept.append(came)
                del came
            transport.next_step()
    transport.close()
    pipe.send((live.peak_bytes, [tensor.unique().tolist() for tensor in kept]))


def reshape(rank: int, port: int, ahead: int, pipe: Connection) -> None:
    transport = transport_of(rank, port, ["x"])
    transport.send(1 - rank, Key("F", "x", 1 - rank, 0), torch.zeros(4, 2))
    transport.take(1 - rank, 0)
    try:
        transport.send(1 - rank, Key("F", "x", 1 - rank, 1), torch.zeros(5, 2))
    except TypeError as error:
        pipe.send(str(error))


def flood(rank: int, port: int, ahead: int, pipe: Connection) -> None:
    """Rank 0 sends far more than any buffer on the way takes, and hears nothing back that shows what has arrived."""
    torch.set_num_threads(1)
    names = [str(number) for number in range(12)]
    transport = transport_of(rank, port, names)
    bulk = 2_000_000
    if rank == 0:
        for number, name in enumerate(names):
            transport.send(1, Key("F", name, 1, 0), torch.full((bulk,), float(number)))
        until = time.monotonic() + PATIENCE_S
        while transport.unsent_bytes and time.monotonic() < until:
            time.sleep(0.01)
        pipe.send(transport.unsent_bytes == 0)
        transport.close()
        return
    came = []
    for place in range(len(names)):
        tensor = transport.take(0, place)
        assert tensor is not None
        came.append(tensor[:: bulk - 1].tolist())
    pipe.send(came == [[float(number)] * 2 for number in range(len(names))])
    transport.close()
