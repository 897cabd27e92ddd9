"""Which parameters have a gradient may change from step to step and from replica to replica: one process's training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.runs import plan_of, run

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
