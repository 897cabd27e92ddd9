"""The least that any runtime takes here: a model's layers, plain autograd and sockets, nothing checked or kept.

    bare.py MODEL STEPS PLACES ORDERS

One layer of an nn.Sequential a stage. PLACES: each stage's rank; ORDERS: each rank's actions (F and B alone); both as
JSON. Writes the moments at which the steps of each rank ended, as JSON.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from planner.allocator import keep_freed_memory
from planner.capture import ModelFile, load_model_file
from planner.schedules import Letter, parse_action

Links = dict[tuple[int, int], tuple[socket.socket, socket.socket]]


def main() -> None:
    """Start a process a rank, by fork, so that it has the sockets."""
    model_file, num_steps = load_model_file(Path(sys.argv[1])), int(sys.argv[2])
    places, orders = json.loads(sys.argv[3]), json.loads(sys.argv[4])
    torch.set_num_threads(1)
    keep_freed_memory()
    last = len(places) - 1
    links = {pair: _connected() for k in range(last) for pair in ((k, k + 1), (k + 1, k))}
    pipes = []
    for order in orders:
        reading, writing = os.pipe()
        if os.fork() == 0:
            os.write(writing, json.dumps(_train(model_file, order.split(), links, last, num_steps)).encode())
            os._exit(0)
        os.close(writing)
        pipes.append(reading)
    sys.stdout.write(json.dumps([json.loads(os.fdopen(pipe).read()) for pipe in pipes]))


def _connected() -> tuple[socket.socket, socket.socket]:
    """The sending and the receiving end of a link from one stage to another."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = socket.create_connection(server.getsockname())
        receiver, _ = server.accept()
    sender.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sender, receiver


def _memory(tensor: Tensor) -> Any:
    return (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())


def _train(model_file: ModelFile, order: list[str], links: Links, last: int, num_steps: int) -> list[float]:
    layers: Any = model_file.model()
    inputs, target = model_file.batch(1)
    gc.collect()
    gc.freeze()
    ends = []
    for _ in range(num_steps):
        held: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        for k, letter, m in map(parse_action, order):
            if letter is Letter.FORWARD:
                x = torch.empty_like(inputs) if k else inputs.detach()
                if k:
                    links[k - 1, k][1].recv_into(_memory(x), 0, socket.MSG_WAITALL)
                    x.requires_grad_()
                y = layers[k](x)
                if k < last:
                    links[k, k + 1][0].send(_memory(y.detach()))
                held[k, m] = x, model_file.loss(y, target) if k == last else y
            else:
                x, y = held.pop((k, m))
                gradient = torch.empty_like(y)
                if k < last:
                    links[k + 1, k][1].recv_into(_memory(gradient), 0, socket.MSG_WAITALL)
                torch.autograd.backward(y, gradient if k < last else None)
                if k:
                    assert x.grad is not None
                    links[k, k - 1][0].send(_memory(x.grad))
        ends.append(time.perf_counter())
    return ends


if __name__ == "__main__":
    main()
