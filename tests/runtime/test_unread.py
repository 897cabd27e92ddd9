"""A run that nobody looks at any more (``2>&1 | head -1``) still trains to its end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.runs import EVERYTHING, plan_of, write_plan

from planner.errors import nearest


@pytest.mark.slow
def test_a_closed_pipe_cuts_no_run(tmp_path: Path) -> None:
    write_plan(plan_of(EVERYTHING, num_ranks=2), tmp_path / "plan.yaml")
    words = f"{sys.executable} -m planner run {tmp_path}/plan.yaml --steps 6 --log {tmp_path}/log.jsonl"
    done = subprocess.run(
        ["bash", "-c", f"{words} 2>&1 | head -1; exit ${{PIPESTATUS[0]}}"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0
    assert len(done.stdout.splitlines()) == 1
    steps = [json.loads(line)["step"] for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4, 5, 6]


def test_the_most_alike_name_is_the_mend() -> None:
    assert nearest("blocks.0.mpl", ["head", "blocks.0.mlp", "token"]) == "did you mean 'blocks.0.mlp'?"
    assert nearest("anything", []) == "correct the name"
