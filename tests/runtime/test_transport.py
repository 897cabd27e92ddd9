"""Tensors over real sockets: whatever their type and layout, they arrive laid out as they left."""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest
import torch.distributed as dist
from support import transports

from planner.runtime.server import start_method, start_server


def both(target: Any, ahead: int) -> list[Any]:
    """What two processes say."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    start_server()
    context = multiprocessing.get_context(start_method())
    pipes, processes = [], []
    for rank in (0, 1):
        ours, theirs = context.Pipe()
        process = context.Process(target=target, args=(rank, server.port, ahead, theirs))
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        said = []
        for pipe in pipes:
            assert pipe.poll(transports.PATIENCE_S), "the processes hang"
            said.append(pipe.recv())
        return said
    finally:
        for process in processes:
            process.kill()
            process.join()


@pytest.mark.parametrize("ahead", [0, 1, 4])
def test_tensors_arrive_as_they_left(ahead: int) -> None:
    assert both(transports.exchange, ahead) == [[], []]


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_what_was_received_is_gone_once_let_go(ahead: int) -> None:
    for peak_bytes, kept in both(transports.reuse, ahead):
        assert kept == [[3.0], [7.0]]
        most = 2 + max(1, ahead) + 1
        assert peak_bytes <= 1.05 * 4 * transports.COUNT * most, (
            "kept ones, posted ones and one sent, whatever the steps"
        )


def test_a_tensor_that_changes_its_shape_is_refused_by_name() -> None:
    for said in both(transports.reshape, 1):
        assert said == "x is torch.float32 [5, 2] now and was torch.float32 [4, 2] before: " + (
            "what passes between stages must keep its shape"
        )


def test_what_is_sent_is_let_go_even_where_nothing_comes_back() -> None:
    assert both(transports.flood, 2) == [True, True]
