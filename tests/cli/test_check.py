"""``pipeplan check``: exit codes, what is written, what ``--json`` says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.command import pipeplan, refused
from support.plans import chain_profile, fresh_plan, save

from planner.units import format_bytes, format_seconds


@pytest.fixture
def path(tmp_path: Path) -> Path:
    profile = chain_profile(4)
    plan = fresh_plan(profile, [["block.0"], ["block.1", "block.2", "block.3"]], ranks=2)
    return save(plan, profile, tmp_path, bound_s=0.001)


def _edit(path: Path, edit: Any) -> None:
    data = yaml.safe_load(path.read_text())
    edit(data)
    path.write_text(yaml.safe_dump(data))


def _answer(path: Path, *words: str) -> dict[str, Any]:
    answer = pipeplan("check", path, "--json", *words)
    document: dict[str, Any] = json.loads(answer.out)
    assert set(document) == {"ok", "stale", "errors", "remarks"}
    assert document["ok"] == (answer.code == 0)
    assert bool(document["errors"]) == (answer.code != 0)
    return document


def test_a_fresh_plan(path: Path) -> None:
    before = path.read_bytes()
    answer = pipeplan("check", path)
    assert answer.code == 0
    assert answer.err == "", "what would block in other runtimes is for those who ask"
    assert "its figures follow from the profile" in answer.out
    assert "would block if sends waited" in " ".join(pipeplan("check", path, "--explain").err.split())
    assert any("would block if sends waited" in remark for remark in _answer(path)["remarks"])
    assert _answer(path, "--write")["stale"] == []
    assert path.read_bytes() == before, "nothing was stale, so comments and order stay"


def test_stale_figures_are_said_and_written(path: Path) -> None:
    before = yaml.safe_load(path.read_text())
    _edit(path, lambda data: data["stages"][0].update(saved_bytes=1, sends=[], returns=[]))
    stale = path.read_bytes()
    answer = pipeplan("check", path)
    assert answer.code == 0
    assert "stale: stages[0]: saved_bytes" in answer.out
    assert path.read_bytes() == stale
    assert _answer(path)["stale"][0].startswith("stages[0]: ")
    assert pipeplan("check", path, "--write").code == 0
    after = yaml.safe_load(path.read_text())
    assert after["stages"] == before["stages"]
    assert after["search"]["proven"] is False
    assert _answer(path)["stale"] == []


def test_a_moved_layer_is_derived_anew(path: Path) -> None:
    """What a person does: take a layer from one list to the other, and let the rest follow."""

    def move(data: dict[str, Any]) -> None:
        first, second = (stage["layers"] for stage in data["stages"])
        if len(first) > 1:
            second.append(first.pop())
        else:
            first.append(second.pop(0))

    _edit(path, move)
    document = _answer(path, "--write")
    assert document["ok"]
    assert document["stale"]
    assert _answer(path)["stale"] == []
    plan = yaml.safe_load(path.read_text())
    assert plan["predicted"]["bound_s"] == 0.001
    assert plan["predicted"]["gap"] == pytest.approx(plan["predicted"]["iteration_s"] / 0.001 - 1)


def test_an_edit_is_told_in_figures(path: Path) -> None:
    """Iteration before and after, the bound, memory of each rank against the limit; lines of a terminal's width."""
    before = yaml.safe_load(path.read_text())["predicted"]
    _edit(path, lambda data: data["stages"][0].update(recompute=True))
    answer = pipeplan("check", path)
    after = _answer(path, "--write")
    assert after["ok"]
    fresh = yaml.safe_load(path.read_text())["predicted"]
    old, new = format_seconds(before["iteration_s"]), format_seconds(fresh["iteration_s"])
    said = " ".join(answer.out.split())
    assert f"iteration: {old} -> {new} (+" in said
    assert f"bound: 1 ms, {100 * fresh['gap']:.2f} % over it; another plan may be faster" in said
    peaks = [f"rank {rank['rank']} {format_bytes(rank['peak_memory_bytes'])}" for rank in fresh["ranks"]]
    assert f"memory: {', '.join(peaks)}, of 922 GiB a rank" in said
    assert max(map(len, answer.out.replace(str(path), "plan.yaml").splitlines())) <= 100
    _edit(path, lambda data: data["batch"].update({"global": 8, "microbatches": 8}))
    assert "bound: none, as it was proven for another batch" in " ".join(pipeplan("check", path).out.split())


def test_what_does_not_fit_names_rank_and_bytes(path: Path) -> None:
    _edit(path, lambda data: data["cluster"].update(memory_bytes=1000))
    before = path.read_bytes()
    line = refused(pipeplan("check", path, "--write"), code=3)
    assert "rank 0 needs" in line
    assert " bytes) more than the 900 B that a rank may use" in line
    assert path.read_bytes() == before
    document = _answer(path)
    assert [error.split(" needs")[0] for error in document["errors"]] == ["rank 0", "rank 1"]


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda data: data["stages"][0]["layers"].append("ghost"), "the profile has no layer 'ghost'"),
        (lambda data: data["stages"][1]["layers"].pop(), ""),
        (lambda data: data["stages"][0].update(rank=1), "placement loop puts stage 0 on rank 0"),
        (lambda data: data["batch"].update(microbatch=3), "batch.global: is"),
        (lambda data: data["schedule"].update(name="zb-v"), "schedule zb-v needs placement v and virtual 2"),
        (lambda data: data["schedule"].update(name="zb-9"), "schedule.name: must be"),
        (lambda data: data["schedule"].update(name="1f1b", warmup=[0, 0]), "warmup[0] is 0, but"),
        (lambda data: data["profile"].update(sha256="0"), "is not the profile that"),
        (
            lambda data: data["profile"].update(path="none.json"),
            "its profile is not there: profile.path names none.json",
        ),
        (lambda data: data["model"].update(fingerprint="0"), "model.fingerprint is not that of the model"),
        (
            lambda data: data.update(schedule={"name": "synthesised", "placement": "free"}, actions=["0F0", "1F0"]),
            "is missing (or 0I0 and 0W0)",
        ),
    ],
)
def test_a_broken_rule(path: Path, edit: Any, said: str) -> None:
    _edit(path, edit)
    before = path.read_bytes()
    assert said in refused(pipeplan("check", path, "--write"))
    assert path.read_bytes() == before
    document = _answer(path)
    assert said in document["errors"][0]


def test_rows_for_the_micro_batch_size_must_be_there(path: Path) -> None:
    def thrice(data: dict[str, Any]) -> None:
        batch = data["batch"]
        batch.update({"microbatch": 3, "global": 3 * batch["microbatches"] * data["parallel"]["data"]})

    _edit(path, thrice)
    assert "has no costs at micro-batch size 3" in refused(pipeplan("check", path))
