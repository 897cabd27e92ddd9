"""What profile says of its figures on the terminal."""

from __future__ import annotations

import dataclasses

import pytest
from rich.console import Console

from planner.capture import load_model_file
from planner.measure import Asked, Measured
from planner.measure.estimate import estimate_profile
from planner.report.profiled import WORTH_SAYING, report

MODEL = """
import torch
from torch import nn

def model():
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
def batch(size):
    return torch.randn(size, 4), torch.randn(size, 4)
def loss(output, target):
    return (output - target).square().mean()
"""


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    folder = tmp_path_factory.mktemp("profiled")
    path = folder / "model.py"
    path.write_text(MODEL)
    asked = Asked(microbatch_sizes=(1, 2), device="cpu", granularity="block", neighbours=0, estimate="a100-80gb")
    return estimate_profile(load_model_file(path), asked, folder=folder, progress=lambda what, done: None)


def said_of(measured: Measured) -> str:
    lines: list[str] = []
    report(Console(quiet=True), lines.append, measured, None, None)
    return "\n".join(lines)


def test_what_splitting_a_backward_costs_is_said_where_it_shows(measured: Measured) -> None:
    assert "split into I and W" not in said_of(measured)
    assert "split into I and W" not in said_of(dataclasses.replace(measured, split_cost=(WORTH_SAYING, -0.2)))
    said = said_of(dataclasses.replace(measured, split_cost=(0.05, 0.14)))
    assert "a backward split into I and W takes 14% longer here than F and B (micro-batch size 2)" in said
