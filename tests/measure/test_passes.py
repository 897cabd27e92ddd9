"""Stages as they are measured: what each is handed is what a run hands it."""

from __future__ import annotations

import itertools
from pathlib import Path

import torch
from torch import Tensor

from planner.capture import Capture
from planner.measure.passes import Pipeline
from tests.capture.captures import captured_at

SEEN_AND_LEARNT_FROM = """
import torch
from torch import nn
from torch.nn import functional

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.made, self.judge, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1)
    def forward(self, x):
        made = self.made(x)
        real = self.judge(x)
        seen = self.judge(made.detach())
        learnt = self.judge(made)
        later = self.last(seen * real * made.detach())
        return later + self.last(learnt * made)
def model():
    return Net()
def batch(size):
    return torch.randn(size, 8), torch.randn(size, 1)
def loss(output, target):
    return functional.mse_loss(output, target)
"""
"""A tensor that one layer reads without a gradient, between others that send one back."""


def _gradients(captured: Capture, cut: list[list[str]]) -> dict[str, Tensor]:
    pipeline = Pipeline(captured, cut, captured.batch)
    assert len(pipeline.handed()) == len(cut)
    pipeline.drop_gradients()
    pipeline.train()
    return {
        f"{leaf.parameter} in {leaf.layer}": tensor.grad
        for stage in pipeline.stages
        for leaf, tensor in zip(stage.program.leaves, stage._leaves, strict=True)
        if tensor.grad is not None
    }


def test_gradients_pass_by_stages_that_only_look(tmp_path: Path) -> None:
    path = tmp_path / "seen.py"
    path.write_text(SEEN_AND_LEARNT_FROM)
    captured = captured_at(path)
    names = [layer.name for layer in captured.layers]
    assert len(names) == 6
    whole = _gradients(captured, [names])
    for count in range(1, len(names)):
        for bounds in itertools.combinations(range(1, len(names)), count):
            cut = [names[first:last] for first, last in itertools.pairwise((0, *bounds, len(names)))]
            found = _gradients(captured, cut)
            assert found.keys() == whole.keys()
            assert all(torch.equal(found[key], whole[key]) for key in whole), cut
