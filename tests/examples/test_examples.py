"""The model files that ship: they follow the contract, hold what they promise, and learn."""

from __future__ import annotations

import runpy
import shutil
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from planner.examples import example_names, example_summary, example_text


@pytest.fixture(scope="module", params=example_names())
def example(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """An example run from another folder, as a user's own copy."""
    path = tmp_path_factory.mktemp("copy") / f"{request.param}.py"
    path.write_text(example_text(request.param), encoding="utf-8")
    torch.set_num_threads(1)
    return runpy.run_path(str(path))


def test_names_and_first_lines_need_no_torch() -> None:
    assert example_names() == ("gpt", "unet", "vgg16")
    assert all(example_summary(name).endswith(".") for name in example_names())
    code = "import sys, planner.examples as e; e.example_summary('gpt'); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_nothing_in_them_is_about_pipelines() -> None:
    for name in example_names():
        code = example_text(name).lower()
        assert not any(word in code for word in ("pipeline", "stage", "micro", "import planner", "from planner"))


@pytest.mark.slow
def test_the_loss_falls_within_twenty_steps(example: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = example["model"]()
    optimizer = example["optimizer"](model.parameters())
    losses = []
    for inputs, target in islice(example["data"](example["global_batch"]), 20):
        optimizer.zero_grad()
        loss = example["loss"](model(inputs), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-4:]) < 0.75 * sum(losses[:4])


def test_batches_have_the_samples_in_front_and_every_size_works(example: dict[str, Any]) -> None:
    model = example["model"]()
    for size in (1, 2, 3):
        inputs, target = example["batch"](size)
        assert len(inputs) == len(target) == size
        assert example["loss"](model(inputs), target).shape == ()


def test_data_is_the_same_on_every_process(example: dict[str, Any]) -> None:
    torch.manual_seed(1)
    first = list(islice(example["data"](4), 2))
    torch.manual_seed(2)
    second = list(islice(example["data"](4), 2))
    assert all(torch.equal(a, b) for one, two in zip(first, second, strict=True) for a, b in zip(one, two, strict=True))
    assert not torch.equal(first[0][0], first[1][0])


def test_a_model_is_built_on_meta_too(example: dict[str, Any]) -> None:
    with torch.device("meta"):
        model = example["model"]()
    assert all(parameter.is_meta for parameter in model.parameters())


def test_dropout_is_on(example: dict[str, Any]) -> None:
    rates = [module.p for module in example["model"]().modules() if isinstance(module, nn.Dropout | nn.Dropout2d)]
    assert rates
    assert min(rates) > 0


def test_vgg16_is_configuration_d(tmp_path: Path) -> None:
    model = _from_copy("vgg16", tmp_path)["model"]()
    weights = [tuple(module.weight.shape[:2]) for module in model.modules() if isinstance(module, nn.Conv2d)]
    published = [64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512]
    assert weights == list(zip(published, [3, *published[:-1]], strict=True))
    assert sum(isinstance(module, nn.Linear) for module in model.modules()) == 3
    assert sum(isinstance(module, nn.MaxPool2d) for module in model.modules()) == 5


def test_gpt_is_tied_by_one_switch(tmp_path: Path) -> None:
    untied = _from_copy("gpt", tmp_path)["model"]()
    assert untied.head.weight is not untied.token.weight
    assert len(untied.blocks) == 12
    path = tmp_path / "gpt.py"
    text = path.read_text()
    assert text.count("\nTIED = False") == 1
    path.write_text(text.replace("\nTIED = False", "\nTIED = True"))
    tied = runpy.run_path(str(path))["model"]()
    assert tied.head.weight is tied.token.weight


def _from_copy(name: str, folder: Path) -> dict[str, Any]:
    (folder / f"{name}.py").write_text(example_text(name), encoding="utf-8")
    shutil.rmtree(folder / "__pycache__", ignore_errors=True)
    return runpy.run_path(str(folder / f"{name}.py"))
