"""Orders that a person wrote: what trains is trained and said to be equal to rounding, what cannot is refused early."""

from __future__ import annotations

import dataclasses
import multiprocessing
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.runs import Heard, plan_of, run
from support.sleep import write_sleep_model

from planner.errors import InputError
from planner.plan import Plan, write_plan
from planner.runtime.run import RunOptions, run_plan
from planner.schedules import Placement, ScheduleName

FORWARDS = ["0F0 0F1 0F2 0F3", "1F0 1F1 1F2 1F3"]


def plan_with(actions: Sequence[str], folder: Path) -> Plan:
    """Two stages on two ranks, four micro-batches, and these actions."""
    model = write_sleep_model(folder / "model.py", layers=2, forward_s=0, backward_s=0)
    plan = plan_of(model, num_ranks=2)
    schedule = dataclasses.replace(plan.schedule, name=ScheduleName.SYNTHESISED, placement=Placement.FREE)
    return dataclasses.replace(plan, schedule=schedule, actions=tuple(actions))


BACKWARDS = {
    "B from last to first": "kB3 kB2 kB1 kB0",
    "W from last to first": "kI0 kI1 kI2 kI3 kW3 kW2 kW1 kW0",
    "W after later B": "kI0 kB1 kB2 kB3 kW0",
}


@pytest.mark.slow
@pytest.mark.parametrize("order", list(BACKWARDS.values()), ids=list(BACKWARDS))
def test_gradients_added_in_another_order_are_equal_to_rounding(order: str, tmp_path: Path) -> None:
    actions = [f"{forwards} {order.replace('k', str(stage))}" for stage, forwards in enumerate(FORWARDS)]
    heard = Heard()
    verified = run(plan_with(actions, tmp_path), tmp_path, heard, verify=True).result.verify
    assert verified is not None
    assert verified.equal
    assert verified.largest_weight_difference < 1e-5
    said = [remark for remark in heard.remarks if "equal to one process only to rounding" in remark]
    assert [remark.split(" position")[0] for remark in said] == ["remark: rank 0", "remark: rank 1"]


@pytest.mark.parametrize(
    ("rest", "fault"),
    [
        ("1B0 1B1 1B2", r"rank 1: 1B3 is missing \(or 1I3 and 1W3\)"),
        ("1B0 1B1 1B2 1I3", "rank 1: 1W3 is missing"),
        ("1B0 1B0 1B1 1B2 1B3", "rank 1 position 5: 1B0: stands already at position 4"),
        ("1B0 1I0 1B1 1B2 1B3", r"rank 1 position 5: 1I0: 1B0 has done that already .*"),
        ("1W0 1I0 1B1 1B2 1B3", r"rank 1 position 4: 1W0: must come after 1I0, .*"),
    ],
)
def test_an_order_that_is_not_whole_is_refused_before_anything_starts(rest: str, fault: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    write_plan(plan_with([f"{FORWARDS[0]} 0B0 0B1 0B2 0B3", f"{FORWARDS[1]} {rest}"], tmp_path), path)
    children = set(multiprocessing.active_children())
    with pytest.raises(InputError, match=f"{path}: schedule: {fault}"):
        run_plan(path, RunOptions(), Heard())
    assert set(multiprocessing.active_children()) == children
