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


def replicas(folder: Path) -> Replicas:
    """Of a group with this process alone: what it sums stays as it is."""
    store = dist.FileStore(str(folder / "store"), 1)  # type: ignore[attr-defined]
    return Replicas(Group(Communicators(store, device=CPU, one_node=True).make("alone", 0, 1)))


def parameter(gradient: torch.Tensor | None, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    made = nn.Parameter(torch.zeros(() if gradient is None else gradient.shape, dtype=dtype))
    made.grad = gradient
    return made


def test_gradients_stay_as_they_were_laid_out(tmp_path: Path) -> None:
    torch.manual_seed(0)
    gradients = {
        "plain": torch.randn(3, 5),
        "turned": torch.randn(4, 6).t(),
        "channels last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "with gaps": torch.randn(6, 6)[:, ::2],
        "expanded": torch.randn(3, 1).expand(3, 4),
        "scalar": torch.tensor(2.0),
        "empty": torch.zeros(0, 3),
        "double": torch.randn(7).double(),
    }
    rows = {name: parameter(gradient, gradient.dtype) for name, gradient in gradients.items()}
    values = {name: gradient.clone() for name, gradient in gradients.items()}
    one = replicas(tmp_path)
    one.start([*rows.values(), parameter(None)])
    one.finish()
    for name, row in rows.items():
        assert row.grad is not None
        assert torch.equal(row.grad, values[name]), name
        if name not in ("with gaps", "expanded"):
            assert row.grad.stride() == gradients[name].stride(), name
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
