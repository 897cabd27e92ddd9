"""Plans for other systems: what is written says the plan, whole; what a system cannot express is refused by name."""

from __future__ import annotations

import ast
import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.command import pipeplan, refused
from support.plans import fresh_plan, save
from support.rows import edge, renamed, row_profile, with_tensor_rows

from planner.exchange.deepspeed import entries_of
from planner.exchange.megatron import layout_text
from planner.exchange.target import planned
from planner.plan import Plan, read_plan, schedule_of
from planner.profile import Profile
from planner.schedules import ScheduleName, format_order

TARGETS = ["torch", "torchtitan", "megatron", "deepspeed"]


def cut_of(profile: Profile, *starts: int) -> list[list[str]]:
    """The layers in stages that begin at 0 and at these."""
    names = [layer.name for layer in profile.layers]
    return [names[a:b] for a, b in zip((0, *starts), (*starts, len(names)), strict=True)]


def saved(folder: Path, profile: Profile, *starts: int, edit: Any = None, **shape: Any) -> Path:
    """A plan with these starts of stages."""
    cut = cut_of(profile, *starts)
    plan = fresh_plan(profile, cut, **({"ranks": len(cut)} | shape))
    return save(edit(plan) if edit else plan, profile, folder)


def exported(path: Path, target: str) -> str:
    answer = pipeplan("export", path, "--to", target)
    assert answer.code == 0, answer
    assert answer.err == ""
    return answer.out


def constants(text: str) -> dict[str, Any]:
    """The constants that a Python file assigns, by name; the file must compile."""
    compile(text, "exported.py", "exec")
    found = {}
    for statement in ast.parse(text).body:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            try:
                found[statement.targets[0].id] = ast.literal_eval(statement.value)
            except ValueError:
                continue
        elif isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Tuple):
            names = [name.id for name in statement.targets[0].elts if isinstance(name, ast.Name)]
            found.update(zip(names, ast.literal_eval(statement.value), strict=True))
    return found


# --- what is written --------------------------------------------------------------------------------------------------


def test_megatron_says_sizes_batch_and_layout(tmp_path: Path) -> None:
    path = saved(tmp_path, row_profile(6), 2, 5, microbatches=4, size=2, data=2)
    text = exported(path, "megatron")
    options = dict(re.findall(r"^  (--\S+)(?: (.*))?$", text, re.MULTILINE))
    assert options == {
        "--pipeline-model-parallel-size": "3",
        "--pipeline-model-parallel-layout": '"Et|t*3|ttL"',
        "--tensor-model-parallel-size": "1",
        "--micro-batch-size": "2",
        "--global-batch-size": "16",
        "--num-layers": "6",
        "--untie-embeddings-and-output-weights": "",
    }
    assert all(line.startswith(("#", "  --", "PIPEPLAN_OPTIONS=(", ")")) for line in text.splitlines())


def test_megatron_interleaves_and_recomputes_and_ties(tmp_path: Path) -> None:
    profile = row_profile(6, tied=True)
    path = saved(
        tmp_path, profile, 1, 4, 6, ranks=2, name=ScheduleName.INTERLEAVED, recompute=[True] * 4, microbatches=4
    )
    text = exported(path, "megatron")
    assert '--pipeline-model-parallel-layout "E|t*3|tt|tL"' in text
    assert "--recompute-granularity full\n  --recompute-method uniform\n  --recompute-num-layers 3" in text
    assert "--untie" not in text
    assert "stage 2 on pipeline rank 0: tt" in text


@pytest.mark.parametrize("sequence", [False, True])
def test_tensor_ranks_and_their_tokens_are_options_of_both(tmp_path: Path, sequence: bool) -> None:
    profile = with_tensor_rows(row_profile(6), sequence=sequence)
    path = saved(tmp_path, profile, 3, microbatches=4, tensor=2)
    options = dict(re.findall(r"^  (--\S+)(?: (.*))?$", exported(path, "megatron"), re.MULTILINE))
    assert options["--tensor-model-parallel-size"] == "2"
    assert ("--sequence-parallel" in options) == sequence
    text = exported(path, "torchtitan")
    assert "tensor_parallel_degree=2" in text
    assert f"enable_sequence_parallel={sequence}" in text


@given(st.lists(st.text("t", max_size=12), min_size=1, max_size=8))
def test_a_layout_unrolls_to_its_stages(rows: list[str]) -> None:
    rows[0], rows[-1] = f"E{rows[0]}", f"{rows[-1]}L"
    unrolled = re.sub(r"(.)\*(\d+)", lambda run: run[1] * int(run[2]), layout_text(rows))
    assert unrolled.split("|") == rows


def test_torchtitan_says_parts_and_schedule(tmp_path: Path) -> None:
    path = saved(tmp_path, row_profile(6), 2, 5, microbatches=6, size=2)
    said = constants(exported(path, "torchtitan"))
    assert said["MODULE_FQNS_PER_MODEL_PART"] == [
        ["token", "blocks.0"],
        ["blocks.1", "blocks.2", "blocks.3"],
        ["blocks.4", "blocks.5", "norm", "head"],
    ]
    assert (said["SCHEDULE"], said["SCHEDULE_CSV"], said["RECOMPUTE"]) == ("1F1B", None, False)


def test_torchtitan_takes_other_orders_as_csv(tmp_path: Path) -> None:
    path = saved(tmp_path, row_profile(6), 2, 5, name=ScheduleName.ZB_H1, microbatches=6)
    said = constants(exported(path, "torchtitan"))
    assert said["SCHEDULE"] == "1F1B"
    assert said["SCHEDULE_CSV"] == exported(path, "torch-csv")
    (tmp_path / "v").mkdir()
    path = saved(tmp_path / "v", row_profile(6), 2, 5, 7, name=ScheduleName.ZB_V, ranks=2, microbatches=6)
    said = constants(exported(path, "torchtitan"))
    assert said["SCHEDULE"] == "ZBVZeroBubble"
    assert said["SCHEDULE_CSV"] == exported(path, "torch-csv")


def test_deepspeed_says_boundaries_and_batch(tmp_path: Path) -> None:
    path = saved(tmp_path, row_profile(6), 2, 5, microbatches=4, size=2, data=2, recompute=[False, True, False])
    said = constants(exported(path, "deepspeed"))
    assert said["BOUNDARIES"] == [0, 2, 5, 9]
    assert said["CHECKPOINT_INTERVAL"] == [0, 3, 0]
    assert said["LAYERS"] == [["token"], *([f"blocks.{index}"] for index in range(6)), ["norm"], ["head"]]
    assert said["CONFIG"] == {
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
    }
    assert (said["STAGES"], said["TIED"]) == (3, {})


def test_deepspeed_names_tied_entries(tmp_path: Path) -> None:
    path = saved(tmp_path, row_profile(4, tied=True), 3)
    assert constants(exported(path, "deepspeed"))["TIED"] == {"token.weight": [0, 6]}


def test_torch_says_split_points_and_order(tmp_path: Path) -> None:
    path = saved(tmp_path, row_profile(6), 2, 5, 7, name=ScheduleName.ZB_V, ranks=2, microbatches=6, data=2)
    said = constants(exported(path, "torch"))
    assert said["SPLIT_POINTS"] == ["blocks.1", "blocks.4", "norm"]
    assert said["RANK_OF_STAGE"] == [0, 1, 1, 0]
    assert said["SCHEDULE"] == exported(path, "torch-csv")
    assert (said["PIPELINE"], said["DATA"], said["MICROBATCH"], said["MICROBATCHES"]) == (2, 2, 1, 6)


@pytest.mark.parametrize("target", [*TARGETS, "torch-csv"])
def test_a_file_is_written_and_the_next_step_said(tmp_path: Path, target: str) -> None:
    path = saved(tmp_path, row_profile(6), 2)
    goal = tmp_path / "out" / "file"
    answer = pipeplan("export", path, "--to", target, "-o", goal)
    assert answer.code == 0
    assert answer.out == ""
    assert answer.err.startswith(f"wrote {goal}; ")
    if target == "torch":
        assert f"torchrun --nproc-per-node 2 {goal}, " in answer.err
        assert "remark: dropout" in answer.err
        assert "Dropout is drawn otherwise" in goal.read_text()
    others = answer.err.splitlines()[1:]
    assert all(line.startswith(("remark: ", "        ")) for line in others), "a command to copy is not broken"
    assert goal.read_text()
    assert pipeplan("export", path, "--to", target, "-o", goal).code == 0, "its own file is written anew"
    for other in (path, tmp_path / "profile.json"):
        before = other.read_bytes()
        assert "is no file that export writes" in refused(pipeplan("export", path, "--to", target, "-o", other))
        assert other.read_bytes() == before


def test_the_model_file_is_named_from_where_the_script_lies(tmp_path: Path) -> None:
    path = saved(tmp_path, row_profile(6), 2)
    goal = tmp_path / "elsewhere" / "deep" / "train.py"
    assert pipeplan("export", path, "--to", "torch", "-o", goal).code == 0
    assert "parent / '../../model.py'" in goal.read_text()


# --- what is refused --------------------------------------------------------------------------------------------------


def _no(path: Path, target: str) -> str:
    line = refused(pipeplan("export", path, "--to", target))
    assert "cannot express" in line
    return line


@pytest.mark.parametrize("target", TARGETS)
def test_a_sharded_optimizer(tmp_path: Path, target: str) -> None:
    path = saved(tmp_path, row_profile(6), 2)
    text = path.read_text()
    path.write_text(text.replace("tensor: 1}", "tensor: 1, zero1: true}"))
    assert path.read_text() != text
    assert "(parallel.zero1)" in refused(pipeplan("export", path, "--to", target))


@pytest.mark.parametrize("target", TARGETS)
def test_a_skip_over_stages(tmp_path: Path, target: str) -> None:
    path = saved(tmp_path, row_profile(6, skip=True), 2, 5)
    assert "a skip over stages: layer head of stage 2 reads token of stage 0" in _no(path, target)


@pytest.mark.parametrize("target", ["torch", "torchtitan"])
def test_a_tied_parameter_over_stages(tmp_path: Path, target: str) -> None:
    path = saved(tmp_path, row_profile(6, tied=True), 2)
    assert "parameter token.weight shared by several stages" in _no(path, target)


@pytest.mark.parametrize("target", ["megatron", "deepspeed"])
@pytest.mark.parametrize("name", [ScheduleName.GPIPE, ScheduleName.ZB_H1, ScheduleName.ZB_V])
def test_a_schedule_that_is_not_theirs(tmp_path: Path, target: str, name: ScheduleName) -> None:
    starts = (2, 4, 6) if name is ScheduleName.ZB_V else (2,)
    path = saved(tmp_path, row_profile(6), *starts, ranks=2, name=name)
    assert f"schedule {name.value} in placement" in _no(path, target)


def _with(plan: Plan, **schedule: Any) -> Plan:
    return dataclasses.replace(plan, schedule=dataclasses.replace(plan.schedule, **schedule))


@pytest.mark.parametrize("target", ["megatron", "deepspeed"])
def test_a_warm_up_that_is_not_theirs(tmp_path: Path, target: str) -> None:
    path = saved(tmp_path, row_profile(6), 4, edit=lambda plan: _with(plan, warmup=(3, 1)))
    said = _no(path, target)
    assert "warm-up depths [3, 1]" in said
    assert constants(exported(path, "torchtitan"))["SCHEDULE_CSV"] == exported(path, "torch-csv")

    (written, cost) = re.findall(r"write schedule: (\{.*?\}) in \S+, which takes (\S+)% (?:longer|less)", said)[0]
    assert pipeplan("check", path, "--write").code == 0
    before = read_plan(path).predicted
    text = path.read_text()
    path.write_text(re.sub(r"\nschedule:(?: \{.*\}\n|\n(?:  .*\n)+)", f"\nschedule: {written}\n", text))
    assert path.read_text() != text
    assert pipeplan("check", path, "--write").code == 0
    after = read_plan(path).predicted
    assert before is not None
    assert after is not None
    assert float(cost) == pytest.approx(100 * abs(after.iteration_s / before.iteration_s - 1), abs=0.06)
    exported(path, target)


@pytest.mark.parametrize("target", ["megatron", "deepspeed"])
def test_their_own_order_under_another_name(tmp_path: Path, target: str) -> None:
    path = saved(tmp_path, row_profile(6), 4)
    own = exported(path, target)

    def as_actions(plan: Plan) -> Plan:
        actions = tuple(map(format_order, schedule_of(plan)))
        return dataclasses.replace(_with(plan, name=ScheduleName.SYNTHESISED, warmup=None), actions=actions)

    assert exported(saved(tmp_path, row_profile(6), 4, edit=as_actions), target) == own


@pytest.mark.parametrize("target", ["megatron", "torchtitan"])
def test_recompute_of_some_stages(tmp_path: Path, target: str) -> None:
    path = saved(tmp_path, row_profile(6), 4, recompute=[False, True])
    assert "recompute of stage 1 and not of stage 0" in _no(path, target)


@pytest.mark.parametrize("target", ["torch", "torchtitan"])
def test_recompute_beside_a_split_backward(tmp_path: Path, target: str) -> None:
    path = saved(tmp_path, row_profile(6), 4, recompute=[True, True], name=ScheduleName.ZB_H1)
    assert "recompute of stage 0 beside a backward in two halves" in _no(path, target)


@pytest.mark.parametrize("target", ["torch", "torchtitan"])
def test_a_tensor_without_gradient_between_stages(tmp_path: Path, target: str) -> None:
    profile = row_profile(6)
    edges = [edge(e.source, e.target, grad=e.source != "blocks.2") for e in profile.edges]
    path = saved(tmp_path, dataclasses.replace(profile, edges=tuple(edges)), 4)
    assert "blocks.3 of stage 1 reads blocks.2 of stage 0" in _no(path, target)


def test_an_output_that_its_own_w_needs(tmp_path: Path) -> None:
    """A residual around the norm that ends the stage: torch's I frees what W of the norm reads."""
    profile = row_profile(6)
    edges = (*profile.edges, edge("blocks.2", "blocks.4"))
    edges = tuple(edge(e.source, e.target, saved=e.target == "blocks.3") for e in edges)
    profile = dataclasses.replace(profile, edges=edges)
    assert exported(saved(tmp_path, profile, 5), "torch")
    path = saved(tmp_path, profile, 5, name=ScheduleName.ZB_H1)
    assert "hands on blocks.2 and needs it for the weights of blocks.3" in _no(path, "torch")


@pytest.mark.parametrize("target", ["torch", "torchtitan"])
def test_forwards_out_of_order(tmp_path: Path, target: str) -> None:
    def swapped(plan: Plan) -> Plan:
        orders = ("0F1 0F0 0B1 0B0", "1F1 1B1 1F0 1B0")
        return dataclasses.replace(_with(plan, name=ScheduleName.SYNTHESISED), actions=orders)

    path = saved(tmp_path, row_profile(6), 4, microbatches=2, edit=swapped)
    assert "rank 0 position 0: 0F1, a forward out of the micro-batches' order" in _no(path, target)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ({"blocks.3": "blocks.2.more"}, "a cut within blocks.2"),
        ({"token": "blocks.6"}, "a model without a layer before blocks"),
        ({"head": "blocks.6", "norm": "blocks.7"}, "a model without a layer after blocks"),
        ({"blocks.1": "between"}, "layer between between decoder layers"),
        ({"blocks.0": "other.0", "blocks.1": "other.1"}, "a model that repeats layers in other, blocks"),
        ({f"blocks.{index}": f"block_{index}" for index in range(6)}, "a model without a row of like layers"),
    ],
)
def test_a_model_that_is_no_row_of_decoder_layers(tmp_path: Path, names: dict[str, str], said: str) -> None:
    path = saved(tmp_path, renamed(row_profile(6), names), 4)
    assert said in _no(path, "megatron")


def test_a_cut_within_what_a_system_keeps_whole(tmp_path: Path) -> None:
    profile = row_profile(6)
    path = saved(tmp_path, profile, 8)
    assert "a cut within what comes after them: head is in stage 1" in _no(path, "megatron")
    opened = renamed(profile, {"blocks.3": "blocks.2.mlp"})
    assert "a cut within module blocks.2" in _no(saved(tmp_path, opened, 4), "torchtitan")
    nested = renamed(profile, {name.name: f"model.{name.name}" for name in profile.layers})
    said = _no(saved(tmp_path, nested, 4), "torchtitan")
    assert "a cut within module model" in said
    assert said.endswith("where lists lie deeper, export --to torch")


def test_a_stage_that_begins_within_a_module_or_at_its_second_call(tmp_path: Path) -> None:
    for names in ({"blocks.2": "blocks.2.inner", "blocks.3": "blocks.2"}, {"blocks.3": "blocks.2@1"}):
        path = saved(tmp_path, renamed(row_profile(6), names), 4)
        assert "the start of stage 1 at layer blocks.2" in _no(path, "torch")


@pytest.mark.parametrize(("microbatches", "fine"), [(1, False), (3, False), (4, True)])
def test_micro_batches_that_megatron_cannot_interleave(tmp_path: Path, microbatches: int, fine: bool) -> None:
    path = saved(tmp_path, row_profile(6), 1, 4, 6, ranks=2, name=ScheduleName.INTERLEAVED, microbatches=microbatches)
    if fine:
        assert exported(path, "megatron")
    else:
        assert f"{microbatches} micro-batches over 2 ranks of several stages" in _no(path, "megatron")


def test_entries_are_runs_between_single_tensors(tmp_path: Path) -> None:
    """Two layers read block 2: what lies between belongs to one entry, and a stage cannot begin inside."""
    profile = row_profile(6)
    profile = dataclasses.replace(profile, edges=(*profile.edges, edge("blocks.2", "blocks.4")))
    path = saved(tmp_path, profile, 6)
    entries = [[layer.name for layer in entry] for entry in entries_of(planned(path, system="x"))]
    assert ["blocks.3", "blocks.4"] in entries
    assert [name for entry in entries for name in entry] == [layer.name for layer in profile.layers]
    assert "the start of stage 1 at layer blocks.4" in _no(saved(tmp_path, profile, 5), "deepspeed")


@pytest.mark.parametrize("target", TARGETS)
def test_stages_that_are_no_runs_of_layers(tmp_path: Path, target: str) -> None:
    profile = row_profile(4)
    aside = (edge("token", "blocks.0"), edge("token", "blocks.1"), edge("blocks.0", "head"), edge("blocks.1", "head"))
    profile = dataclasses.replace(profile, edges=aside)
    cut = [["token", "blocks.1", "blocks.2"], ["blocks.0", "blocks.3", "norm", "head"]]
    path = save(fresh_plan(profile, cut, ranks=2), profile, tmp_path)
    assert "stage 0, which runs layer blocks.1 before blocks.0 of a later stage" in _no(path, target)


@pytest.mark.parametrize("target", TARGETS)
def test_an_imported_profile_names_no_modules(tmp_path: Path, target: str) -> None:
    profile = dataclasses.replace(row_profile(6), provenance="imported")
    assert "layers of an imported profile" in _no(saved(tmp_path, profile, 4), target)


@pytest.mark.parametrize("target", TARGETS)
def test_a_plan_that_breaks_a_rule_or_lost_its_profile(tmp_path: Path, target: str) -> None:
    path = saved(tmp_path, row_profile(6), 4)
    path.write_text(path.read_text().replace("name: 1f1b", "name: zb-v"))
    assert "zb-v needs placement v" in refused(pipeplan("export", path, "--to", target))
    path = saved(tmp_path, row_profile(6), 4)
    (tmp_path / "profile.json").unlink()
    assert "profile.json" in refused(pipeplan("export", path, "--to", target))
