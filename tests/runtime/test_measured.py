"""What a run measured becomes a profile whose stages take as long, and words about those that do not."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.command import pipeplan
from support.plans import chain_profile, fresh_plan, plans, profiles
from support.runs import EVERYTHING, plan_of, run

from planner.errors import InputError
from planner.graph import LayerGraph, Stage, derive_stages
from planner.plan import Plan, read_plan, schedule_of
from planner.profile import Device, Profile, ProfiledLinks, read_profile
from planner.runtime.measured import differences, measured_profile, stages_as_measured
from planner.schedules import Letter, ScheduleName

DEVICE = Device(kind="cpu", name="here", memory_bytes=0, software={})


def told_of(plan: Plan, stages: list[Stage]) -> list[dict[str, Any]]:
    """What the ranks of a run would tell whose stages take so long, by the time model's own rules."""
    processes = []
    for rank, order in enumerate(schedule_of(plan)):
        rows: dict[str, float] = {}
        for number, letter, _ in order:
            stage = stages[number]
            again_s = stage.forward_s if stage.recompute else 0.0
            backward_s = stage.backward_input_s + stage.backward_weight_s
            rows[f"{number}{letter}"] = {
                Letter.FORWARD: stage.forward_s,
                Letter.BACKWARD: backward_s + again_s,
                Letter.BACKWARD_INPUT: stage.backward_input_s + (stage.split_s or 0.0) + again_s
                if stage.returns
                else 0.0,
                Letter.BACKWARD_WEIGHT: stage.backward_weight_s if stage.returns else backward_s + again_s,
            }[letter]
        for slower in (1.0, 0.5):  # two replicas: the slower one counts
            actions = {name: seconds * slower for name, seconds in rows.items()}
            processes.append({"rank": rank, "actions": actions, "optimizer_s": 2.0 * slower, "trainable_bytes": 4})
    return processes


def derived(plan: Plan, profile: Profile) -> tuple[Stage, ...]:
    return derive_stages(
        LayerGraph.of(profile),
        [stage.layers for stage in plan.stages],
        ranks=[stage.rank for stage in plan.stages],
        microbatch_size=plan.batch.microbatch,
        recompute=[stage.recompute for stage in plan.stages],
    )


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_the_stages_of_the_profile_take_what_was_measured(data: st.DataObject) -> None:
    profile = data.draw(profiles())
    plan = data.draw(plans(profile))
    factors = st.floats(0.25, 4.0)
    true = [
        dataclasses.replace(
            stage,
            forward_s=stage.forward_s * data.draw(factors) or 0.25,
            backward_input_s=stage.backward_input_s * data.draw(factors) or 0.25,
            backward_weight_s=stage.backward_weight_s * data.draw(factors) or 0.5,
        )
        for stage in plan.stages
    ]
    links = ProfiledLinks(latency_s=1.0, bandwidth_bytes_per_s=2.0)
    made = measured_profile(
        plan,
        profile,
        told_of(plan, true),
        path=Path("folder/profile.json"),
        model_path=Path("model.py").resolve(),
        device=DEVICE,
        links=links,
    )
    whole = {k for k, stage in enumerate(plan.stages) if not stage.returns} | {
        number for order in schedule_of(plan) for number, letter, _ in order if letter is Letter.BACKWARD
    }
    for found, wanted in zip(derived(plan, made), true, strict=True):
        assert found.forward_s == pytest.approx(wanted.forward_s)
        backward = (found.backward_input_s, found.backward_weight_s)
        split_s, planned_s = found.split_s or 0.0, wanted.split_s or 0.0
        if found.stage in whole:
            assert sum(backward) == pytest.approx(wanted.backward_input_s + wanted.backward_weight_s)
        else:
            assert backward[0] + split_s == pytest.approx(wanted.backward_input_s + planned_s)
            assert backward[1] == pytest.approx(wanted.backward_weight_s)
            assert bool(split_s) == bool(planned_s)
    assert (made.provenance, made.device, made.links) == ("measured", DEVICE, links)
    assert made.optimizer.step_s_per_trainable_byte == 0.5
    assert made.model.source == "../model.py"
    for stage in (stage for stage in plan.stages if stage.forward_s):
        rows = [layer for layer in made.layers if layer.name in stage.layers]
        old = [layer for layer in profile.layers if layer.name in stage.layers]
        shares = [new.costs[0].forward_s * o.costs[1].forward_s for new, o in zip(rows, old, strict=True)]
        others = [new.costs[1].forward_s * o.costs[0].forward_s for new, o in zip(rows, old, strict=True)]
        assert shares == pytest.approx(others), "rows of other sizes are scaled alike"


PROFILE = chain_profile(4)
PLAN = fresh_plan(PROFILE, [["block.0", "block.1"], ["block.2", "block.3"]], ranks=2)


def test_as_planned_there_is_nothing_to_say() -> None:
    assert PLAN.predicted is not None
    stages = stages_as_measured(PLAN, told_of(PLAN, list(PLAN.stages)))
    assert differences(PLAN, stages, iteration_s=PLAN.predicted.iteration_s, profile=PROFILE) == ()


def test_what_splitting_costs_is_part_of_what_was_planned() -> None:
    dear = dataclasses.replace(
        PROFILE,
        layers=tuple(
            dataclasses.replace(layer, costs=tuple(dataclasses.replace(row, split_s=0.2) for row in layer.costs))
            for layer in PROFILE.layers
        ),
    )
    plan = fresh_plan(dear, [["block.0", "block.1"], ["block.2", "block.3"]], ranks=2, name=ScheduleName.ZB_H1)
    assert plan.predicted is not None
    assert [stage.split_s for stage in plan.stages] == [0.4, 0.4]
    stages = stages_as_measured(plan, told_of(plan, list(plan.stages)))
    assert [stage.split_s for stage in stages] == pytest.approx([0.0, 0.4]), "the first stage hands nothing on"
    assert differences(plan, stages, iteration_s=plan.predicted.iteration_s, profile=dear) == ()
    slow = [plan.stages[0], dataclasses.replace(plan.stages[1], backward_weight_s=10.0)]
    words = differences(plan, stages_as_measured(plan, told_of(plan, slow)), iteration_s=1.0, profile=None)
    assert [text.split(": ")[1].split(" ")[:4] for text in words] == [["F,", "I", "and", "W"]]


def test_which_stage_and_whether_it_is_the_links() -> None:
    assert PLAN.predicted is not None
    slow = [dataclasses.replace(PLAN.stages[0], forward_s=1.5 * PLAN.stages[0].forward_s), PLAN.stages[1]]
    stages = stages_as_measured(PLAN, told_of(PLAN, slow))
    words = differences(PLAN, stages, iteration_s=2 * PLAN.predicted.iteration_s, profile=PROFILE)
    assert words[0] == "stage 0 on rank 0 (block.0 to block.1): F 50 % longer than planned"
    assert words[1].startswith("links and optimizer: with its stages as measured the plan would take")
    assert len(words) == 2


@pytest.mark.slow
def test_what_a_run_measures_is_solved_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """profile -> solve -> run --save-profile -> solve -> check; its stages are those that the run took."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(EVERYTHING.read_text())
    for words in (
        ["profile", "model.py", "--microbatch", "2", "-o", "first.json"],
        ["solve", "first.json", "--gpus", "2", "--pipeline", "2", "--batch", "8", "--microbatch", "2"],
        ["run", "plan.yaml", "--steps", "6", "--save-profile", "second.json"],
        ["solve", "second.json", "--gpus", "2", "--pipeline", "2", "--batch", "8", "-o", "again.yaml"],
        ["check", "again.yaml"],
    ):
        answer = pipeplan(*words)
        assert answer.code == 0, answer
    first, second = read_profile(tmp_path / "first.json"), read_profile(tmp_path / "second.json")
    assert second.model == first.model
    assert [layer.name for layer in second.layers] == [layer.name for layer in first.layers]
    assert second.layers != first.layers
    plan = read_plan(tmp_path / "plan.yaml")
    times = [sum(cost.forward_s for layer in second.layers for cost in layer.costs if layer.name in stage.layers)
             for stage in plan.stages]  # fmt: skip
    assert all(time > 0 for time in times)


def test_a_run_without_its_profile_cannot_save_one(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="its profile is not there"):
        run(plan_of(EVERYTHING, num_ranks=1), tmp_path, save_profile=tmp_path / "saved.json")
