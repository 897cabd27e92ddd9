"""What a rank on the CPU holds while a step runs."""

from __future__ import annotations

import torch

from planner.runtime.memory import LivePeak


def test_sparse_gradients_are_left_out_and_stop_nothing() -> None:
    table = torch.randn(50, 16, requires_grad=True)
    with LivePeak() as peak:
        rows = torch.nn.functional.embedding(torch.arange(8), table, sparse=True)
        rows.square().sum().backward()
    assert table.grad is not None
    assert table.grad.is_sparse
    assert peak.peak_bytes >= rows.nbytes
