"""``pipeplan simulate``, ``export --to torch-csv`` and ``import --from torch-csv``."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.command import pipeplan, refused
from support.plans import chain_profile, fresh_plan, save

from planner.plan import read_plan
from planner.schedules import ScheduleName


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Four stages on four ranks, eight micro-batches, 1F1B, with a bound."""
    profile = chain_profile(8)
    cut = [[f"block.{2 * stage}", f"block.{2 * stage + 1}"] for stage in range(4)]
    return save(fresh_plan(profile, cut, ranks=4, microbatches=8), profile, tmp_path, bound_s=0.5)


@pytest.fixture
def v_path(tmp_path: Path) -> Path:
    """Eight stages on four ranks in a V."""
    profile = chain_profile(8)
    cut = [[f"block.{stage}"] for stage in range(8)]
    folder = tmp_path / "v"
    folder.mkdir()
    return save(fresh_plan(profile, cut, ranks=4, microbatches=8, name=ScheduleName.ZB_V), profile, folder)


def _edit(path: Path, edit: Any) -> None:
    data = yaml.safe_load(path.read_text())
    edit(data)
    path.write_text(yaml.safe_dump(data))


def test_what_is_simulated_is_what_the_plan_predicts(path: Path) -> None:
    document = json.loads(pipeplan("simulate", path, "--json").out)
    predicted = yaml.safe_load(path.read_text())["predicted"]
    bubble = document.pop("bubble")
    assert document == predicted
    assert set(bubble) == {"skew_s", "imbalance_s", "links_s", "rest_s"}
    busy = sum(rank["busy_s"] for rank in predicted["ranks"]) / 4
    assert sum(bubble.values()) == pytest.approx(busy / (1 - predicted["bubble_fraction"]) - busy)
    assert all(part >= 0 for part in bubble.values())
    assert bubble["imbalance_s"] == pytest.approx(max(rank["busy_s"] for rank in predicted["ranks"]) - busy)


def test_a_plan_without_a_bound_has_none_in_json_either(v_path: Path) -> None:
    document = json.loads(pipeplan("simulate", v_path, "--json").out)
    assert (document["bound_s"], document["gap"]) == (None, None)


def test_the_text_fits_in_80_columns(path: Path, v_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    names = "gpipe,1f1b,zb-h1,zb-h2,synthesised"
    for words in ((path,), (path, "--schedule", names), (v_path,), (v_path, "--schedule", "v-half,dualpipe-v")):
        answer = pipeplan("simulate", *words)
        assert answer.code == 0
        assert not answer.err
        assert max(map(len, answer.out.splitlines())) <= 80
    lines = pipeplan("simulate", path).out.splitlines()
    rows = [line for line in lines if line.startswith("rank ")]
    assert len(rows) == 4
    assert rows[0].startswith("rank 0 F")
    assert rows[3].startswith("rank 3 ··")


def test_schedules_stand_side_by_side_fastest_first(path: Path) -> None:
    names = ["gpipe", "1f1b", "zb-h1", "zb-h2", "synthesised"]
    documents = json.loads(pipeplan("simulate", path, "--schedule", ",".join(names), "--json").out)
    assert [document["name"] for document in documents] == names
    seconds = {document["name"]: document["iteration_s"] for document in documents}
    assert seconds["synthesised"] <= min(seconds.values()) * (1 + 1e-9)
    table = pipeplan("simulate", path, "--schedule", ",".join(names)).out.splitlines()
    shown = [line.split()[0] for line in table if line.split() and line.split()[0] in names]
    assert [seconds[name] for name in shown] == sorted(seconds.values())


def test_stages_count_as_they_stand(path: Path) -> None:
    before = json.loads(pipeplan("simulate", path, "--json").out)
    _edit(path, lambda data: data["stages"][3].update(forward_s=1.0))
    after = json.loads(pipeplan("simulate", path, "--json").out)
    assert after["iteration_s"] > before["iteration_s"] + 7


def test_figures_of_an_earlier_cut_are_remarked(path: Path) -> None:
    assert "stale" not in pipeplan("simulate", str(path)).err

    def move(data: Any) -> None:
        data["stages"][1]["layers"].insert(0, data["stages"][0]["layers"].pop())

    _edit(path, move)
    answer = pipeplan("simulate", str(path))
    assert answer.code == 0
    assert f"remark: figures of {path} are stale; pipeplan check {path} --write" in " ".join(answer.err.split())


def test_the_warm_up_is_told(path: Path) -> None:
    """A plan's own depths count under its own schedule alone; another one takes its default, and says so."""
    _edit(path, lambda data: data["schedule"].update(warmup=[7, 5, 3, 1]))
    assert "warm-up of 1f1b: 7, 5, 3, 1 (as the plan says)" in pipeplan("simulate", path).out
    both = pipeplan("simulate", path, "--schedule", "1f1b,zb-h1,gpipe").out
    assert "warm-up of 1f1b: 7, 5, 3, 1 (as the plan says)" in both
    assert "warm-up of zb-h1: 4, 3, 2, 1 (its default)" in both
    assert "warm-up of gpipe" not in both


def test_a_plan_that_does_not_fit_is_simulated_and_said(path: Path) -> None:
    _edit(path, lambda data: data["cluster"].update(memory_bytes=10_000))
    assert "DOES NOT FIT" in pipeplan("simulate", path).out


def test_what_cannot_be_simulated_is_refused(path: Path) -> None:
    assert "there is no schedule 'zb-w'" in refused(pipeplan("simulate", path, "--schedule", "zb-w"))
    assert "needs placement v" in refused(pipeplan("simulate", path, "--schedule", "zb-v"))
    assert "no schedule 'a', 'b'; there are" in refused(pipeplan("simulate", path, "--schedule", "a,gpipe,b"))
    assert "none of these" in refused(pipeplan("simulate", path, "--schedule", "zb-v,dualpipe-v"))
    some = pipeplan("simulate", path, "--schedule", "gpipe,zb-v,zb-h1", "--json")
    assert [one["name"] for one in json.loads(some.out)] == ["zb-h1", "gpipe"][::-1]
    assert "remark: zb-v is left out: " in some.err
    _edit(path, lambda data: data["schedule"].update(warmup=[1, 3, 2, 1]))
    assert "deadlock: rank 0 position 1: 0B0" in refused(pipeplan("simulate", path))
    (path.parent / "profile.json").write_text("{}")
    assert "is not the profile" in refused(pipeplan("simulate", path))


def test_a_schedule_goes_out_as_csv_and_comes_back(v_path: Path) -> None:
    table = v_path.parent / "table.csv"
    assert pipeplan("export", v_path, "--to", "torch-csv", "-o", table).code == 0
    assert pipeplan("export", v_path, "--to", "torch-csv").out == table.read_text()
    assert table.read_text().splitlines()[3].startswith("3F0,4F0,3F1,4F1")
    before = read_plan(v_path)
    answer = pipeplan("import", table, "--from", "torch-csv", "--plan", v_path)
    assert answer.code == 0
    after = read_plan(v_path.parent / "table.yaml")
    assert after.schedule.name is ScheduleName.SYNTHESISED
    assert after.schedule.placement is before.schedule.placement
    assert after.stages == before.stages
    assert after.predicted == before.predicted
    assert [row.replace(" ", ",") for row in after.actions or ()] == table.read_text().splitlines()
    assert pipeplan("check", v_path.parent / "table.yaml").code == 0


def test_an_imported_plan_finds_its_profile_from_another_folder(v_path: Path, tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    pipeplan("export", v_path, "--to", "torch-csv", "-o", table)
    goal = tmp_path / "elsewhere" / "deep" / "plan.yaml"
    assert pipeplan("import", table, "--from", "torch-csv", "--plan", v_path, "-o", goal).code == 0
    assert read_plan(goal).profile.path == "../../v/profile.json"
    assert pipeplan("check", goal).code == 0


def test_rows_say_which_rank_has_a_stage(v_path: Path) -> None:
    """The same table with its rows turned: every stage moves, and what is sent where follows."""
    table = v_path.parent / "table.csv"
    pipeplan("export", v_path, "--to", "torch-csv", "-o", table)
    rows = table.read_text().splitlines()
    table.write_text("\n".join([*rows[1:], rows[0]]) + "\n")
    assert pipeplan("import", table, "--from", "torch-csv", "--plan", v_path).code == 0
    after = read_plan(v_path.parent / "table.yaml")
    assert [stage.rank for stage in after.stages] == [3, 0, 1, 2, 2, 1, 0, 3]
    assert after.schedule.placement == "free"
    assert pipeplan("check", v_path.parent / "table.yaml").code == 0


def test_a_table_for_another_plan_is_refused(path: Path, v_path: Path) -> None:
    table = path.parent / "table.csv"

    def said(text: str) -> str:
        table.write_text(text)
        return refused(pipeplan("import", table, "--from", "torch-csv", "--plan", path))

    pipeplan("export", path, "--to", "torch-csv", "-o", table)
    good = table.read_text()
    assert "has 3 rows for 4 ranks" in said("\n".join(good.splitlines()[:3]))
    assert "rank 3: 3B7 is missing" in said(good.replace(",3B7", ""))
    assert "row 0 cell 1: '0X1' is no action" in said(good.replace("0F1", "0X1"))
    assert "row 0 action 1: 7F1: the plan has stages 0..3" in said(good.replace("0F1", "7F1"))
    assert "stage 3 stands in no row" in said("\n".join([*good.splitlines()[:3], "3UNSHARD"]))
    assert "stage 0 stands in row 0 too" in said(good.replace("3F0", "0F0"))
    assert "--plan" in refused(pipeplan("import", table, "--from", "torch-csv"))
    assert not (path.parent / "table.yaml").exists()


def test_a_table_that_does_not_fit_is_refused(path: Path) -> None:
    table = path.parent / "table.csv"
    pipeplan("export", path, "--to", "torch-csv", "-o", table)
    _edit(path, lambda data: data["cluster"].update(memory_bytes=10_000))
    assert "rank 0 needs" in refused(pipeplan("import", table, "--from", "torch-csv", "--plan", path), code=3)


def test_what_rests_on_estimates_says_so_everywhere(tmp_path: Path) -> None:
    profile = dataclasses.replace(chain_profile(8), provenance="estimated")
    cut = [[f"block.{2 * stage}", f"block.{2 * stage + 1}"] for stage in range(4)]
    path = save(fresh_plan(profile, cut, ranks=4, microbatches=8), profile, tmp_path)
    for words in (["simulate"], ["check"], ["show"], ["export", "--to", "torch-csv"]):
        command, *more = words
        said = pipeplan(command, path, *more)
        assert said.code == 0, said.err
        assert "ESTIMATED for" in said.out + said.err, command
    for command in ("simulate", "check", "show"):
        said = pipeplan(command, path, "--json")
        assert "ESTIMATED for" in said.err or '"provenance": "estimated"' in said.out, command
