"""Which parameters have a gradient may change from step to step and from replica to replica: one process's training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.runs import captured, plan_of, run

MODEL = """
import torch
from torch import nn

class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
    def forward(self, x):
        return x + self.experts[int(x[0, 0].round()) % 3](x)

def model():
    return nn.Sequential(Experts(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 2))

def batch(size):
    return torch.randn(size, 6), torch.randn(size, 2)

def loss(output, target):
    return nn.functional.mse_loss(output, target)

def optimizer(params):
    return torch.optim.AdamW(params, lr=1e-2)

CHOSEN = [[0, 0, 0, 0], [1, 1, 1, 1], [0, 0, 1, 1], [2, 2, 0, 2], [1, 1, 1, 0]]  # the expert of each micro-batch of two

def data(size):
    generator = torch.Generator().manual_seed(5)
    for step in range(99):
        x = torch.randn(size, 6, generator=generator)
        x[:, 0] = torch.tensor(CHOSEN[step % 5]).float().repeat_interleave(2)[:size]
        yield x, torch.randn(size, 2, generator=generator)
"""


@pytest.mark.slow
@pytest.mark.parametrize("clip", ["", "clip_norm = 0.05"])
@pytest.mark.parametrize("shape", ["pipeline", "replicas", "replicas of shares", "replicas of wholes"])
def test_experts_that_take_turns(shape: str, clip: str, tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    text = MODEL.replace("AdamW", "Adafactor") if shape == "replicas of wholes" else MODEL
    path.write_text(f"{text}\n{clip}\n")
    sizes: dict[str, Any] = {"num_ranks": 2} if shape == "pipeline" else {"num_ranks": 1, "data": 2, "microbatches": 2}
    plain = run(plan_of(path, **sizes), tmp_path, steps=5, verify=True).result
    assert plain.verify is not None
    assert plain.verify.equal, plain.verify
    assert plain.verify.eager_difference is not None
    assert plain.verify.eager_difference < 1e-5
    whole = run(plan_of(path, num_ranks=1), tmp_path, steps=5).result
    assert plain.losses == pytest.approx(whole.losses, rel=1e-5)
    if shape.startswith("replicas of"):
        sharded = run(plan_of(path, zero1=True, **sizes), tmp_path, steps=5).result
        assert sharded.losses == pytest.approx(plain.losses, rel=1e-6)
        if not clip:
            assert sharded.weights_sha256 == plain.weights_sha256


TIED = """
import torch
from torch import nn

WIDTH = 12

class Sometimes(nn.Module):
    def __init__(self, weight, column):
        super().__init__()
        self.weight, self.column = weight, column
    def forward(self, x):
        return x + nn.functional.linear(x, self.weight) if x[0, self.column] > 0 else x * 1.0

class Through(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
    def forward(self, x):
        return torch.cat([x[:, :3], self.linear(x[:, 3:11]).tanh(), x[:, 11:]], 1)

class Kept(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module
    def forward(self, x):
        return torch.cat([x[:, :3], self.module(x)[:, 3:]], 1)

def model():
    weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)
    users = [Kept(Sometimes(weight, column)) for column in range(3)]
    return nn.Sequential(users[0], Through(), users[1], Through(), users[2], nn.Linear(WIDTH, 2))

def batch(size):
    return torch.randn(size, WIDTH), torch.randn(size, 2)

def loss(output, target):
    return nn.functional.mse_loss(output, target)

def optimizer(params):
    return torch.optim.AdamW(params, lr=1e-2)

USED = [(1, 0, 1), (0, 0, 0), (1, 0, 0), (0, 1, 1), (0, 0, 1), (1, 1, 0)]  # in each step, by which of the three

def data(size):
    generator = torch.Generator().manual_seed(5)
    for step in range(99):
        x = torch.randn(size, WIDTH, generator=generator)
        x[:, :3] = 2 * torch.tensor(USED[step % 6]).float() - 1
        yield x, torch.randn(size, 2, generator=generator)
"""
CUT = [("0",), ("1", "2"), ("3", "4", "5")]


def tied_plan(path: Path, **sizes: Any) -> Any:
    """A stage for each user of the tied parameter, each on a rank of its own."""
    layers = [layer.name for layer in captured(path, 2).layers]
    cut = [[name for name in layers if name.split(".")[0] in row] for row in CUT]
    return plan_of(path, num_ranks=3, cut=cut, **sizes)


@pytest.mark.slow
@pytest.mark.parametrize("data", [1, 2])
@pytest.mark.parametrize("key", ["", "clip_norm = 0.05"])
def test_a_tied_parameter_that_each_user_reaches_in_some_steps_only(key: str, data: int, tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(f"{TIED}\n{key}\n")
    plan = tied_plan(path, data=data, microbatches=4 // data)
    verified = run(plan, tmp_path, steps=6, verify=True).result.verify
    assert verified is not None
    assert verified.equal, verified
    assert verified.eager_difference is not None
    assert verified.eager_difference < 1e-5


IN_PLACE = """
class Scaled(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {})
    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad.mul_(-1e-2))

def optimizer(params):
    return Scaled(params)

USED = [(1, 0, 0), (0, 1, 1)] * 3
"""


@pytest.mark.slow
def test_a_tied_sum_leaves_as_it_was_whatever_an_optimizer_does_to_it_meanwhile(tmp_path: Path) -> None:
    """A sum too large for the kernel's buffers is still on its way when its own rank's optimizer works in its memory.

    Clipping and float16's check of overflows would wait for the other ranks before, so there are none. Only the first
    rank's user makes a gradient in the first step; what the others then have of it shows in the second.
    """
    path = tmp_path / "model.py"
    path.write_text(TIED.replace("WIDTH = 12", "WIDTH = 3000") + IN_PLACE)
    verified = run(tied_plan(path), tmp_path, steps=3, verify=True).result.verify
    assert verified is not None
    assert verified.equal, verified
