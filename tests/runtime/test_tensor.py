"""Plans with several tensor ranks a stage: real processes, against one process, and against each other to the bit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from support.runs import EVERYTHING, plan_of, run

from planner.schedules import Placement, ScheduleName
from tests.capture.real_models import REAL_MODELS
from tests.capture.test_real_models import needs

EXAMPLES = Path(__file__).parents[2] / "planner" / "examples"
M = 4

PLANS: dict[str, dict[str, Any]] = {
    "1f1b": {"num_ranks": 2},
    "interleaved": {"num_ranks": 2, "virtual": 2, "schedule": ScheduleName.INTERLEAVED},
    "zb-h1": {"num_ranks": 2, "schedule": ScheduleName.ZB_H1},
    "zb-v": {"num_ranks": 2, "virtual": 2, "schedule": ScheduleName.ZB_V, "placement": Placement.V},
    "gpipe, recomputing": {"num_ranks": 2, "schedule": ScheduleName.GPIPE, "recompute": True},
}


def gpt(folder: Path, **settings: object) -> Path:
    """The example with other settings."""
    text = (EXAMPLES / "gpt.py").read_text()
    for name, value in settings.items():
        before = next(line for line in text.splitlines() if line.startswith(f"{name} = "))
        text = text.replace(before, f"{name} = {value}")
    path = folder / "gpt.py"
    path.write_text(text)
    return path


def test_two_tensor_ranks_train_as_one_process(tmp_path: Path) -> None:
    """Tied weights over stages, skips, batch norm, dropout, frozen ones: alike in one stage and split in I and W."""
    whole = run(plan_of(EVERYTHING, num_ranks=1, microbatches=M), tmp_path).result
    one = run(plan_of(EVERYTHING, num_ranks=1, microbatches=M, tensor=2), tmp_path, verify=True).result
    two = run(plan_of(EVERYTHING, microbatches=M, tensor=2, **PLANS["zb-h1"]), tmp_path).result
    assert one.losses == pytest.approx(whole.losses, rel=1e-5)
    assert one.verify is not None
    assert one.verify.equal
    assert one.verify.loss_difference < 1e-5
    assert (two.losses, two.weights_sha256) == (one.losses, one.weights_sha256)
    assert len(one.ranks) == 1


def small(name: str, folder: Path) -> Path:
    """A model with few enough blocks that processes start soon, and enough for four stages."""
    if name == "gpt":
        return gpt(folder, TIED=True, BLOCKS=2)
    text = REAL_MODELS[name]
    for setting in ("num_hidden_layers", "n_layer", "num_layers"):
        text = re.sub(rf"\b{setting}=\d+", f"{setting}=2", text)
    path = folder / f"{name}.py"
    path.write_text(text)
    return path


NAMES = ["gpt", *(pytest.param(n, marks=needs[n]) for n in ("llama", "gpt2", "t5", "bert", "mixtral"))]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", NAMES)
def test_every_plan_trains_the_same_model(name: str, tmp_path: Path) -> None:
    """Losses as in one process to rounding; equal to the bit, weights too, over pipelines and schedules."""
    path = small(name, tmp_path)
    whole = run(plan_of(path, num_ranks=1, microbatches=M), tmp_path, steps=2).result
    one = run(plan_of(path, num_ranks=1, microbatches=M, tensor=2), tmp_path, steps=2).result
    assert one.losses == pytest.approx(whole.losses, rel=1e-5)
    for plan in PLANS.values():
        other = run(plan_of(path, microbatches=M, tensor=2, **plan), tmp_path, steps=2).result
        assert (other.losses, other.weights_sha256) == (one.losses, one.weights_sha256), plan


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", NAMES)
def test_tokens_in_parts_train_the_same_model(name: str, tmp_path: Path) -> None:
    """Sequence parallel, the sums of norms' gradients too: as one process, and alike over schedules and replicas."""
    path = small(name, tmp_path)
    whole = run(plan_of(path, num_ranks=1, microbatches=M), tmp_path, steps=3).result
    one = run(plan_of(path, num_ranks=1, microbatches=M, tensor=2, sequence=True), tmp_path, steps=3).result
    assert one.losses == pytest.approx(whole.losses, rel=1e-5)
    for schedule in ("interleaved", "zb-h1"):
        plan = plan_of(path, microbatches=M, tensor=2, sequence=True, **PLANS[schedule])
        other = run(plan, tmp_path, steps=3).result
        assert (other.losses, other.weights_sha256) == (one.losses, one.weights_sha256), schedule
    two = plan_of(path, num_ranks=1, data=2, microbatches=M // 2, tensor=2, sequence=True)
    assert run(two, tmp_path, steps=3).result.losses == pytest.approx(whole.losses, rel=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", NAMES)
def test_four_tensor_ranks_train_the_same_model(name: str, tmp_path: Path) -> None:
    """Four heads, of two keys and values where queries are grouped; two stages of four ranks in eight processes."""
    path = small(name, tmp_path)
    whole = run(plan_of(path, num_ranks=1, microbatches=M), tmp_path, steps=2).result
    one = run(plan_of(path, num_ranks=1, microbatches=M, tensor=4), tmp_path, steps=2).result
    assert one.losses == pytest.approx(whole.losses, rel=1e-5)
    two = run(plan_of(path, microbatches=M, tensor=4, **PLANS["zb-h1"]), tmp_path, steps=2).result
    assert (two.losses, two.weights_sha256) == (one.losses, one.weights_sha256)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [{"num_ranks": 1, "data": 2, "microbatches": 2}, {"num_ranks": 4}])
def test_a_checkpoint_of_two_tensor_ranks_goes_on_without_them(shape: dict[str, Any], tmp_path: Path) -> None:
    """Weights, momentum and clipping under (P, D, T) = (2, 1, 2), then under (1, 2, 1) and (4, 1, 1), and back."""
    path = gpt(tmp_path, TIED=True, BLOCKS=3)
    path.write_text(path.read_text() + "\nclip_norm = 0.5\n")
    whole = run(plan_of(path, num_ranks=1, microbatches=4), tmp_path, steps=6).result
    tensor = plan_of(path, num_ranks=2, microbatches=4, tensor=2)
    kept = {"checkpoints": tmp_path / "kept"}
    first = run(tensor, tmp_path, steps=2, **kept).result
    second = run(plan_of(path, **({"microbatches": 4} | shape)), tmp_path, steps=4, resume=True, **kept).result
    third = run(tensor, tmp_path, steps=6, resume=True, **kept).result
    assert [*first.losses, *second.losses, *third.losses] == pytest.approx(whole.losses, rel=1e-5)


@pytest.mark.slow
def test_pipeline_replicas_and_tensor_ranks_in_eight_processes(tmp_path: Path) -> None:
    path = gpt(tmp_path, BLOCKS=4)
    whole = run(plan_of(path, num_ranks=1, microbatches=4), tmp_path, steps=12).result
    plan = plan_of(path, num_ranks=2, data=2, tensor=2, microbatches=2)
    assert plan.parallel.gpus == 8
    result = run(plan, tmp_path, steps=12).result
    assert result.losses == pytest.approx(whole.losses, rel=1e-4)
    assert result.losses[-1] < result.losses[0] - 0.3
