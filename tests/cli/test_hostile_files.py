"""Every command that reads a file, on every file of it damaged in every way: it works, or refuses in one line.

Exit code 0, 2 (or 3: nothing fits), never a traceback; the file read stays as it was, and so does what earlier commands
wrote where this one refuses. Wider and slower than what is tried on every change (tests/cli/test_bad_input.py).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.command import pipeplan, refused
from support.damage import FOREIGN, PIPEDREAM, damaged, damaged_texts, spoilt
from support.plans import chain_profile, fresh_plan, save
from support.recordings import recorded

from planner.files import sha256_of
from planner.report.overview import overview_of
from planner.report.trace import write_recording

pytestmark = pytest.mark.slow

# File by file the commands that read it, with {} for its folder; what they write is named out.*.
READERS = {
    "plan.yaml": [
        "check {}/plan.yaml",
        "simulate {}/plan.yaml --schedule 1f1b,gpipe,synthesised",
        "show {}/plan.yaml --html {}/out.html --svg {}/out.svg --trace {}/out.json",
        "show {}/plan.yaml --measured {}/run.json --html {}/out.html",
        "export {}/plan.yaml --to torch -o {}/out.py",
        "export {}/plan.yaml --to torch-csv -o {}/out.csv",
        "export {}/plan.yaml --to megatron -o {}/out.sh",
        "export {}/plan.yaml --to torchtitan -o {}/out.py",
        "export {}/plan.yaml --to deepspeed -o {}/out.py",
        "import {}/table.csv --from torch-csv --plan {}/plan.yaml -o {}/out.yaml",
        "run {}/plan.yaml",
    ],
    "profile.json": [
        "show {}/profile.json --html {}/out.html",
        "solve {}/profile.json --gpus 2 --batch 4 -o {}/out.yaml",
        "check {}/plan.yaml",
        "simulate {}/plan.yaml",
        "show {}/plan.yaml --html {}/out.html",
    ],
    "run.json": ["show {}/plan.yaml --measured {}/run.json --html {}/out.html --trace {}/out.json"],
    "cluster.yaml": ["solve {}/profile.json --gpus 2 --batch 4 --cluster {}/cluster.yaml -o {}/out.yaml"],
    "pipedream.txt": ["import {}/pipedream.txt --from pipedream --microbatch-size 2 -o {}/out.json"],
    "dnn-partitioning.json": ["import {}/dnn-partitioning.json --from dnn-partitioning -o {}/out.json"],
    "piper.json": ["import {}/piper.json --from piper -o {}/out.json"],
    "table.csv": ["import {}/table.csv --from torch-csv --plan {}/plan.yaml -o {}/out.yaml"],
}
CASES = [(file, words) for file, every in READERS.items() for words in every]
CLUSTER = """
gpus_per_node: 2
memory_bytes: a100-40gb
links:
  intra_node: {latency_s: 1e-6, bandwidth_bytes_per_s: 1e9}
  inter_node: {latency_s: 1e-5, bandwidth_bytes_per_s: 1e8}
overlap: true
memory_reserve_fraction: 0.1
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One sound file of each kind."""
    made = tmp_path_factory.mktemp("sound")
    profile = chain_profile(4)
    plan = fresh_plan(profile, [["block.0", "block.1"], ["block.2", "block.3"]], ranks=2, microbatches=2)
    save(plan, profile, made, bound_s=1e-4)
    write_recording(made / "run.json", recorded(overview_of(plan, profile)), plan)
    (made / "cluster.yaml").write_text(CLUSTER)
    (made / "pipedream.txt").write_text(PIPEDREAM)
    for system, document in FOREIGN.items():
        (made / f"{system}.json").write_text(json.dumps(document))
    (made / "table.csv").write_text("0F0,0F1,,0B0,,0B1\n,1F0,1B0,1F1,1B1\n")
    return made


def _snapshot(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def _tried(folder: Path, file: str, words: str, contents: Iterator[bytes]) -> None:
    """Run a command on a sound file, then on each of the contents in its place."""
    ready, sound = words.replace("{}", str(folder)).split(), (folder / file).read_bytes()
    plan = (folder / "plan.yaml").read_text()
    pipeplan(*ready)
    try:
        for content in contents:
            (folder / file).write_bytes(content)
            if file == "profile.json":  # a plan that goes with it, so that its own figures are looked at
                named = plan.replace(hashlib.sha256(sound).hexdigest(), sha256_of(folder / file))
                (folder / "plan.yaml").write_text(named)
            before = _snapshot(folder)
            answer = pipeplan(*ready)
            after = _snapshot(folder)
            assert after[file] == content
            assert after.keys() == before.keys(), "nothing is left over"
            if answer.code:
                # what a run has to say of its plan comes before the error
                last = answer.err.splitlines(keepends=True)[-1] if words.startswith("run") else answer.err
                refused(answer._replace(err=last), code=answer.code)
                assert answer.code in (2, 3), answer
                assert len(answer.err) < 1_100, "an error is a line that can be read"
                assert after == before, "what was there before is there still"
            else:
                assert "Traceback" not in answer.err
    finally:
        (folder / file).write_bytes(sound)
        (folder / "plan.yaml").write_text(plan)
        for path in folder.glob("out.*"):
            path.unlink()


@pytest.mark.parametrize(("file", "words"), CASES)
def test_a_file_as_no_program_of_ours_writes_it(folder: Path, file: str, words: str) -> None:
    _tried(folder, file, words, (content for _, content in spoilt((folder / file).read_bytes())))


@pytest.mark.parametrize(("file", "words"), CASES)
def test_a_file_with_some_of_it_changed(folder: Path, file: str, words: str) -> None:
    text = (folder / file).read_text()
    flat = file in ("pipedream.txt", "table.csv")
    document = None if flat else yaml.safe_load(text) if file.endswith(".yaml") else json.loads(text)

    @settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def check(data: st.DataObject) -> None:
        if flat or data.draw(st.integers(0, 4)) == 0:
            content = data.draw(damaged_texts(text))
        else:
            changed = document
            for _ in range(data.draw(st.integers(1, 3))):
                changed = damaged(data.draw, changed) if changed else changed
            content = json.dumps(changed).encode()
        _tried(folder, file, words, iter([content]))

    check()
