"""Tensor ranks through the commands: sizes that no plan can have are each said in one line, and planned around."""

from __future__ import annotations

import dataclasses
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.command import pipeplan, refused
from support.plans import chain_profile

from planner.profile import Profile, read_profile, write_profile
from planner.profile.tensor_sizes import LEFT_OUT, left_out, noted
from tests.search.test_tensor import with_tensor_rows

MLP = """
import torch
from torch import nn

class Last(nn.Module):
    def forward(self, x):
        return x[0][:, -1]

def model():
    return nn.Sequential({layers})

def batch(size):
    return torch.randn(size, 12), torch.randn(size, 12)

def loss(output, target):
    return ((output - target) ** 2).mean()
"""
WHY = "no layer can be split over 3 tensor ranks (it has no linear layers)"


def split_profile() -> Profile:
    """Rows at T = 1, 2 and 4; what was asked for too, T = 3, could not be."""
    profile = with_tensor_rows(random.Random(0), chain_profile(6))
    software = profile.device.software | {LEFT_OUT: noted({3: WHY})}
    return dataclasses.replace(profile, device=dataclasses.replace(profile.device, software=software))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "500")
    write_profile(split_profile(), tmp_path / "p.json")
    (tmp_path / "twos.yaml").write_text("gpus_per_node: 2\n")
    return tmp_path


ASKED = ("p.json", "--batch", "8", "--virtual", "1", "--schedule", "1f1b")


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (("--gpus", "4", "--tensor", "5"), "the profile has no costs at tensor size 5 for all layers (it has 1, 2, 4)"),
        (("--gpus", "4", "--tensor", "3"), WHY),
        (("--gpus", "2", "--tensor", "4"), "4 tensor ranks are more than the 2 GPUs asked for"),
        (("--gpus", "4", "--tensor", "4", "--cluster", "twos.yaml"), "2 GPUs per node cannot hold groups of 4"),
        (("--gpus", "4", "--tensor", "2", "--pipeline", "4"), "pipeline 4 · data 1 · tensor 2 is 8 GPUs"),
        (("--gpus", "4", "--tensor", "4", "--data", "2"), "pipeline 1 · data 2 · tensor 4 is 8 GPUs"),
        (("--gpus", "4", "--tensor", "0"), "--tensor"),
        (("--gpus", "4", "--tensor", "2,two"), "--tensor"),
    ],
)
def test_what_no_plan_can_have_is_one_line(here: Path, words: tuple[str, ...], fault: str) -> None:
    assert fault in refused(pipeplan("solve", *ASKED, *words))
    assert not (here / "plan.yaml").exists()


@pytest.mark.parametrize(
    ("words", "faults"),
    [
        (("--gpus", "4"), {3: WHY}),
        (("--gpus", "4", "--tensor", "2,3"), {3: WHY}),
        (("--gpus", "2"), {3: "", 4: "4 tensor ranks are more than the 2 GPUs asked for"}),
        (("--gpus", "4", "--cluster", "twos.yaml"), {3: "", 4: "2 GPUs per node cannot hold groups of 4 tensor ranks"}),
        (("--gpus", "4", "--cluster", "twos.yaml", "--tensor", "2,4"), {4: "2 GPUs per node cannot"}),
    ],
)
def test_what_no_plan_can_have_is_planned_around(here: Path, words: tuple[str, ...], faults: dict[int, str]) -> None:
    answer = pipeplan("solve", *ASKED, *words)
    assert answer.code == 0
    said = {int(size): why for size, why in re.findall(r"remark: tensor size (\d+) is left out: (.*)", answer.err)}
    assert said.keys() == faults.keys()
    assert all(faults[size] in said[size] for size in faults)
    assert yaml.safe_load((here / "plan.yaml").read_text())["parallel"]["tensor"] not in faults


def edited(folder: Path, **sizes: Any) -> Path:
    """A plan whose sizes a person has changed."""
    assert pipeplan("solve", *ASKED, "--gpus", "4", "--tensor", "2", "--pipeline", "2").code == 0
    plan = yaml.safe_load((folder / "plan.yaml").read_text())
    plan["parallel"] |= sizes
    plan["parallel"]["gpus"] = 2 * plan["parallel"]["tensor"]
    path = folder / "edited.yaml"
    path.write_text(yaml.safe_dump(plan))
    return path


@pytest.mark.parametrize(
    ("sizes", "fault"),
    [
        ({"tensor": 3}, f"parallel.tensor: is 3, but {WHY}; plan with --tensor 1"),
        ({"tensor": 5}, "parallel.tensor: is 5, but the profile has no costs at tensor size 5"),
        ({"sequence": True}, "parallel.sequence: is true, but the profile was measured without sequence parallel"),
        ({"tensor": 1, "sequence": True}, "parallel.sequence: is true, but tensor is 1"),
    ],
)
def test_a_plan_of_what_the_profile_does_not_tell_is_one_line(here: Path, sizes: dict[str, Any], fault: str) -> None:
    path = edited(here, **sizes)
    for command in ("check", "show", "export --to megatron", "export --to torchtitan"):
        name, *words = command.split()
        line = refused(pipeplan(name, path, *words))
        assert line.startswith(f"{path}: ")
        assert fault in line


def test_a_plan_of_more_tensor_ranks_than_a_node_has_is_one_line(here: Path) -> None:
    path = edited(here, tensor=4)
    assert pipeplan("check", path).code == 0
    plan = yaml.safe_load(path.read_text())
    plan["cluster"]["gpus_per_node"] = 2
    path.write_text(yaml.safe_dump(plan))
    for command in ("check", "show", "simulate", "run"):
        assert "2 GPUs per node cannot hold groups of 4 tensor ranks" in refused(pipeplan(command, path))


def test_show_lists_what_cannot_be_split(here: Path) -> None:
    assert left_out(read_profile(here / "p.json")) == {3: WHY}
    assert f"T = 3: {WHY}" in pipeplan("show", "p.json").out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layers", "size", "share", "why"),
    [
        ("nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 12)", 2, 0.6, None),
        (
            *("nn.Linear(12, 18), nn.Unflatten(1, (3, 6)), nn.Softmax(2), nn.Flatten(), nn.Linear(18, 12)", 2, 0.8),
            "it is viewed as 3 x 6, and 3 does not divide by 2 (softmax runs over the split dimension)",
        ),
        ("nn.Linear(12, 16), nn.LayerNorm(16), nn.Linear(16, 12)", 2, 0.9, "layer_norm runs over the split dimension"),
        (
            "nn.Unflatten(1, (3, 4)), nn.Conv1d(3, 3, 1), nn.Flatten()",
            2,
            None,
            "conv1d has no rule that splits its weight",
        ),
        ("nn.Linear(12, 12)", 13, None, "its 12 outputs are fewer than 13 ranks"),
        (
            "nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 16), nn.Unflatten(0, (-1, 1)), "
            "nn.LSTM(16, 12, batch_first=True), Last()",
            *(2, 0.95, "lstm has no rule that splits its weight"),
        ),
        (
            "nn.Linear(12, 16), nn.Unflatten(1, (2, 8)), nn.TransformerEncoderLayer(8, 4, 16, batch_first=True), "
            "nn.Flatten(), nn.Linear(16, 12)",
            *(4, 0.6, None),
        ),
    ],
)
def test_what_is_split_is_told_from_profile_to_run(
    layers: str, size: int, share: float | None, why: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``share``: of the parameters, a rank holds less; None: nothing can be split, so plans have one rank."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "500")
    (tmp_path / "model.py").write_text(MLP.format(layers=layers))
    words = ("profile", "model.py", "--estimate", "h100-sxm", "--microbatch", "1", "-o", "p.json", "--json")
    document = json.loads(pipeplan(*words, "--tensor", f"1,{size}").out)
    assert (str(size) in document["tensor_left_out"]) == (share is None)
    shown = pipeplan("show", "p.json").out
    if why is not None:
        assert why in shown
    solved = pipeplan("solve", "p.json", "--gpus", size, "--batch", "4", "--tensor", size)
    if share is None:
        assert why is not None
        assert why in refused(solved)
        assert pipeplan("solve", "p.json", "--gpus", size, "--batch", "4").code == 0
    else:
        (told,) = re.findall(rf"T = {size}: a rank holds ([\d.]+)% of the parameters", shown)
        assert float(told) / 100 < share
        assert solved.code == 0
        run = pipeplan("run", "plan.yaml", "--steps", "2", "--verify", "--json")
        assert run.code == 0
        assert json.loads(run.out)["verify"]["loss_difference"] < 1e-5
