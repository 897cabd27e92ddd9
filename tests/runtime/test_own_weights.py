"""Processes that make no more of the model than their own stages: the weights, and the training, are the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.runs import EVERYTHING, plan_of, run

from planner.errors import InputError
from planner.schedules import Placement, ScheduleName

SHAPES: dict[str, dict[str, Any]] = {
    "1f1b on 3": {"num_ranks": 3},
    "zb-v on 2": {"num_ranks": 2, "virtual": 2, "schedule": ScheduleName.ZB_V, "placement": Placement.V},
    "two replicas, sharded": {"num_ranks": 2, "data": 2, "microbatches": 2, "zero1": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_the_training_of_the_whole_model(shape: str, tmp_path: Path) -> None:
    plan = plan_of(EVERYTHING, **SHAPES[shape])
    whole = run(plan, tmp_path, weights="whole").result
    own = run(plan, tmp_path, weights="own").result
    assert own.losses == whole.losses
    assert own.weights_sha256 == whole.weights_sha256


@pytest.mark.slow
def test_it_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    plan = plan_of(EVERYTHING, num_ranks=2)
    through = run(plan, tmp_path, steps=4, weights="own").result
    run(plan, tmp_path, steps=2, weights="own", checkpoints=tmp_path / "kept")
    again = run(
        plan_of(EVERYTHING, num_ranks=3), tmp_path, steps=4, weights="own", checkpoints=tmp_path / "kept", resume=True
    ).result
    assert again.losses == through.losses[2:]
    assert again.weights_sha256 == through.weights_sha256


def test_one_process_cannot_train_what_does_not_fit(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--weights own: --verify trains the whole model"):
        run(plan_of(EVERYTHING, num_ranks=2), tmp_path, weights="own", verify=True)
