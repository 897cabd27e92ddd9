"""What profile says of its figures on the terminal."""

from __future__ import annotations

import dataclasses

import pytest
from rich.console import Console

from planner.capture import load_model_file
from planner.measure import Asked, Measured
from planner.measure.estimate import estimate_profile
from planner.profile import Accuracy, Cost
from planner.report.profiled import report

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


def with_split_costs(measured: Measured, parts: dict[int, float]) -> Measured:
    def dearer(cost: Cost) -> Cost:
        whole = cost.forward_s + cost.backward_input_s + cost.backward_weight_s
        return dataclasses.replace(cost, split_s=parts[cost.microbatch_size] * whole)

    profile = measured.profile
    layers = tuple(dataclasses.replace(one, costs=tuple(map(dearer, one.costs))) for one in profile.layers)
    return dataclasses.replace(measured, profile=dataclasses.replace(profile, layers=layers))


def test_what_splitting_a_backward_costs_is_said_where_it_shows(measured: Measured) -> None:
    assert "split into I and W" not in said_of(measured)
    said = said_of(with_split_costs(measured, {1: 0.05, 2: 0.14}))
    assert "F and a backward split into I and W take 14% longer here than F and B (micro-batch size 2)" in said


@pytest.mark.parametrize("entry_s", [0.0, 2e-4])
def test_layers_that_foretell_runs_of_them_badly_are_said_once(measured: Measured, entry_s: float) -> None:
    errors = {1: 0.07, 2: 0.09}
    accuracy = tuple(
        Accuracy(microbatch_size=size, median_error=error, largest_error=-error) for size, error in errors.items()
    )
    profile = dataclasses.replace(measured.profile, accuracy=accuracy)
    said = said_of(dataclasses.replace(measured, profile=profile, entry_s=(entry_s, entry_s)))
    assert said.count("layers foretell runs of layers to 9.0% only (micro-batch size 2)") == 1
    assert ("entering a stage takes 200 µs" in said) == (entry_s > 0)
    assert "foretell runs of layers to 7.0%" not in said
    assert "the machine was busy" in said
