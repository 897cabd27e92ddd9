"""Weights made out of parameters alone: the split backward gives the bits of the whole one, and W does its part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from capture.pipelines import Pipeline, gpipe

from planner.capture import Capture, RandomKey, Stage, capture, load_model_file

_TEXT = """
import torch
from torch import nn
from torch.nn import functional as F

counts = {{"weight": 0, "input": 0}}


def op(name, key):
    made = torch.library.custom_op(name, lambda x: x * 1.5, mutates_args=(), schema="(Tensor x) -> Tensor")
    made.register_fake(lambda x: torch.empty_like(x))

    def backward(ctx, gradient):
        counts[key] += 1
        return gradient * 1.5

    made.register_autograd(backward)
    return made


on_weight, on_input = op("{name}::on_weight", "weight"), op("{name}::on_input", "input")


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(6, 6))
        self.g = nn.Parameter(torch.rand(6, 1))
        self.register_buffer("mask", torch.ones(6, 6).tril())

    def forward(self, x):
        {body}


def model():
    return nn.Sequential(*(Layer() for _ in range(3)))


def batch(size):
    return torch.randn(size, 6), torch.randn(size, 6)


def loss(output, target):
    return (output - target).square().mean()
"""

BODIES = {
    # body, how many weights wait for W in each layer
    "norm": ("return F.linear(x, self.g * self.w / self.w.norm(dim=1, keepdim=True))", 1),
    "mask": ("return torch.tanh(x @ (self.w * self.mask)) + self.g.sum()", 2),
    "operator": ("return on_input(x) + on_weight(self.w).sum(0) * self.g.sum()", 1),
    "read twice": ("w = on_weight(self.w); return torch.tanh(x @ w) + x @ w.t()", 1),
    "read plainly too": ("return x @ on_weight(self.w) + x * self.w[0]", 0),
    "only a view": ("return torch.einsum('bi,oi->bo', x, self.w.t())", 0),
    "not trained": ("return torch.tanh(x @ (self.w.detach() * self.mask)) + x * self.g[:, 0]", 0),
}


def captured(folder: Path, name: str) -> Capture:
    path = folder / f"{name.replace(' ', '_')}.py"
    path.write_text(_TEXT.format(name=f"derived_{path.stem}", body=BODIES[name][0]))
    return capture(load_model_file(path), microbatch_size=2)


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("recompute", [False, True])
def test_split_equals_whole(name: str, recompute: bool, tmp_path: Path) -> None:
    found = captured(tmp_path, name)
    batch = found.model_file.batch(8)
    cut = [[layer.name] for layer in found.layers]
    whole = Pipeline(found, cut).step(batch, 4, actions=gpipe(len(cut), 4))
    split = Pipeline(found, cut, recompute=recompute).step(batch, 4, actions=gpipe(len(cut), 4, split=True))
    assert [loss.item() for loss in split.losses] == [loss.item() for loss in whole.losses]
    for parameter, gradient in whole.gradients.items():
        other = split.gradients[parameter]
        assert (gradient is None) == (other is None)
        assert gradient is None or torch.equal(gradient, other), parameter


@pytest.mark.parametrize("name", BODIES)
def test_what_waits(name: str, tmp_path: Path) -> None:
    found = captured(tmp_path, name)
    programs = found.stages([[layer.name] for layer in found.layers])
    assert {len(program.derived) for program in programs} == {BODIES[name][1]}


def test_the_backward_of_the_weight_runs_in_w(tmp_path: Path) -> None:
    """And once: neither I nor W runs it again."""
    found = captured(tmp_path, "operator")
    counts: dict[str, Any] = found.model_file.functions["model"].__globals__["counts"]
    program = found.program([found.layers[1].name])
    stage = Stage(program, found.module)
    received = {made.name: torch.randn(made.shape) for made in program.receives}
    gradients = {made.name: torch.randn(made.shape) for made in program.sends}
    counts.update(weight=0, input=0)
    stage.forward(0, None, None, received, RandomKey(0, 0, 0), split=True)
    stage.backward_input(0, gradients, 1.0)
    assert counts == {"weight": 0, "input": 1}
    stage.backward_weight(0)
    assert counts == {"weight": 1, "input": 1}
