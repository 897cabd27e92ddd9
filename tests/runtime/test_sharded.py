"""The optimizer sharded over replicas: the same training as with all of it on each, from half the state."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.runs import EVERYTHING, plan_of, run
from torch import nn

from planner.plan import Plan
from planner.runtime.result import RunResult
from planner.runtime.sharded import _buckets
from planner.schedules import Placement, ScheduleName

STEPS, STOP = 4, 2
OPTIMIZERS = {
    "AdamW in two groups": "AdamW([{'params': params[:9]}, {'params': params[9:], 'lr': 0.03}])",
    "SGD with momentum": "SGD(params, lr=0.05, momentum=0.9, weight_decay=0.1)",
    "Adagrad, which keeps something from the start": "Adagrad(params, lr=0.05, initial_accumulator_value=0.1)",
    "Adafactor, which needs whole parameters": "Adafactor(params, lr=0.05)",
}
SHAPES: dict[str, dict[str, Any]] = {
    "1f1b on 2": {"num_ranks": 2, "microbatches": 2},
    "zb-v on 2": {
        "num_ranks": 2,
        "virtual": 2,
        "microbatches": 4,
        "schedule": ScheduleName.ZB_V,
        "placement": Placement.V,
    },
    "plain data parallel": {"num_ranks": 1, "microbatches": 2},
}


@given(
    st.lists(st.lists(st.integers(0, 40), max_size=3), min_size=1, max_size=6),
    st.integers(1, 5),
    st.booleans(),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_every_element_is_stepped_once(shapes: list[list[int]], replicas: int, by_element: bool, other: Any) -> None:
    """Whatever the shapes, the pieces of all replicas are the parameters, and no share is much more than another."""
    dtypes = [torch.float32, other]
    named = {f"w{n}": nn.Parameter(torch.zeros(shape, dtype=dtypes[n % 2])) for n, shape in enumerate(shapes)}
    seen: dict[str, list[int]] = {name: [] for name in named}
    for bucket in _buckets(named, replicas, by_element=by_element):
        loads = [0] * replicas
        taken: set[int] = set()
        for place in bucket.places:
            assert place.parameter.dtype is bucket.dtype
            assert not taken & set(range(place.start, place.end)), "each has a place of its own"
            taken |= set(range(place.start, place.end))
            pieces = bucket.pieces(place, replicas)
            assert by_element or len(pieces) == 1
            for replica, first, last in pieces:
                loads[replica] += last - first
                seen[place.name] += range(first, last)
                assert replica * bucket.chunk <= place.start + first
                assert place.start + last <= (replica + 1) * bucket.chunk
        if by_element:
            assert max(loads) <= sum(loads) / replicas + 64 * (len(bucket.places) + 1)
    assert all(elements == list(range(named[name].numel())) for name, elements in seen.items())


def model_with(optimizer: str, keys: str, folder: Path) -> Path:
    path = folder / "model.py"
    text = EVERYTHING.read_text()
    text = text.replace(
        "return torch.optim.AdamW(params, lr=1e-2)", f"params = [*params]; return torch.optim.{optimizer}"
    )
    path.write_text(f"{text}\n{keys}\n")
    return path


def done(plan: Plan, folder: Path, **options: Any) -> RunResult:
    folder.mkdir()
    return run(plan, folder, **({"steps": STEPS} | options)).result


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_the_training_without_shards(optimizer: str, shape: str, tmp_path: Path) -> None:
    """To the bit, with tied weights, a frozen layer and dropout; with less memory where there is state to share."""
    model = model_with(OPTIMIZERS[optimizer], "", tmp_path)
    whole = done(plan_of(model, data=2, **SHAPES[shape]), tmp_path / "whole")
    sharded = done(plan_of(model, data=2, zero1=True, **SHAPES[shape]), tmp_path / "sharded")
    assert sharded.losses == whole.losses
    assert sharded.weights_sha256 == whole.weights_sha256
    if "whole parameters" in optimizer:  # rows and columns of state, less than what shares of unlike sizes waste
        return
    for one, other in zip(sharded.ranks, whole.ranks, strict=True):
        assert one.peak_memory_bytes < other.peak_memory_bytes


@pytest.mark.slow
@pytest.mark.parametrize("keys", ["clip_norm = 0.5", 'autocast = "float16"\nclip_norm = 0.5'])
def test_clipped_and_scaled_it_is_the_same_to_rounding(keys: str, tmp_path: Path) -> None:
    """Norms of parameters in pieces are added up in another order."""
    model = model_with(OPTIMIZERS["SGD with momentum"], keys, tmp_path)
    whole = done(plan_of(model, data=2, num_ranks=2), tmp_path / "whole")
    sharded = done(plan_of(model, data=2, num_ranks=2, zero1=True), tmp_path / "sharded")
    assert sharded.losses == pytest.approx(whole.losses, rel=1e-5 if "float16" not in keys else 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_checkpoints_go_from_shards_to_wholes_and_back(optimizer: str, tmp_path: Path) -> None:
    model = model_with(OPTIMIZERS[optimizer], "", tmp_path)
    plans = {flag: plan_of(model, num_ranks=2, data=2, zero1=flag) for flag in (True, False)}
    through = done(plans[False], tmp_path / "through")
    for flag in (True, False):
        kept = tmp_path / f"kept{flag}"
        done(plans[flag], tmp_path / f"first{flag}", steps=STOP, checkpoints=kept)
        for other in (True, False):
            copy = tmp_path / f"copy{flag}{other}"
            shutil.copytree(kept, copy, symlinks=True)
            again = done(plans[other], tmp_path / f"{flag}{other}", checkpoints=copy, resume=True)
            assert again.losses == through.losses[STOP:]
            assert again.weights_sha256 == through.weights_sha256
