"""Whatever befalls a rank, the run ends soon, with the rank's own words last, and nothing is left running."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.runs import plan_of

from planner.plan import write_plan

FAULTY = Path(__file__).parent.parent / "support" / "faulty.py"
PATIENCE_S = 120


class Command:
    """``pipeplan run`` as its user starts it, marked so that every process it starts can be found again."""

    def __init__(self, folder: Path, fault: str, *options: str) -> None:
        model = folder / "model.py"
        model.write_text(FAULTY.read_text().replace('FAULT = "none"', f'FAULT = "{fault}"'))
        write_plan(plan_of(model, num_ranks=2, microbatch=1), folder / "plan.yaml")
        self.log = folder / "log.jsonl"
        self.mark = f"PIPEPLAN_TEST={uuid.uuid4()}"
        name, _, value = self.mark.partition("=")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "planner", "run", str(folder / "plan.yaml"), "--log", str(self.log), *options],
            env=os.environ | {name: value, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def end(self) -> tuple[int, str]:
        """Exit code and stderr."""
        _, words = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, words

    def left_running(self, patience_s: float = 5.0) -> list[int]:
        """Processes of this run that still live after a moment."""
        until = time.monotonic() + patience_s
        while (left := list(self._living())) and time.monotonic() < until:
            time.sleep(0.1)
        return left

    def _living(self) -> Iterator[int]:
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                try:
                    marked = self.mark.encode() in (folder / "environ").read_bytes()
                    state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
                except OSError:
                    continue
                if marked and state != "Z":
                    yield int(folder.name)

    def wait_for_steps(self) -> None:
        """Until training goes on."""
        until = time.monotonic() + PATIENCE_S
        while not self.log.exists() or not self.log.read_text():
            assert time.monotonic() < until, "it never starts"
            assert self.process.poll() is None, "it has ended"
            time.sleep(0.1)


@pytest.fixture
def started(tmp_path: Path) -> Iterator[list[Command]]:
    commands: list[Command] = []
    yield commands
    for command in commands:
        for pid in command.left_running(0):
            os.kill(pid, signal.SIGKILL)
        command.process.kill()
        command.process.communicate()


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
    command = Command(tmp_path, fault, "--steps", "50", "--timeout", "3")
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
    command = Command(tmp_path, "none", "--steps", "1000000")
    started.append(command)
    command.wait_for_steps()
    os.killpg(command.process.pid, signal.SIGINT)
    code, words = command.end()
    assert code == 130, words
    assert "Traceback" not in words
    assert command.left_running() == []


def test_a_launcher_that_is_killed_takes_its_processes_along(tmp_path: Path, started: list[Command]) -> None:
    command = Command(tmp_path, "none", "--steps", "1000000")
    started.append(command)
    command.wait_for_steps()
    assert len(command.left_running(0)) >= 3
    command.process.kill()
    assert command.left_running(15.0) == []
