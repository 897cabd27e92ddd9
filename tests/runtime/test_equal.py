"""A plan trains the same model as one process, to the bit: real processes, real sockets."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support.runs import EVERYTHING, plan_of, run

from planner.capture import load_model_file, microbatch
from planner.schedules import Placement, ScheduleName

EXAMPLES = Path(__file__).parents[2] / "planner" / "examples"
M = 4

PLANS: dict[str, dict[str, Any]] = {
    "1f1b on 2": {"num_ranks": 2},
    "gpipe on 4": {"num_ranks": 4, "schedule": ScheduleName.GPIPE},
    "1f1b on 4, deep warm-up": {"num_ranks": 4, "warmup": (4, 4, 2, 1)},
    "interleaved on 2": {"num_ranks": 2, "virtual": 2, "schedule": ScheduleName.INTERLEAVED},
    "zb-h1 on 3": {"num_ranks": 3, "schedule": ScheduleName.ZB_H1},
    "zb-v on 2": {"num_ranks": 2, "virtual": 2, "schedule": ScheduleName.ZB_V, "placement": Placement.V},
    "1f1b on 2, recomputing": {"num_ranks": 2, "recompute": True},
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The run on one rank, beside one process."""
    return run(plan_of(EVERYTHING, num_ranks=1, microbatches=M), tmp_path_factory.mktemp("whole"), verify=True).result


@pytest.mark.parametrize("name", PLANS)
def test_every_plan_trains_the_same_model(name: str, whole: Any, tmp_path: Path) -> None:
    result = run(plan_of(EVERYTHING, microbatches=M, **PLANS[name]), tmp_path, verify=name == "gpipe on 4").result
    assert result.losses == whole.losses
    assert result.weights_sha256 == whole.weights_sha256
    if result.verify is not None:
        assert (result.verify.equal, result.verify.loss_difference, result.verify.largest_weight_difference) == (
            True, 0.0, 0.0,
        )  # fmt: skip


def test_one_rank_is_one_process(whole: Any) -> None:
    assert whole.verify.equal
    assert whole.losses[0] != whole.losses[1]


def test_another_seed_trains_another_model(whole: Any, tmp_path: Path) -> None:
    result = run(plan_of(EVERYTHING, num_ranks=2, microbatches=M), tmp_path, seed=1).result
    assert result.weights_sha256 != whole.weights_sha256


def test_two_replicas_train_as_one_process_that_adds_their_sums(whole: Any, tmp_path: Path) -> None:
    result = run(plan_of(EVERYTHING, num_ranks=2, data=2, microbatches=2), tmp_path, verify=True).result
    assert result.verify is not None
    assert (result.verify.equal, result.verify.largest_weight_difference) == (True, 0.0)
    assert result.losses[0] == whole.losses[0], "the same samples under the same random numbers"
    assert result.losses == pytest.approx(whole.losses, rel=1e-4)


def test_losses_are_those_of_a_plain_loop(tmp_path: Path) -> None:
    """A loop that knows nothing of pipelines: losses to rounding, dropout off."""
    path = tmp_path / "plain.py"
    path.write_text(EVERYTHING.read_text().replace("DROPOUT = 32, 16, 8, 0.2", "DROPOUT = 32, 16, 8, 0.0"))
    plan = plan_of(path, num_ranks=2, microbatches=M)
    result = run(plan, tmp_path, steps=4, seed=3).result
    assert result.losses == pytest.approx(plain_losses(path, microbatch_size=2, steps=4, seed=3), rel=1e-5)


def plain_losses(path: Path, *, microbatch_size: int, steps: int, seed: int, microbatches: int = M) -> list[float]:
    model_file = load_model_file(path)
    data = model_file.data(microbatch_size * microbatches, seed=seed)
    torch.manual_seed(seed)
    model = model_file.model()
    optimizer = model_file.optimizer(model.parameters())
    losses = []
    for _ in range(steps):
        whole = next(data)
        values = []
        for number in range(microbatches):
            inputs, target = microbatch(whole, number, size=microbatch_size)
            value = model_file.loss(model(*inputs) if isinstance(inputs, tuple) else model(inputs), target)
            (value / microbatches).backward()
            values.append(value.item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(math.fsum(values) / microbatches)
    return losses


# --- the example models -----------------------------------------------------------------------------------------------

EXAMPLE_PLANS: dict[str, dict[str, Any]] = {
    "1f1b on 2": {"num_ranks": 2},
    "gpipe on 2": {"num_ranks": 2, "schedule": ScheduleName.GPIPE},
    "1f1b on 4": {"num_ranks": 4},
    "1f1b on 4, deep warm-up": {"num_ranks": 4, "warmup": (4, 3, 3, 2)},
    "gpipe on 4": {"num_ranks": 4, "schedule": ScheduleName.GPIPE},
    "interleaved on 2": {"num_ranks": 2, "virtual": 2, "schedule": ScheduleName.INTERLEAVED},
    "zb-h1 on 4": {"num_ranks": 4, "schedule": ScheduleName.ZB_H1},
    "zb-h2 on 2": {"num_ranks": 2, "schedule": ScheduleName.ZB_H2},
    "zb-v on 2": {"num_ranks": 2, "virtual": 2, "schedule": ScheduleName.ZB_V, "placement": Placement.V},
}


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt", "gpt tied", "vgg16", "unet"])
def test_the_examples_lose_what_a_plain_loop_loses(model: str, tmp_path: Path) -> None:
    text = (EXAMPLES / f"{model.split()[0]}.py").read_text()
    text = re.sub(r"^DROPOUT = .*", "DROPOUT = 0.0", text, flags=re.MULTILINE).replace("Dropout()", "Dropout(0.0)")
    path = tmp_path / "model.py"
    path.write_text(text.replace("TIED = False", "TIED = True") if "tied" in model else text)
    result = run(plan_of(path, num_ranks=2, microbatches=M), tmp_path, steps=4, seed=3).result
    assert result.losses == pytest.approx(plain_losses(path, microbatch_size=2, steps=4, seed=3), rel=1e-4)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("model", ["gpt", "gpt tied", "vgg16", "unet"])
def test_the_examples_train_equal_under_every_plan(model: str, tmp_path: Path) -> None:
    text = (EXAMPLES / f"{model.split()[0]}.py").read_text()
    path = tmp_path / "model.py"
    path.write_text(text.replace("TIED = False", "TIED = True") if "tied" in model else text)
    whole = run(plan_of(path, num_ranks=1, microbatches=M), tmp_path, verify=True).result
    assert whole.verify is not None
    assert whole.verify.equal
    for name, shape in EXAMPLE_PLANS.items():
        result = run(plan_of(path, microbatches=M, **shape), tmp_path).result
        assert (name, result.losses, result.weights_sha256) == (name, whole.losses, whole.weights_sha256)


LORA = """
import torch
from torch import nn

class Adapted(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Linear(8, 8).requires_grad_(False)
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)
    def forward(self, x):
        return x + self.base(x) + self.up(self.down(x))

def model():
    return nn.Sequential(Adapted(), Adapted(), *(nn.Linear(8, n).requires_grad_(False) for n in (8, 1)))
def batch(size):
    return torch.randn(size, 8), torch.zeros(size, 1)
def loss(output, target):
    return (output - target).square().mean()
def optimizer(params):
    return torch.optim.AdamW([p for p in params if p.requires_grad], lr=1e-2)
"""


def test_a_rank_with_nothing_to_train_has_no_optimizer(tmp_path: Path) -> None:
    """Adapters beside frozen weights: the last stages train nothing, and optimizer() would get an empty list there."""
    model = tmp_path / "lora.py"
    model.write_text(LORA)
    first, second = (
        run(plan_of(model, num_ranks=ranks, microbatches=M), tmp_path / str(ranks)).result for ranks in (1, 3)
    )
    assert first.weights_sha256 == second.weights_sha256
    assert first.losses == second.losses
    assert first.losses[0] != first.losses[-1]
