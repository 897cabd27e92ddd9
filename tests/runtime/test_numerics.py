"""What users do to their gradients: clipping, autocast, scaled losses. Equal over plans, and to plain torch."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support.runs import EVERYTHING, plan_of, run
from torch import nn

from planner.capture import load_model_file, microbatch
from planner.errors import InputError
from planner.runtime.clipping import Clipping
from planner.runtime.result import RunResult
from planner.runtime.scaling import GROWTH_INTERVAL, INITIAL_SCALE, LossScaling
from planner.schedules import Placement, ScheduleName

STEPS = 4
PLANS: dict[str, dict[str, Any]] = {
    "zb-h1 on 3": {"num_ranks": 3, "schedule": ScheduleName.ZB_H1},
    "interleaved on 2": {"num_ranks": 2, "virtual": 2, "schedule": ScheduleName.INTERLEAVED},
    "zb-v on 2": {"num_ranks": 2, "virtual": 2, "schedule": ScheduleName.ZB_V, "placement": Placement.V},
    "1f1b on 4, recomputing": {"num_ranks": 4, "recompute": True},
}
KEYS = {
    "clipped": "clip_norm = 0.5",
    "bfloat16": 'autocast = "bfloat16"',
    "float16, clipped": 'autocast = "float16"\nclip_norm = 0.5',
}


def model_with(keys: str, folder: Path, *, plain: bool = False) -> Path:
    """The model file with these lines; ``plain``: no dropout, an optimizer that feels the size of gradients."""
    path = folder / "model.py"
    text = EVERYTHING.read_text()
    if plain:
        text = text.replace("DROPOUT = 32, 16, 8, 0.2", "DROPOUT = 32, 16, 8, 0.0")
        text = text.replace("AdamW(params, lr=1e-2)", "SGD(params, lr=0.05)")
    path.write_text(f"{text}\n{keys}\n")
    return path


def plain_losses(path: Path, *, steps: int, seed: int = 0, microbatches: int = 4, size: int = 2) -> list[float]:
    """The loop that a user would write, with torch's own clipping, autocast and GradScaler."""
    model_file = load_model_file(path)
    data = model_file.data(size * microbatches, seed=seed)
    torch.manual_seed(seed)
    model = model_file.model()
    optimizer = model_file.optimizer(model.parameters())
    scaler = torch.amp.GradScaler("cpu", enabled=model_file.autocast is torch.float16)  # type: ignore[attr-defined]
    losses = []
    for _ in range(steps):
        whole = next(data)
        values = []
        for number in range(microbatches):
            inputs, target = microbatch(whole, number, size=size)
            with torch.autocast("cpu", dtype=model_file.autocast, enabled=model_file.autocast is not None):
                value = model_file.loss(model(*inputs), target)
            scaler.scale(value / microbatches).backward()
            values.append(value.item())
        scaler.unscale_(optimizer)
        if model_file.clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), model_file.clip_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(math.fsum(values) / microbatches)
    return losses


@pytest.mark.parametrize("name", [pytest.param("clipped", marks=pytest.mark.slow), "float16, clipped"])
def test_losses_are_those_of_a_plain_loop(name: str, tmp_path: Path) -> None:
    path = model_with(KEYS[name], tmp_path, plain=True)
    result = run(plan_of(path, num_ranks=2), tmp_path, steps=STEPS).result
    assert result.losses == pytest.approx(plain_losses(path, steps=STEPS), rel=1e-3)
    path = model_with("", tmp_path, plain=True)
    assert result.losses[-1] != pytest.approx(plain_losses(path, steps=STEPS)[-1], rel=1e-3), "the keys do nothing"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", KEYS)
def test_every_plan_trains_the_same_model(name: str, tmp_path: Path) -> None:
    path = model_with(KEYS[name], tmp_path)
    whole = run(plan_of(path, num_ranks=1), tmp_path, verify=True, steps=3).result
    assert whole.verify is not None
    assert whole.verify.equal
    assert whole.verify.eager_difference is not None
    assert whole.verify.eager_difference < 1e-2
    for plan, shape in PLANS.items():
        result = run(plan_of(path, **shape), tmp_path, steps=3).result
        assert (plan, result.losses, result.weights_sha256) == (plan, whole.losses, whole.weights_sha256)
    two = run(plan_of(path, num_ranks=2, data=2, microbatches=2), tmp_path, steps=3, verify=True).result
    assert two.verify is not None
    assert two.verify.equal
    assert two.losses == pytest.approx(whole.losses, rel=1e-2)


OVERFLOWS = """
autocast = "float16"

def loss(output, target):
    return functional.cross_entropy(output.flatten(0, 1), target.flatten()) * 400.0
"""


@pytest.mark.slow
def test_a_step_that_overflows_is_left_out_on_every_rank_and_a_run_goes_on_with_its_scale(tmp_path: Path) -> None:
    path = model_with(OVERFLOWS, tmp_path, plain=True)
    plain = plain_losses(path, steps=6)
    through = run(plan_of(path, num_ranks=2), tmp_path, steps=6).result
    assert through.losses == pytest.approx(plain, rel=2e-3)
    run(plan_of(path, num_ranks=2), tmp_path, steps=2, checkpoints=tmp_path / "kept")
    result: RunResult = run(
        plan_of(path, num_ranks=1), tmp_path, steps=6, checkpoints=tmp_path / "kept", resume=True, verify=True
    ).result
    assert result.losses == through.losses[2:]
    assert result.weights_sha256 == through.weights_sha256
    assert result.verify is not None
    assert result.verify.equal


@pytest.mark.parametrize("max_norm", [0.1, 1e3])
def test_clipping_is_torchs_to_the_bit(max_norm: float) -> None:
    torch.manual_seed(0)
    shapes = [(7, 5), (3,), (1000,), (), (4, 4, 4), (33, 65)]
    ours = {f"p{n}": nn.Parameter(torch.randn(shape)) for n, shape in enumerate(shapes)}
    theirs = [nn.Parameter(value.detach().clone()) for value in ours.values()]
    clipping = Clipping(max_norm, names=list(ours), counted=list(ours), group=None, device=torch.device("cpu"))
    for _ in range(3):
        for (name, own), other in zip(ours.items(), theirs, strict=True):
            own.grad = None if name == "p1" else torch.randn(own.shape)
            other.grad = None if own.grad is None else own.grad.clone()
        norm = nn.utils.clip_grad_norm_(theirs, max_norm)
        assert torch.equal(clipping.clip(ours), norm)
        for own, other in zip(ours.values(), theirs, strict=True):
            assert (own.grad is None) is (other.grad is None)
            assert own.grad is None or torch.equal(own.grad, other.grad)


def test_the_scale_is_that_of_torchs_scaler() -> None:
    theirs = torch.amp.GradScaler("cpu", init_scale=INITIAL_SCALE, growth_interval=GROWTH_INTERVAL)  # type: ignore[attr-defined]
    ours = LossScaling(device=torch.device("cpu"))
    one, other = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([other], lr=0.0)
    theirs.scale(torch.zeros(()))
    for step in range(2 * GROWTH_INTERVAL + 10):
        bad = step in (3, 4, GROWTH_INTERVAL)
        one.grad = torch.tensor([1.0, math.inf if bad else 2.0]) * ours.scale
        other.grad = one.grad.clone()
        theirs.unscale_(optimizer)
        assert ours.unscale([one]) is not bad
        assert torch.equal(one.grad, other.grad)
        theirs.step(optimizer)
        theirs.update()
        assert ours.scale == theirs.get_scale()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("clip_norm = 0", "clip_norm is 0"),
        ("clip_norm = True", "clip_norm is True"),
        ("clip_norm = float('nan')", "clip_norm is nan"),
        ("autocast = 'int8'", "autocast is 'int8'; one of 'bfloat16', 'float16'"),
        ("autocast = ['bfloat16']", "autocast is"),
    ],
)
def test_what_is_no_norm_and_no_type_is_refused(line: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=said):
        load_model_file(model_with(line, tmp_path))


def test_a_scale_comes_back_from_any_number_of_overflows() -> None:
    parameter = nn.Parameter(torch.zeros(1))
    scaling = LossScaling(device=torch.device("cpu"))
    for _ in range(1200):
        parameter.grad = torch.full((1,), torch.nan)
        assert not scaling.unscale([parameter])
    parameter.grad = torch.full((1,), 2 * scaling.scale)
    assert scaling.unscale([parameter])
    assert parameter.grad.item() == 2
