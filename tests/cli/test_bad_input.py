"""Whatever is wrong with a file or a word: one line on stderr that names it, exit code 2, and nothing lost."""

from __future__ import annotations

import dataclasses
import json
import random
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from support.command import pipeplan, refused
from support.damage import answers_well, damaged, damaged_texts
from support.plans import chain_profile, fresh_plan, plans, profiles, save

from planner.cluster import Cluster
from planner.files import sha256_of
from planner.profile import write_profile

# Every command that reads a file, with {} where the file stands, and how the file is made that it expects.
READERS = {
    "profile": ["profile", "{}", "--device", "cpu"],
    "solve": ["solve", "{}", "--gpus", "2"],
    "check": ["check", "{}"],
    "simulate": ["simulate", "{}"],
    "export": ["export", "{}", "--to", "torch-csv"],
    "export torch": ["export", "{}", "--to", "torch"],
    "run": ["run", "{}"],
    "import pipedream": ["import", "{}", "--from", "pipedream", "--microbatch-size", "1"],
    "import dnn-partitioning": ["import", "{}", "--from", "dnn-partitioning"],
    "import piper": ["import", "{}", "--from", "piper"],
}


def _words(command: str, path: Path) -> list[str]:
    return [word.replace("{}", str(path)) for word in READERS[command]]


HOSTILE = {
    "empty": b"",
    "blank": b" \n\n",
    "binary": bytes(random.Random(0).randbytes(4096)),
    "not UTF-8": b"\xff\xfe a: 1",
    "text": b"The quick brown fox\n",
    "list": b"[1, 2]",
    "number": b"12",
    "null": b"null",
    "not closed": b'{"format": "pipeplan-plan/1", ',
    "deep": b"[" * 50_000,
    "duplicate key": b'{"format": "pipeplan-plan/1", "format": "pipeplan-plan/1"}',
    "NaN": b'{"format": NaN}',
    "endless number": b'{"format": ' + b"9" * 5000 + b"}",
    "future": b'{"format": "pipeplan-plan/99"}',
    "other format": b'{"format": "pipeplan-cluster/1"}',
    "empty mapping": b"{}",
    "control characters": b"\x1b[31m\x00\x07",
    "tag": b"!!python/object/apply:os.system ['false']",
    "tagged word": b"format: !!bool maybe",
    "tagged list": b"format: !!map [a: 1]",
    "hexadecimal": b"format: 0x" + b"f" * 10_000,
}


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("command", READERS)
def test_a_file_of_another_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, kind: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(HOSTILE[kind])
    monkeypatch.chdir(tmp_path)
    assert str(path) in refused(pipeplan(*_words(command, path)))
    assert path.read_bytes() == HOSTILE[kind]
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("command", READERS)
def test_no_file_at_all(tmp_path: Path, command: str) -> None:
    assert "there is no such file" in refused(pipeplan(*_words(command, tmp_path / "none")))
    assert "is a folder" in refused(pipeplan(*_words(command, tmp_path)))
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    assert str(loop) in refused(pipeplan(*_words(command, loop)))
    below = tmp_path / "file"
    below.write_text("")
    assert str(below / "x") in refused(pipeplan(*_words(command, below / "x")))
    assert refused(pipeplan(*_words(command, Path("a\x00b"))))
    assert refused(pipeplan(*_words(command, tmp_path / ("n" * 300))))


def _unwritable(tmp_path: Path) -> Iterator[Path]:
    file = tmp_path / "in the way"
    file.write_text("")
    yield file / "out.json"
    yield tmp_path
    yield Path("/proc/out.json")


def test_an_output_that_cannot_be_written(tmp_path: Path) -> None:
    source = tmp_path / "graph.txt"
    source.write_text(
        "node1 -- A -- forward_compute_time=1.0, backward_compute_time=2.0, activation_size=1.0, parameter_size=8.0\n"
    )
    words = ["import", source, "--from", "pipedream", "--microbatch-size", "1"]
    for path in _unwritable(tmp_path):
        assert f"{path}: cannot be written" in refused(pipeplan(*words, "-o", path))


def test_a_file_of_another_kind_is_not_overwritten(tmp_path: Path) -> None:
    source, goal = tmp_path / "graph.txt", tmp_path / "profile.json"
    source.write_text(
        "node1 -- A -- forward_compute_time=1.0, backward_compute_time=2.0, activation_size=1.0, parameter_size=8.0\n"
    )
    words = ["import", source, "--from", "pipedream", "--microbatch-size", "1", "-o"]
    before = source.read_bytes()
    assert "is there and is no pipeplan-profile file" in refused(pipeplan(*words, source))
    assert source.read_bytes() == before
    assert pipeplan(*words, goal).code == pipeplan(*words, goal).code == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["bogus"], "No such command 'bogus'; see pipeplan --help"),
        (["--bogus"], "No such option: --bogus; see pipeplan --help"),
        (["schema"], "Missing argument 'FORMAT'. Choose from: profile, plan, cluster; see pipeplan schema --help"),
        (["schema", "bogus"], "'bogus' is not one of 'profile', 'plan', 'cluster'; see pipeplan schema --help"),
        (["schema", "plan", "more"], "Got unexpected extra argument"),
        (["check"], "Missing argument 'PLAN'; see pipeplan check --help"),
        (["check", "x", "--jsno"], "No such option: --jsno"),
        (["solve", "--gpus", "2"], "profiles"),
        (["solve", "x"], "Missing option '--gpus'"),
        (["solve", "x", "--gpus", "0"], "Invalid value for '--gpus': "),
        (["solve", "chain.json", "--gpus", "2", "--memory", "much"], "'much' is no amount of memory"),
        (["solve", "chain.json", "--gpus", "2", "--schedule", "magic"], "magic"),
        (["solve", "chain.json", "--gpus", "2", "--pipeline", "1,two"], "'1,two'"),
        (["solve", "x", "--gpus", "2", "--recompute", "often"], "Invalid value for '--recompute': "),
        (["profile", "x", "--microbatch", "1,two"], "--microbatch '1,two' is no list of sizes"),
        (["profile", "x", "--device", "tpu"], "Invalid value for '--device': "),
        (["run", "x", "--steps", "none"], "Invalid value for '--steps': "),
        (["export", "x"], "Missing option '--to'"),
        (["export", "x", "--to", "y"], "Invalid value for '--to': 'y' is not one of"),
        (["simulate"], "Missing argument 'PLAN'"),
        (["doctor", "x"], "Got unexpected extra argument"),
        (["import", "x"], "Missing option '--from'"),
        (["import", "x", "--from", "y"], "Invalid value for '--from': 'y' is not one of"),
        (["import", "x", "--from", "piper", "--microbatch-size", "0"], "Invalid value for '--microbatch-size': "),
        (["import", "x", "--from", "piper", "--microbatch-size", "two"], "Invalid value for '--microbatch-size': "),
        (["import", "x", "--from", "piper", "-o"], "Option '-o' requires an argument"),
    ],
)
def test_words_that_are_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], said: str) -> None:
    monkeypatch.chdir(tmp_path)
    write_profile(chain_profile(2), tmp_path / "chain.json")
    line = refused(pipeplan(*words))
    assert said in line
    assert "Value error" not in line


def test_without_words_there_is_the_help() -> None:
    answer = pipeplan()
    assert answer.code == 0
    assert answer == pipeplan("--help")
    assert "Usage: pipeplan" in answer.out


# --- valid files, damaged ---------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_damaged_plan_is_never_a_traceback(data: st.DataObject) -> None:
    profile = data.draw(profiles(max_layers=4))
    plan = data.draw(plans(profile))
    with tempfile.TemporaryDirectory() as folder:
        path = save(plan, profile, Path(folder), bound_s=1.0)
        if data.draw(st.booleans()):
            content = data.draw(damaged_texts(path.read_text()))
        else:
            content = yaml.safe_dump(damaged(data.draw, yaml.safe_load(path.read_text()))).encode()
        path.write_bytes(content)
        answers_well(data.draw(st.sampled_from(["check", "simulate"])), path)
        assert path.read_bytes() == content


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_damaged_profile_is_never_a_traceback(data: st.DataObject) -> None:
    profile = data.draw(profiles(max_layers=4))
    plan = dataclasses.replace(data.draw(plans(profile)), cluster=Cluster())
    with tempfile.TemporaryDirectory() as folder:
        path = save(plan, profile, Path(folder))
        file, before = path.parent / "profile.json", sha256_of(path.parent / "profile.json")
        if data.draw(st.booleans()):
            content = data.draw(damaged_texts(file.read_text()))
        else:
            content = json.dumps(damaged(data.draw, json.loads(file.read_text()))).encode()
        file.write_bytes(content)
        path.write_text(path.read_text().replace(before, sha256_of(file)))
        answers_well("check", path)
        assert file.read_bytes() == content
        assert {entry.name for entry in file.parent.iterdir()} == {"profile.json", "plan.yaml"}


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_solving_a_damaged_profile_is_never_a_traceback(data: st.DataObject) -> None:
    profile = data.draw(profiles(max_layers=3))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.json"
        write_profile(profile, path)
        path.write_text(json.dumps(damaged(data.draw, json.loads(path.read_text()))))
        answers_well("solve", path, "--gpus", 2, "--batch", 4, "-o", Path(folder) / "plan.yaml")


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_damaged_cluster_is_never_a_traceback(data: st.DataObject) -> None:
    link = {"latency_s": 1e-6, "bandwidth_bytes_per_s": 1e9}
    cluster = {
        "gpus_per_node": 2,
        "memory_bytes": "a100-40gb",
        "links": {"intra_node": link, "inter_node": link},
        "overlap": True,
        "memory_reserve_fraction": 0.1,
    }
    with tempfile.TemporaryDirectory() as folder:
        profile, path = Path(folder) / "profile.json", Path(folder) / "cluster.yaml"
        write_profile(chain_profile(3), profile)
        path.write_text(yaml.safe_dump(damaged(data.draw, cluster)))
        answers_well("solve", profile, "--gpus", 2, "--cluster", path, "-o", Path(folder) / "plan.yaml")


@pytest.mark.parametrize(
    "text",
    [
        b"0F" + b"9" * 5000,
        b'"0F0',
        b"0F0\x000B0",
        "٣F0,0B0".encode(),
        b"0F0," * 200_000 + b"0X0",
    ],
)
def test_a_schedule_of_odd_cells(tmp_path: Path, text: bytes) -> None:
    profile = chain_profile(2)
    path = save(fresh_plan(profile, [["block.0", "block.1"]], ranks=1, microbatches=1), profile, tmp_path)
    (tmp_path / "table.csv").write_bytes(text)
    words = ["import", tmp_path / "table.csv", "--from", "torch-csv", "--plan", path]
    assert len(refused(pipeplan(*words, "-o", tmp_path / "new.yaml"))) < 500


def test_bytes_beyond_anything_real(tmp_path: Path) -> None:
    profile = chain_profile(2)
    path = save(fresh_plan(profile, [["block.0"], ["block.1"]], ranks=2), profile, tmp_path)
    text = path.read_text()
    path.write_text(re.sub(r"saved_bytes: \d+", f"saved_bytes: {2**62}", text, count=1))
    for command in ("simulate", "show"):
        assert "adds up to over 4 EiB" in refused(pipeplan(command, path))
    assert pipeplan("check", path).code == 0, "it is derived anew there"
    document = json.loads((tmp_path / "profile.json").read_text())
    document["layers"][1]["parameter_bytes"] = 2**50 + 1
    (tmp_path / "profile.json").write_text(json.dumps(document))
    assert "layers[1].parameter_bytes: must be at most" in refused(pipeplan("show", tmp_path / "profile.json"))


def test_an_endless_name_leaves_the_mend_in_sight(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    write_profile(chain_profile(2), path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"n" * 50_000: 1}))
    line = refused(pipeplan("show", path))
    assert len(line) <= 1_000
    assert line.endswith("remove it or correct its spelling")
