"""Data that is not the same on every rank ends a run before it trains on targets that belong to other inputs."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.launched import Command
from support.runs import plan_of, write_plan

from planner.runtime.data import is_checked

MODEL = """
import os
import numpy, torch
from torch import nn

def model():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 2))

def batch(size):
    return torch.randn(size, 4), torch.randn(size, 2)

def loss(output, target):
    return nn.functional.mse_loss(output, target)

"""
DATA = {
    "inputs": "yield torch.tensor(numpy.random.default_rng().random((size, 4))).float(), torch.ones(size, 2)",
    "target": "yield torch.ones(size, 4), torch.full((size, 2), float(os.getpid()))",
    "": "yield torch.randn(size, 4), torch.randn(size, 2)",
}


@pytest.mark.slow
@pytest.mark.parametrize("differing", DATA)
@pytest.mark.parametrize("shape", ["pipeline", "replicas"])
def test_every_rank_must_be_given_the_same(differing: str, shape: str, tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(f"{MODEL}\ndef data(size):\n    while True:\n        {DATA[differing]}\n")
    sizes = {"num_ranks": 2} if shape == "pipeline" else {"num_ranks": 1, "data": 2}
    write_plan(plan_of(path, **sizes), tmp_path / "plan.yaml")
    command = Command(tmp_path, "--steps", 2)
    try:
        code, words = command.end()
    finally:
        command.clear()
    assert code == (2 if differing else 0), words
    if differing:
        last = words.splitlines()[-1]
        assert "model.py:16: data() gives rank" in last
        assert f"({differing} of step 1)" in last
        assert "fixed seed" in last
    else:
        assert len(command.rows()) == 2


LATER = """
def data(size):
    generator = torch.Generator().manual_seed(3)
    for step in range(99):
        if step == 3:
            generator.seed()  # every rank's own from here on
        yield torch.randn(size, 4, generator=generator), torch.ones(size, 2)
"""


@pytest.mark.slow
def test_ranks_that_part_later_are_seen_too(tmp_path: Path) -> None:
    """At the next comparison."""
    path = tmp_path / "model.py"
    path.write_text(MODEL + LATER)
    write_plan(plan_of(path, num_ranks=1, data=2), tmp_path / "plan.yaml")
    command = Command(tmp_path, "--steps", 12)
    try:
        code, words = command.end()
    finally:
        command.clear()
    assert code == 2, words
    assert "(inputs of step 5)" in words.splitlines()[-1]


def test_data_is_compared_often_at_first_and_then_at_even_steps() -> None:
    assert [step for step in range(300) if is_checked(step)] == [0, 1, 2, 4, 8, 16, 32, 64, 128, 192, 256]


@pytest.mark.slow
def test_a_batch_may_have_no_target(tmp_path: Path) -> None:
    """As where the loss is in the model."""
    path = tmp_path / "model.py"
    text = MODEL.replace("torch.randn(size, 2)\n", "None\n").replace(
        "mse_loss(output, target)", "softplus(output).mean()"
    )
    path.write_text(text)
    write_plan(plan_of(path, num_ranks=2), tmp_path / "plan.yaml")
    command = Command(tmp_path, "--steps", 2)
    try:
        code, words = command.end()
    finally:
        command.clear()
    assert code == 0, words


LENGTHS = {
    "between ranks": "yield torch.ones(size, 3 + os.getpid() % 5, 4), torch.ones(size, 2)",
    "in the second step": "yield torch.ones(size, 5 if step == 1 else 3, 4), torch.ones(size, 2)",
}


@pytest.mark.slow
@pytest.mark.parametrize("changing", LENGTHS)
@pytest.mark.parametrize("options", [(), ("--verify",)])
def test_samples_of_other_shapes_are_called_so(changing: str, options: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    text = MODEL.replace(
        "torch.randn(size, 4)", "torch.randn(size, 9, 4)" if "ranks" in changing else "torch.randn(size, 3, 4)"
    )
    text = text.replace("mse_loss(output,", "mse_loss(output.mean(1),")
    path.write_text(f"{text}\ndef data(size):\n    for step in range(9):\n        {LENGTHS[changing]}\n")
    write_plan(plan_of(path, num_ranks=2), tmp_path / "plan.yaml")
    command = Command(tmp_path, "--steps", 3, *options)
    try:
        code, words = command.end()
    finally:
        command.clear()
    assert code == 2, words
    last = words.splitlines()[-1]
    assert f"model.py:16: data() gives samples of another shape in step {1 if 'ranks' in changing else 2}" in last
    assert "for [9, 4] (inputs)" in last if "ranks" in changing else "[5, 4] for [3, 4] (inputs)" in last
    assert "pad or cut" in last
