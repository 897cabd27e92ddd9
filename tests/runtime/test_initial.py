"""Training that starts from files of weights in place of those that model() draws."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.command import pipeplan
from support.runs import EVERYTHING, plan_of, run
from torch import Tensor, nn

from planner.capture import RandomStream, load_model_file
from planner.errors import InputError
from planner.plan import write_plan
from planner.runtime.initial import fill


class Tied(nn.Module):
    """Two names of one parameter, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight


def drawn(seed: int) -> dict[str, Tensor]:
    """Another draw of the model's weights, each once."""
    with RandomStream(seed):
        model = load_model_file(EVERYTHING).model()
    return {name: value.detach().contiguous() for name, value in model.named_parameters()}


def test_a_parameter_stands_under_any_of_its_names(tmp_path: Path) -> None:
    state = {name: torch.rand_like(value) for name, value in Tied().state_dict().items() if value.is_floating_point()}
    for name in ("embedding.weight", "head.weight"):
        module = Tied()
        kept = {key: value.clone() for key, value in state.items() if key == name or "norm" in key}
        save_file(kept | {"other": torch.ones(1)}, tmp_path / "one.safetensors")
        fill(module, tmp_path / "one.safetensors")
        assert torch.equal(module.embedding.weight, kept[name])
        assert module.head.weight is module.embedding.weight
        assert torch.equal(module.norm.running_mean, kept["norm.running_mean"])
        assert module.norm.num_batches_tracked.item() == 0


def test_a_folder_of_files_in_another_precision(tmp_path: Path) -> None:
    state = {name: value.detach().to(torch.bfloat16) for name, value in Tied().named_parameters()}
    for number, (name, value) in enumerate(state.items()):
        save_file({name: value}, tmp_path / f"model-{number}.safetensors")
    module = Tied()
    fill(module, tmp_path)
    assert module.head.weight.dtype is torch.float32
    assert torch.equal(module.head.weight, state["embedding.weight"].float())


WRONG: dict[str, tuple[dict[str, dict[str, Tensor]], str]] = {
    "a name is missing": (
        {"a.safetensors": {"model.norm.bias": torch.ones(3)}},
        "lacks .*; holds others: model.norm.bias",
    ),
    "another shape": (
        {
            "a.safetensors": {
                "embedding.weight": torch.ones(5, 4),
                "norm.weight": torch.ones(3),
                "norm.bias": torch.ones(3),
            }
        },
        r"embedding.weight is float32 \[5, 4\], the model's float32 \[5, 3\]",
    ),
    "whole numbers": (
        {
            "a.safetensors": {
                name: torch.ones(value.shape, dtype=torch.int8) for name, value in Tied().named_parameters()
            }
        },
        r"is int8 \[5, 3\]",
    ),
    "a name twice": (
        {"a.safetensors": {"norm.bias": torch.ones(3)}, "b.safetensors": {"norm.bias": torch.ones(3)}},
        "norm.bias stands in a.safetensors and in b.safetensors",
    ),
    "no file": ({}, "holds no safetensors file"),
}


@pytest.mark.parametrize("case", WRONG)
def test_files_of_another_model_are_refused(case: str, tmp_path: Path) -> None:
    files, words = WRONG[case]
    for name, tensors in files.items():
        save_file(tensors, tmp_path / name)
    with pytest.raises(InputError, match=words):
        fill(Tied(), tmp_path)


def test_pickles_are_not_read(tmp_path: Path) -> None:
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"only pytorch_model.bin"):
        fill(Tied(), tmp_path)


def test_half_a_file_is_told(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({name: value.detach() for name, value in Tied().named_parameters()}, path)
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(InputError, match="is no whole safetensors file"):
        fill(Tied(), path)


def test_a_file_that_is_not_there_is_bad_input(tmp_path: Path) -> None:
    write_plan(plan_of(EVERYTHING, num_ranks=1), tmp_path / "plan.yaml")
    told = pipeplan("run", tmp_path / "plan.yaml", "--initial", tmp_path / "none.safetensors")
    assert told.code == 2
    assert "none.safetensors" in told.err


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["whole", "own"])
def test_every_plan_starts_from_them(weights: str, tmp_path: Path) -> None:
    save_file(drawn(7), tmp_path / "drawn.safetensors")
    options: dict[str, Any] = {"initial": tmp_path / "drawn.safetensors"}
    alone = run(plan_of(EVERYTHING, num_ranks=1), tmp_path, verify=True, **options).result
    assert alone.verify is not None
    assert alone.verify.equal
    cut = run(plan_of(EVERYTHING, num_ranks=3), tmp_path, weights=weights, **options).result
    assert cut.losses == alone.losses
    assert cut.weights_sha256 == alone.weights_sha256
    assert run(plan_of(EVERYTHING, num_ranks=1), tmp_path).result.losses[0] != alone.losses[0]


@pytest.mark.slow
def test_a_checkpoint_is_a_folder_of_weights(tmp_path: Path) -> None:
    plan = plan_of(EVERYTHING, num_ranks=2)
    first = run(plan, tmp_path, steps=2, checkpoints=tmp_path / "kept").result
    options: dict[str, Any] = {"initial": tmp_path / "kept" / "latest", "steps": 1}
    again = run(plan, tmp_path, **options).result
    other = run(plan_of(EVERYTHING, num_ranks=1), tmp_path, **options).result
    assert again.losses == other.losses
    assert again.losses[0] != first.losses[0]


@pytest.mark.slow
def test_a_loss_that_is_no_number_is_told(tmp_path: Path) -> None:
    weights = {name: torch.full_like(value, float("nan")) for name, value in drawn(7).items()}
    save_file(weights, tmp_path / "nan.safetensors")
    write_plan(plan_of(EVERYTHING, num_ranks=2), tmp_path / "plan.yaml")
    log = tmp_path / "log.jsonl"
    told = pipeplan(
        "run", tmp_path / "plan.yaml", "--initial", tmp_path / "nan.safetensors", "--steps", 2, "--log", log
    )
    assert told.code == 0
    assert told.err.count("the loss of step 1 is nan") == 1
    assert "loss not finite at first, not finite at last" in told.out
    assert [json.loads(line)["loss"] for line in log.read_text().splitlines()] == [None, None]
