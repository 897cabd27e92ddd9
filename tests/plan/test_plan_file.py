"""Plan files: what is written is read, what a person may write is read, and what breaks a rule is refused by name."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from support.plans import plans, profiles, save

from planner.errors import InputError
from planner.plan import job_of, read_plan, schedule_of
from planner.profile import read_profile


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_what_is_written_is_read(data: st.DataObject) -> None:
    profile = data.draw(profiles())
    plan = data.draw(plans(profile))
    with tempfile.TemporaryDirectory() as folder:
        path = save(plan, profile, Path(folder), bound_s=data.draw(st.sampled_from([None, 1.0])))
        again = read_plan(path)
        assert again.stages == plan.stages
        assert again.cluster == plan.cluster
        assert read_profile(path.parent / "profile.json") == profile
        assert job_of(again, profile) == job_of(plan, profile)
        assert schedule_of(again) == schedule_of(plan)


@pytest.fixture
def document() -> dict[str, Any]:
    """Two ranks, one stage each, as a person would write it."""
    stage = {
        "forward_s": 1e-3,
        "backward_input_s": 1,
        "backward_weight_s": 0,
        "parameter_bytes": 8,
        "trainable_bytes": 8,
        "buffer_bytes": 0,
        "input_bytes": 4,
        "saved_bytes": 4,
        "saved_for_weight_bytes": 4,
        "workspace_bytes": 0,
    }
    return {
        "format": "pipeplan-plan/1",
        "model": {"name": "m", "source": "m.py", "fingerprint": "f"},
        "profile": {"path": "p.json", "sha256": "s", "provenance": "measured", "device": "d"},
        "cluster": {},
        "batch": {"global": 8, "microbatch": 2, "microbatches": 4},
        "parallel": {"gpus": 2, "pipeline": 2, "virtual": 1, "data": 1, "tensor": 1},
        "schedule": {"name": "1f1b", "placement": "loop"},
        "stages": [
            {"stage": 0, "rank": 0, "layers": ["a"], **stage, "sends": [{"to_stage": 1, "bytes": 4}]},
            {"stage": 1, "rank": 1, "layers": ["b"], **stage, "returns": [{"to_stage": 0, "bytes": 4}]},
        ],
    }


def _set(document: dict[str, Any], path: str, value: object) -> None:
    *parents, last = path.split(".")
    place: Any = document
    for part in parents:
        place = place[int(part)] if part.isdigit() else place[part]
    place[int(last) if last.isdigit() else last] = value


SYNTHESISED = {"schedule": {"name": "synthesised", "placement": "loop"}, "actions": ["0F0 0B0", "1F0 1B0"]}


@pytest.mark.parametrize(
    ("edits", "said"),
    [
        ({"parallel.gpus": 3}, "parallel.gpus: is 3, but pipeline 2"),
        ({"batch.global": 9}, "batch.global: is 9, but microbatch 2"),
        ({"batch.microbatches": 10**12}, "batch.microbatches: is 1000000000000, which with 2 stages makes"),
        ({"parallel.virtual": 2}, "stages: are 2, but pipeline 2"),
        ({"stages.1.stage": 0}, "stages[1].stage: is 0"),
        ({"stages.1.rank": 2}, "stages[1].rank: there is no rank 2"),
        ({"stages.1.rank": 0}, "stages[1].rank: is 0, but placement loop puts stage 1 on rank 1"),
        ({"stages.1.layers": []}, "stages[1].layers: are none"),
        ({"stages.1.layers": ["a"]}, "stages[1].layers: 'a' stands in stage 0 already"),
        ({"stages.1.layers": ["b", "b"]}, "stages[1].layers: 'b' stands in stage 1 already"),
        ({"schedule.placement": "v"}, "schedule.placement: v needs virtual 2, not 1"),
        ({"schedule.placement": "free"}, "schedule: schedule 1f1b needs placement loop, not free"),
        ({"schedule.warmup": [1]}, "schedule: warmup has 1 depths for 2 ranks"),
        (
            {"schedule": {"name": "gpipe", "placement": "loop", "warmup": [1, 1]}},
            "schedule: schedule gpipe has no warm-up",
        ),
        ({"schedule.warmup": [0, 1]}, "schedule: warmup[0] is 0, but the rank runs 4 forwards"),
        ({"schedule.name": "zb-v"}, "schedule: schedule zb-v needs placement v and virtual 2"),
        ({"schedule.name": "synthesised"}, "actions: is missing"),
        ({"schedule": {"name": "synthesised", "placement": "loop", "warmup": [1, 1]}}, "schedule.warmup: a synth"),
        ({"actions": ["0F0", "1F0"]}, "actions: schedule 1f1b makes its own"),
        ({**SYNTHESISED, "actions": ["0F0"]}, "actions: are 1 strings for 2 ranks"),
        ({**SYNTHESISED, "actions": ["0F0 0X0", "1F0"]}, "actions[0], action 1: '0X0' is no action"),
        ({**SYNTHESISED, "actions": ["2F0", "1F0"]}, "actions[0], action 0: 2F0: there is no stage 2"),
        ({**SYNTHESISED, "actions": ["1F0", "1F0"]}, "actions[0], action 0: 1F0: stage 1 is on rank 1"),
        ({**SYNTHESISED, "actions": ["0F4", "1F0"]}, "actions[0], action 0: 0F4: there is no micro-batch 4"),
        ({"cluster": {"memory_bytes": "gameboy"}}, "cluster: 'gameboy' is no known device"),
        (
            {"cluster": {"gpus_per_node": 3}, "parallel.tensor": 2, "parallel.gpus": 4},
            "cluster: 3 GPUs per node cannot hold groups of 2 tensor ranks",
        ),
        ({"schedule.name": "2f2b"}, "schedule.name: must be "),
        ({"format": "pipeplan-plan/2"}, "format: pipeplan-plan/2 is not the version read here, pipeplan-plan/1"),
        ({"format": "pipeplan-profile/1"}, "format: is 'pipeplan-profile/1'"),
        ({"stages.0.forward_s": -1}, "stages[0].forward_s: must be at least 0, not -1"),
        ({"stages.0.forward_s": float("nan")}, "stages[0].forward_s: must be a finite number"),
        ({"stages.0.saved_bytes": 1.5}, "stages[0].saved_bytes: must be a whole number, not 1.5"),
        ({"stages.0.color": 1}, "stages[0].color: is no key of this format"),
    ],
)
def test_a_broken_rule_is_named(document: dict[str, Any], tmp_path: Path, edits: dict[str, Any], said: str) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump(document))
    read_plan(path)
    for place, value in edits.items():
        _set(document, place, value)
    path.write_text(yaml.safe_dump(document))
    with pytest.raises(InputError) as raised:
        read_plan(path)
    assert str(raised.value).startswith(f"{path}: {said}")
    assert raised.value.hint or "must be" in said


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        ("stages.0.sends", [{"to_stage": 2, "bytes": 1}], "stages[0].sends[0].to_stage: there is no stage 2"),
        ("stages.1.sends", [{"to_stage": 0, "bytes": 1}], "stages[1].sends[0].to_stage: is 0, but a send goes"),
        ("stages.0.returns", [{"to_stage": 1, "bytes": 1}], "stages[0].returns[0].to_stage: is 1, but a return goes"),
        ("stages.0.sends", [{"to_stage": 1, "bytes": 1}] * 2, "stages[0].sends[1].to_stage: is 1 as in an earlier"),
    ],
)
@settings(max_examples=1, deadline=None)
@given(profile=profiles(min_layers=2))
def test_a_job_refuses_transfers_that_go_nowhere(profile: Any, place: str, value: object, said: str) -> None:
    document = _two_stages(profile)
    _set(document, place, value)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.yaml"
        path.write_text(yaml.safe_dump(document))
        plan = read_plan(path)
    with pytest.raises(InputError) as raised:
        job_of(plan, profile)
    assert str(raised.value).startswith(said)


def _two_stages(profile: Any) -> dict[str, Any]:
    made: dict[str, Any] = document.__wrapped__()  # type: ignore[attr-defined]
    names = [layer.name for layer in profile.layers]
    made["stages"][0]["layers"], made["stages"][1]["layers"] = names[:1], names[1:]
    return made


def test_numbers_in_any_form_of_yaml_1_2(document: dict[str, Any], tmp_path: Path) -> None:
    text = yaml.safe_dump(document).replace("forward_s: 0.001", "forward_s: 1e-3")
    assert "1e-3" in text
    (tmp_path / "plan.yaml").write_text(text.replace("global: 8", "global: 0x8"))
    plan = read_plan(tmp_path / "plan.yaml")
    assert plan.stages[0].forward_s == 0.001
    assert plan.batch.global_batch == 8
