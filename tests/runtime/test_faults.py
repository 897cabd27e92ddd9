"""Whatever befalls a rank, the run ends soon, with the rank's own words last, and nothing is left running."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.launched import Command
from support.runs import plan_of

from planner.plan import write_plan

FAULTY = Path(__file__).parent.parent / "support" / "faulty.py"


def start(folder: Path, fault: str, *options: str) -> Command:
    model = folder / "model.py"
    model.write_text(FAULTY.read_text().replace('FAULT = "none"', f'FAULT = "{fault}"'))
    write_plan(plan_of(model, num_ranks=2, microbatch=1), folder / "plan.yaml")
    return Command(folder, *options)


@pytest.fixture
def started() -> Iterator[list[Command]]:
    commands: list[Command] = []
    yield commands
    for command in commands:
        command.clear()


PLACE = r"rank 1, stage 1, micro-batch (\d), action 1F\1, step [12]: "
SILENCE = "no sign of progress for 3 s"


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("raise", "ValueError: the weather is bad"),
        ("die", r"the process was killed by signal 9 \(SIGKILL\)"),
        pytest.param("leave", "the process ended with code 7", marks=pytest.mark.slow),
        ("finish", "the process ended with code 0 in mid-run"),
        ("hang", SILENCE),
        ("stop", rf"{SILENCE} \(the process is stopped\)"),
    ],
)
def test_a_rank_that_fails_ends_the_run(fault: str, said: str, tmp_path: Path, started: list[Command]) -> None:
    command = start(tmp_path, fault, "--steps", "50", "--timeout", "3")
    started.append(command)
    code, words = command.end()
    lines = words.rstrip().splitlines()
    assert code == 4, words
    assert re.fullmatch(f"pipeplan: {PLACE}{said}; .*", lines[-1]), words
    if fault in ("raise", "hang"):
        assert "break_down" in words, "where in the user's code"
    assert words.count("pipeplan: ") == 1
    assert "Connection closed" not in words
    assert command.left_running() == []


def test_control_c_ends_the_run(tmp_path: Path, started: list[Command]) -> None:
    command = start(tmp_path, "none", "--steps", "1000000")
    started.append(command)
    command.wait_for_step()
    os.killpg(command.process.pid, signal.SIGINT)
    code, words = command.end()
    assert code == 130, words
    assert "Traceback" not in words
    assert command.left_running() == []


def test_a_launcher_that_is_killed_takes_its_processes_along(tmp_path: Path, started: list[Command]) -> None:
    command = start(tmp_path, "none", "--steps", "1000000")
    started.append(command)
    command.wait_for_step()
    assert len(command.left_running(0)) >= 3
    command.process.kill()
    assert command.left_running(15.0) == []
