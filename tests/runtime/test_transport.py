"""Tensors over real sockets: whatever their type and layout, they arrive laid out as they left."""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest
import torch.distributed as dist
from support import transports


def both(target: Any, window: int) -> list[Any]:
    """What two processes say."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for rank in (0, 1):
        ours, theirs = context.Pipe()
        process = context.Process(target=target, args=(rank, server.port, window, theirs))
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


@pytest.mark.parametrize("window", [1, 4])
def test_tensors_arrive_as_they_left(window: int) -> None:
    assert both(transports.exchange, window) == [[], []]


def test_buffers_are_used_again_once_let_go() -> None:
    for message_bytes, kept in both(transports.reuse, 2):
        assert kept == [[3.0], [7.0]]
        assert message_bytes <= 4000 * (2 + 2 + 1), "kept ones, posted ones and one between, whatever the steps"


def test_a_tensor_that_changes_its_shape_is_refused_by_name() -> None:
    for said in both(transports.reshape, 1):
        assert said == "x is torch.float32 [5, 2] now and was torch.float32 [4, 2] before: " + (
            "what passes between stages must keep its shape"
        )


def test_what_is_sent_is_let_go_even_where_nothing_comes_back() -> None:
    assert both(transports.flood, 2) == [True, True]
