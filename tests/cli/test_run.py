"""``pipeplan run`` as its user types it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.command import Answer, pipeplan
from support.plans import chain_profile, fresh_plan, save
from support.runs import EVERYTHING, plan_of

from planner.capture import load_model_file
from planner.cluster import Cluster
from planner.plan import Plan, write_plan

PATIENCE_S = 180


def started(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, whose processes share its streams."""
    return subprocess.run(
        [sys.executable, "-m", "planner", "run", *words],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_of(EVERYTHING, num_ranks=2)


def write(plan: Plan, folder: Path, **changes: Any) -> None:
    write_plan(dataclasses.replace(plan, **changes), folder / "plan.yaml")


def test_one_document_on_stdout(plan: Plan, tmp_path: Path) -> None:
    write(plan, tmp_path)
    done = started("plan.yaml", "--steps", "3", "--json", "--verify", "--log", "log.jsonl", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert set(result) == {"losses", "weights_sha256", "steps", "ranks", "predicted", "verify"}
    assert len(result["losses"]) == len(result["steps"]) == 3
    assert all(set(step) == {"iteration_s"} for step in result["steps"])
    assert [set(rank) for rank in result["ranks"]] == [{"rank", "busy_s", "peak_memory_bytes"}] * 2
    assert set(result["verify"]) == {"equal", "loss_difference", "largest_weight_difference", "eager_difference"}
    assert result["verify"]["equal"] is True
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert [row["loss"] for row in rows] == result["losses"]


def test_the_hash_is_over_all_parameters_by_name(plan: Plan, tmp_path: Path) -> None:
    """With a learning rate of nothing the weights stay those of model() after manual_seed."""
    model = tmp_path / "still.py"
    model.write_text(EVERYTHING.read_text().replace("lr=1e-2", "lr=0.0"))
    write(plan_of(model, num_ranks=2), tmp_path)
    done = pipeplan("run", tmp_path / "plan.yaml", "--steps", 1, "--seed", 5, "--json")
    torch.manual_seed(5)
    digest = hashlib.sha256()
    for _, parameter in sorted(load_model_file(model).model().named_parameters()):
        digest.update(parameter.detach().numpy().tobytes())
    assert json.loads(done.out)["weights_sha256"] == digest.hexdigest()


def test_the_report_reads_at_80_columns(plan: Plan, tmp_path: Path) -> None:
    write(plan, tmp_path)
    done = pipeplan("run", tmp_path / "plan.yaml", "--steps", 2)
    assert done.code == 0, done.err
    assert max(map(len, done.out.splitlines())) <= 80
    for words in ("iteration", "idle", "rank 0 busy", "rank 1 peak memory", "pipeplan check --write"):
        assert words in done.out


def test_two_launchers_run_one_plan(plan: Plan, tmp_path: Path) -> None:
    write(plan, tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    words = ["plan.yaml", "--steps", "2", "--nnodes", "2", "--rdzv-endpoint", endpoint]
    other = subprocess.Popen(
        [sys.executable, "-m", "planner", "run", *words, "--node-rank", "1"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        first = started(*words, "--node-rank", "0", "--json", folder=tmp_path)
        said, _ = other.communicate(timeout=PATIENCE_S)
    finally:
        other.kill()
    assert (first.returncode, other.returncode) == (0, 0), first.stderr + said
    assert len(json.loads(first.stdout)["ranks"]) == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["missing.yaml"], "there is no such file"),
        (["plan.yaml", "--steps", "0"], "--steps"),
        (["plan.yaml", "--nnodes", "3"], "do not spread evenly"),
        (["plan.yaml", "--nnodes", "2"], "--rdzv-endpoint"),
        (["plan.yaml", "--nnodes", "2", "--rdzv-endpoint", "here"], "HOST:PORT"),
        (["plan.yaml", "--node-rank", "1"], "there are nodes 0..0"),
        (["plan.yaml", "--log", "no/such/folder/log"], "--log"),
        (["plan.yaml", "--checkpoint-every", "2"], "--checkpoint"),
    ],
)
def test_bad_words_are_one_line(
    words: list[str], said: str, plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(plan, tmp_path)
    refused(pipeplan("run", *words), said)


def test_another_model_is_refused(plan: Plan, tmp_path: Path) -> None:
    write(plan, tmp_path, model=dataclasses.replace(plan.model, fingerprint="0" * 64))
    refused(pipeplan("run", tmp_path / "plan.yaml"), "the model is not the one that the plan was made for")


def test_a_missing_model_file_is_refused(plan: Plan, tmp_path: Path) -> None:
    write(plan, tmp_path, model=dataclasses.replace(plan.model, source="gone.py"))
    refused(pipeplan("run", tmp_path / "plan.yaml"), "gone.py")


def refused(done: Answer, said: str) -> None:
    assert done.code == 2, done.err
    assert done.out == ""
    *before, last = done.err.splitlines()
    assert all("cores" in line for line in before), "one line beside the warning"
    assert last.startswith("pipeplan: ")
    assert said in last


def test_an_imported_profile_has_no_model_to_train(plan: Plan, tmp_path: Path) -> None:
    imported = dataclasses.replace(plan, profile=dataclasses.replace(plan.profile, provenance="imported"))
    write_plan(imported, tmp_path / "plan.yaml")
    done = pipeplan("run", tmp_path / "plan.yaml")
    assert done.code == 2
    assert "has no model to train" in done.err
    assert len(done.err.splitlines()) == 1


def test_what_does_not_fit_is_remarked_before_it_starts(tmp_path: Path) -> None:
    """The profile says so, where it is there; the model file is not, so that the run ends at once."""
    profile = chain_profile(4)
    tight = dataclasses.replace(
        fresh_plan(profile, [["block.0", "block.1"], ["block.2", "block.3"]], ranks=2, microbatches=4),
        cluster=Cluster(memory_bytes=1000),
    )
    path = save(tight, profile, tmp_path)
    done = pipeplan("run", path)
    assert done.code == 2
    assert "remark: does not fit: rank 0 needs" in done.err
