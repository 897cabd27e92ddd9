"""Bytes that live and bytes that are saved, against counts made by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from planner.measure.memory import CpuMeter, MemoryMeter, SavedTensors, bytes_of, meter_for


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    return str(request.param)


def test_live_and_peak(device: str) -> None:
    given = torch.ones(1024, device=device)  # 4 KiB, made before
    with meter_for(device) as meter:
        doubled = given * 2
        assert meter.live_bytes() == 4096
        view = doubled[:2].view(1, 2)  # no new storage
        assert meter.live_bytes() == 4096
        meter.reset_peak()
        total = ((given + 1) + doubled).sum()  # two of 4 KiB beside doubled
        assert meter.peak_bytes() >= 3 * 4096
        assert meter.live_bytes() < 2 * 4096
        del doubled, view, total
        assert meter.live_bytes() == 0


def test_in_place_ops_make_nothing() -> None:
    given = torch.zeros(1000)
    with CpuMeter() as meter:
        given.add_(1)
        given.view(10, 100).mul_(2)
        assert meter.peak_bytes() == 0


def test_what_backward_makes_counts() -> None:
    """A chain of squares at 4 KiB each: backward holds at most a few of them, and leaves the gradient."""
    leaf = torch.ones(1024, requires_grad=True)
    value = leaf
    for _ in range(8):
        value = value * value
    meter: MemoryMeter = CpuMeter()
    with meter:
        value.sum().backward()
        assert meter.peak_bytes() >= 2 * 4096
        assert meter.live_bytes() == 4096
    assert leaf.grad is not None


def test_saved_tensors_count_each_storage_once() -> None:
    """Linear saves its input and weight, ReLU its output; the view of it costs nothing more."""
    linear = nn.Linear(256, 256)
    x = torch.randn(8, 256, requires_grad=True)
    saved = SavedTensors()
    with saved.recording():
        y = linear(x).relu()
        z = y.view(4, 512)
        (z * z).sum()
    sizes = sorted(bytes_of(tensor) for tensor in saved.tensors.values())
    assert sizes == [8 * 256 * 4, 8 * 256 * 4, 256 * 256 * 4]
