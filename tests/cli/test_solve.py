"""``pipeplan solve``: the plan it writes, what it says, what it refuses, and where nothing fits."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from support.command import pipeplan, refused
from support.random_profiles import random_profile

from planner.cluster import DEVICE_MEMORY_BYTES
from planner.plan import read_plan
from planner.plan.check import check_plan, profile_of
from planner.profile import Profile, read_profile, write_profile


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder with one profile of six layers in profiles/."""
    monkeypatch.chdir(tmp_path)
    write_profile(six_layers(), tmp_path / "profiles" / "chain.json")
    return tmp_path


def six_layers() -> Profile:
    seeds = (random.Random(seed) for seed in range(1000))
    made = (random_profile(rng, chain=True, most_layers=6) for rng in seeds)
    return next(profile for profile in made if len(profile.layers) == 6)


def test_the_plan_keeps_all_rules_and_every_figure_in_it_is_fresh(here: Path) -> None:
    answer = pipeplan("solve", "--gpus", 3, "--batch", 8, "--explain")
    assert answer.code == 0, answer
    assert "profiles/chain.json (the newest in profiles/)" in answer.err
    plan = read_plan(here / "plan.yaml")
    checked = check_plan(plan, profile_of(plan, here / "plan.yaml"))
    assert (checked.errors, checked.overflows, checked.stale) == ((), (), ())
    assert plan.predicted is not None
    assert plan.predicted.bound_s is not None
    assert plan.predicted.gap == pytest.approx(plan.predicted.iteration_s / plan.predicted.bound_s - 1)
    assert plan.search is not None
    assert plan.search.gpus == 3
    assert plan.search.proven
    assert max(map(len, answer.out.splitlines())) <= 80
    for word in (
        "one GPU",
        "even by layers",
        "bottleneck: rank",
        "The cut",
        "Where the time goes",
        "Time against memory",
    ):
        assert word in answer.out


def test_json_holds_the_plan_and_what_it_is_compared_with(here: Path) -> None:
    answer = pipeplan("solve", "--gpus", 3, "--batch", 8, "--json", "-o", "plans/mine.yaml")
    document = json.loads(answer.out)
    assert document["format"] == "pipeplan-plan/1"
    best = document["predicted"]["iteration_s"]
    by_hand = {"one GPU", "even by layers", "even by parameters", "plain data parallel"}
    assert {entry["name"] for entry in document["baselines"]} == by_hand
    assert all(entry["iteration_s"] >= best * (1 - 1e-9) for entry in document["alternatives"] + document["baselines"])
    assert document["profile"]["path"] == "../profiles/chain.json"
    assert read_plan(here / "plans/mine.yaml").predicted is not None


@pytest.mark.parametrize("provenance", ["estimated", "measured"])
def test_whatever_rests_on_estimates_says_so(here: Path, provenance: str) -> None:
    """In the terminal, in JSON, and where nothing fits in both; what is measured says nothing of it."""
    write_profile(dataclasses.replace(six_layers(), provenance=provenance), here / "profiles" / "chain.json")
    device = six_layers().device.name
    question = ("solve", "--gpus", 3, "--batch", 8)
    plan, fails = pipeplan(*question, "--json"), pipeplan(*question, "--memory", "50", "--json")
    assert (plan.code, fails.code) == (0, 3)
    said = [pipeplan(*question).out, fails.err.splitlines()[-1]]
    said += [json.loads(one.out).get("estimated", "") for one in (plan, fails)]
    for words in said:
        assert (f"ESTIMATED for {device}" in words) == (provenance == "estimated"), words


def test_options_narrow_the_search(here: Path) -> None:
    words = ("--pipeline", "2,3", "--microbatch", "2", "--schedule", "gpipe", "--recompute", "all")
    document = json.loads(pipeplan("solve", "--gpus", 3, "--batch", 8, "--json", *words).out)
    assert document["parallel"]["pipeline"] in (2, 3)
    assert document["batch"]["microbatch"] == 2
    assert document["schedule"]["name"] == "gpipe"
    assert all(stage["recompute"] for stage in document["stages"])
    wider = json.loads(pipeplan("solve", "--gpus", 3, "--batch", 8, "--json").out)
    assert wider["predicted"]["iteration_s"] <= document["predicted"]["iteration_s"] * (1 + 1e-9)


def test_a_sharded_optimizer_takes_less_memory_and_its_plan_checks(here: Path) -> None:
    whole, sharded = (
        json.loads(pipeplan("solve", "--gpus", 4, "--batch", 8, "--data", 2, "--json", *words).out)
        for words in ((), ("--zero1", "-o", "sharded.yaml"))
    )
    assert "zero1" not in whole["parallel"]
    assert sharded["parallel"]["zero1"]
    plan = read_plan(here / "sharded.yaml")
    checked = check_plan(plan, profile_of(plan, here / "sharded.yaml"))
    assert (checked.errors, checked.overflows, checked.stale) == ((), (), ())
    edited = dataclasses.replace(plan, parallel=dataclasses.replace(plan.parallel, zero1=None))
    fresh = check_plan(edited, profile_of(plan, here / "sharded.yaml")).fresh.predicted
    assert fresh is not None
    assert fresh.bound_s is None, "it was proven of shards"
    assert plan.predicted is not None
    pairs = list(zip(plan.predicted.ranks, fresh.ranks, strict=True))
    assert all(shard.peak_memory_bytes < all_of_it.peak_memory_bytes for shard, all_of_it in pairs)
    assert refused(pipeplan("solve", "--gpus", 4, "--batch", 8, "--zero1")).startswith("--zero1 shards the optimizer")
    assert "there is one" in refused(pipeplan("solve", "--gpus", 4, "--batch", 8, "--zero1", "--data", 1))


def test_one_input_gives_one_plan(here: Path) -> None:
    def stages_of(name: str) -> str:
        pipeplan("solve", "--gpus", 4, "--batch", 8, "-o", name)
        plan = read_plan(here / name)
        return repr(dataclasses.replace(plan, search=None))

    assert stages_of("one.yaml") == stages_of("two.yaml")


def test_without_a_batch_it_says_which_it_took(here: Path) -> None:
    answer = pipeplan("solve", "--gpus", 2)
    assert "global batch: 32 samples" in answer.err
    assert read_plan(here / "plan.yaml").batch.global_batch == 32


def test_where_nothing_fits_it_says_what_is_missing_and_what_would_do(here: Path) -> None:
    words = ("solve", "--gpus", 2, "--batch", 8)
    line = refused(pipeplan(*words, "--memory", "200"), code=3)
    assert "no plan fits" in line
    assert "bytes) more than" in line
    answer = pipeplan(*words, "--memory", "200", "--json")
    document = json.loads(answer.out)
    assert document["missing"][0].keys() == {"rank", "stage", "bytes"}
    assert document["smallest_change"] in line
    assert not (here / "plan.yaml").exists()
    enough = document["smallest_change"].split("--memory ")[1].split()[0]
    assert pipeplan(*words, "--memory", enough).code == 0


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (("--gpus", "0"), "gpus"),
        (("--gpus", "2", "--batch", "7", "--microbatch", "2"), "multiple"),
        (("--gpus", "2", "--microbatch", "3"), "no costs at micro-batch size 3"),
        (("--gpus", "2", "--microbatch", "two"), "--microbatch"),
        (("--gpus", "2", "--batch", "1000000000000"), "at most 1048576 are planned for"),
        (("--gpus", "2", "--pipeline", "5"), "pipeline 5 · data 1 · tensor 1 is 5 GPUs, more than the 2"),
        (("--gpus", "2", "--schedule", "1f2b"), "1f2b"),
        (("--gpus", "2", "--memory", "much"), "much"),
        (("--gpus", "2", "--cluster", "none.yaml"), "none.yaml"),
        (("--gpus", "2", "-o", "profiles"), "profiles"),
        (("none.json", "--gpus", "2"), "none.json"),
    ],
)
def test_whatever_is_wrong_is_one_line(here: Path, words: tuple[str, ...], fault: str) -> None:
    line = refused(pipeplan("solve", *words))
    assert fault in line
    assert not (here / "plan.yaml").exists()


def test_without_a_profile_it_says_how_to_make_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "pipeplan profile" in refused(pipeplan("solve", "--gpus", 2))


def test_it_overwrites_nothing_but_plans(here: Path) -> None:
    (here / "notes.yaml").write_text("mine\n")
    refused(pipeplan("solve", "--gpus", 2, "-o", "notes.yaml"))
    assert (here / "notes.yaml").read_text() == "mine\n"


def test_it_does_not_import_torch(here: Path) -> None:
    code = (
        "import sys\nfrom planner.cli.main import main\n"
        "try:\n    main(['solve', '--gpus', '2', '--batch', '8'])\nexcept SystemExit as end:\n    assert not end.code\n"
        "assert 'torch' not in sys.modules"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=here, env=os.environ, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert read_profile(here / "profiles/chain.json").layers


def test_the_plans_that_lost_are_kept_in_the_plan_and_shown_on_its_page(here: Path) -> None:
    write_profile(random_profile(random.Random(11), chain=True, most_layers=14), here / "p.json")
    document = json.loads(pipeplan("solve", here / "p.json", "--gpus", 3, "--batch", 8, "--json").out)
    plan = read_plan(here / "plan.yaml")
    assert plan.search is not None
    assert plan.search.lost
    assert [(one.name, one.iteration_s) for one in plan.search.lost] == [
        (one["name"], pytest.approx(one["iteration_s"], rel=1e-5)) for one in document["alternatives"][:10]
    ]
    assert pipeplan("show", here / "plan.yaml", "--html", here / "plan.html").code == 0
    page = (here / "plan.html").read_text()
    for one in plan.search.lost:
        assert f"search: {one.name}<" in page
    text = (here / "plan.yaml").read_text()
    (here / "plan.yaml").write_text(text.replace("memory_reserve_fraction: 0.1", "memory_reserve_fraction: 0.2"))
    checked = check_plan(read_plan(here / "plan.yaml"), profile_of(plan, here / "plan.yaml"))
    assert any("search: lost" in line for line in checked.stale)
    assert checked.fresh.search is not None
    assert checked.fresh.search.lost is None


def test_memory_is_an_amount_or_a_known_device(here: Path) -> None:
    assert pipeplan("solve", "--gpus", 2, "--batch", 8, "--memory", "h100-sxm").code == 0
    assert read_plan(here / "plan.yaml").cluster.memory_bytes == DEVICE_MEMORY_BYTES["h100-sxm"]
    assert "or a known device: v100-16gb, " in refused(pipeplan("solve", "--gpus", 2, "--memory", "h1"))
    assert "write e.g. 80GiB" in refused(pipeplan("solve", "--gpus", 2, "--memory", "80 bananas"))


@pytest.mark.parametrize("memory", ["1GiB", "1"])
def test_many_more_gpus_than_samples_take_no_longer_and_change_nothing(here: Path, memory: str) -> None:
    """At most a GPU for each layer of each sample is of use: the plan is that of so many."""

    def plan(gpus: int) -> tuple[int, dict[str, object]]:
        answer = pipeplan("solve", "--gpus", gpus, "--batch", 4, "--memory", memory, "--json")
        document = json.loads(answer.out)
        return answer.code, {key: document.get(key) for key in ("parallel", "schedule", "predicted", "missing")}

    assert plan(10**18) == plan(24)
