"""From a model file to trained weights, by commands and files alone: what export refuses, and replicas."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

FUNCTION = """
class Tripled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, gradient):  # not that of the forward, so that a lost one shows
        x, weight = ctx.saved_tensors
        return 3 * gradient * weight, (3 * gradient * x).sum((0, 1))

class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x):
        return Tripled.apply(x, self.weight)
"""

BRANCH = """
class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.one(x) if x.sum() > 0 else self.other(x)
"""

NET = """
import torch
from torch import nn

WIDTH = 16
global_batch = 8
{part}
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.part = nn.LayerNorm(WIDTH), Part()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(self.part(self.up(self.norm(x))).relu())

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.leave = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x)

def model():
    return Net()

def batch(size):
    return torch.randn(size, 3, WIDTH), torch.randn(size, 3, WIDTH)

def loss(output, target):
    return (output - target).square().mean()
"""


def _run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "planner", *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("part", [FUNCTION, BRANCH], ids=["autograd_function", "branch"])
def test_what_export_cannot_take_is_profiled_cut_and_trained(part: str, tmp_path: Path) -> None:
    """Two stages, each with such modules: the run equals one process, and that equals the user's own loop."""
    (tmp_path / "net.py").write_text(NET.format(part=part))
    profiled = _run(tmp_path, "profile", "net.py", "--device", "cpu", "--microbatch", "2", "--json")
    assert profiled.returncode == 0, profiled.stderr
    layers = json.loads(profiled.stdout)["profile"]["layers"]
    assert [layer["name"] for layer in layers if layer["kind"] == "Part"] == [f"blocks.{n}.part" for n in range(4)]
    solved = _run(tmp_path, "solve", "--gpus", "2", "--pipeline", "2", "--data", "1")
    assert solved.returncode == 0, solved.stderr
    stages = yaml.safe_load((tmp_path / "plan.yaml").read_text())["stages"]
    assert len(stages) >= 2
    done = _run(tmp_path, "run", "plan.yaml", "--steps", "2", "--verify", "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)["verify"]
    assert found["equal"]
    assert found["loss_difference"] == found["largest_weight_difference"] == 0
    assert found["eager_difference"] == 0


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_replicas_of_a_pipeline_train_a_tied_model_as_one_process(schedule: str, tmp_path: Path) -> None:
    """D = 2 and P = 2, with dropout: the embedding and the head share their weights over two ranks."""
    assert _run(tmp_path, "example", "gpt").returncode == 0
    path = tmp_path / "gpt.py"
    text = path.read_text()
    for before, after in (("TIED = False", "TIED = True"), ("BLOCKS = 12", "BLOCKS = 4")):
        assert before in text
        text = text.replace(before, after)
    path.write_text(text)
    profiled = _run(tmp_path, "profile", "gpt.py", "--device", "cpu", "--microbatch", "1")
    assert profiled.returncode == 0, profiled.stderr
    asked = ("--gpus", "4", "--pipeline", "2", "--data", "2", "--batch", "8", "--schedule", schedule)
    solved = _run(tmp_path, "solve", *asked)
    assert solved.returncode == 0, solved.stderr
    plan = yaml.safe_load((tmp_path / "plan.yaml").read_text())
    assert (plan["parallel"]["pipeline"], plan["parallel"]["data"]) == (2, 2)
    assert plan["schedule"]["name"] == schedule
    done = _run(tmp_path, "run", "plan.yaml", "--steps", "3", "--verify", "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)["verify"]
    assert found["equal"], found
    assert found["loss_difference"] == found["largest_weight_difference"] == 0
    assert found["eager_difference"] < 1e-5
