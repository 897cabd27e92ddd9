"""Sums over replicas: buckets that hold gradients as they were laid out, and stages that do not wait for each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.runs import EVERYTHING, plan_of, run
from torch import nn

from planner.runtime.groups import Communicators, Group
from planner.runtime.replicas import Replicas
from planner.schedules import Placement, ScheduleName

CPU = torch.device("cpu")


def replicas(folder: Path, named: dict[str, nn.Parameter]) -> Replicas:
    """Of a group with this process alone: what it sums stays as it is."""
    store = dist.FileStore(str(folder / "store"), 1)  # type: ignore[attr-defined]
    return Replicas([named], Group(Communicators(store, device=CPU, one_node=True).make("alone", 0, 1)))


LAID_OUT = {
    "plain": torch.zeros(3, 5),
    "turned": torch.zeros(4, 6).t(),
    "channels last": torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "scalar": torch.tensor(0.0),
    "empty": torch.zeros(0, 3),
    "double": torch.zeros(7).double(),
}


@pytest.mark.parametrize("step", ["in place", "elsewhere", "sparse"])
def test_sums_are_laid_out_as_autograd_lays_gradients_out(step: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    rows = {name: nn.Parameter(value.clone(memory_format=torch.preserve_format)) for name, value in LAID_OUT.items()}
    rows["none"] = nn.Parameter(torch.zeros(2))
    one = replicas(tmp_path, rows)
    values = {name: torch.randn_like(value) for name, value in LAID_OUT.items()}
    for name, value in values.items():
        if step == "in place":
            rows[name].grad = one.places[name].copy_(value)
        else:
            rows[name].grad = value.to_sparse() if step == "sparse" and name == "plain" else value
    one.start(rows)
    one.finish()
    assert rows["none"].grad is None
    for name, value in values.items():
        by_autograd = rows[name].detach().requires_grad_()
        by_autograd.sum().backward()
        found = rows[name].grad
        assert found is not None
        assert by_autograd.grad is not None
        assert torch.equal(found, value), name
        assert found.stride() == by_autograd.grad.stride(), name
    buckets = {row.grad.untyped_storage().data_ptr() for row in rows.values() if row.grad is not None}
    assert len(buckets) == 2, "one for each type"


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param({"num_ranks": 1, "virtual": 3, "microbatches": 2}, id="one rank"),
        pytest.param({"num_ranks": 2, "virtual": 2, "microbatches": 4}, id="interleaved", marks=pytest.mark.slow),
        pytest.param(
            {
                "num_ranks": 2,
                "virtual": 2,
                "microbatches": 4,
                "schedule": ScheduleName.ZB_V,
                "placement": Placement.V,
            },
            id="zb-v",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_two_replicas_of_several_stages_a_rank(shape: dict[str, Any], tmp_path: Path) -> None:
    """Each stage's sum begins while other stages of the rank still have work; the result is one process's."""
    plan = plan_of(EVERYTHING, data=2, **({"schedule": ScheduleName.INTERLEAVED} | shape))
    verified = run(plan, tmp_path, verify=True).result.verify
    assert verified is not None
    assert (verified.equal, verified.largest_weight_difference) == (True, 0.0)
