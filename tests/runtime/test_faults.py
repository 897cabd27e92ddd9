"""Whatever befalls a rank, the run ends soon, with the rank's own words last, and nothing is left running."""

from __future__ import annotations

import multiprocessing
import os
import re
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.launched import Command
from support.runs import Heard, plan_of, run
from support.sleep import write_sleep_model

from planner.plan import write_plan
from planner.runtime.saved import check_files, newest, read_saved

FAULTY = Path(__file__).parent.parent / "support" / "faulty.py"


def start(folder: Path, fault: str, *options: object, where: str = "forward", data: int = 1) -> Command:
    model = folder / "model.py"
    text = FAULTY.read_text().replace('FAULT = "none"', f'FAULT = "{fault}"')
    model.write_text(text.replace('PLACE = "forward"', f'PLACE = "{where}"'))
    plan = plan_of(model, num_ranks=2 // data, microbatch=1, microbatches=4 // data, data=data)
    write_plan(plan, folder / "plan.yaml")
    return Command(folder, *options)


@pytest.fixture
def started() -> Iterator[list[Command]]:
    commands: list[Command] = []
    yield commands
    for command in commands:
        command.clear()


slow = pytest.mark.slow
PLACE = r"rank 1, stage 1, micro-batch (\d), action 1F\1, step [23]: "
SILENCE = "no sign of progress for 3 s"


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("raise", "ValueError: the weather is bad"),
        ("die", r"the process was killed by signal 9 \(SIGKILL\)"),
        pytest.param("leave", "the process ended with code 7", marks=pytest.mark.slow),
        pytest.param("finish", "the process ended with code 0 in mid-run", marks=pytest.mark.slow),
        ("hang", SILENCE),
        pytest.param("stop", rf"{SILENCE} \(the process is stopped\)", marks=pytest.mark.slow),
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


SAID = {
    "raise": "ValueError: the weather is bad",
    "die": r"the process was killed by signal 9 \(SIGKILL\)",
    "stop": rf"{SILENCE} \(the process is stopped\)",
}
PLACES = {
    "backward": r"rank 1, stage 1, micro-batch \d, action 1B\d, step 3",
    "sum": r"rank 0 of replica 1, step 10, summing gradients",
    "checkpoint": r"rank 1, step 10, in a checkpoint",
}


@pytest.mark.parametrize(
    ("where", "fault"),
    [pytest.param(where, fault, marks=slow) for where in PLACES for fault in SAID],
)
def test_wherever_it_fails_it_ends_the_run(where: str, fault: str, tmp_path: Path, started: list[Command]) -> None:
    kept = tmp_path / "kept"
    options = ("--steps", 50, "--timeout", 3, "--checkpoint", kept, "--checkpoint-every", 1)
    command = start(tmp_path, fault, *options, where=where, data=2 if where == "sum" else 1)
    started.append(command)
    code, words = command.end()
    assert code == 4, words
    assert re.fullmatch(f"pipeplan: {PLACES[where]}: {SAID[fault]}; .*", words.rstrip().splitlines()[-1]), words
    assert command.left_running() == []
    last = newest(kept)
    assert last is not None
    check_files(last, read_saved(last))


def test_control_c_ends_the_run(tmp_path: Path, started: list[Command]) -> None:
    command = start(tmp_path, "none", "--steps", "1000000")
    started.append(command)
    command.wait_for_step()
    os.killpg(command.process.pid, signal.SIGINT)
    code, words = command.end()
    assert code == 130, words
    assert "Traceback" not in words
    (done,) = re.findall(r"interrupted after (\d+) of 1000000 steps", words)
    assert [row["step"] for row in command.rows()] == list(range(1, int(done) + 1)), "the log is written to its end"
    assert command.left_running() == []


@pytest.mark.parametrize("stopped", [pytest.param(False, marks=slow), True])
def test_a_launcher_that_is_killed_takes_its_processes_along(
    stopped: bool, tmp_path: Path, started: list[Command]
) -> None:
    command = start(tmp_path, "none", "--steps", "1000000")
    started.append(command)
    command.wait_for_step()
    assert len(command.left_running(0)) >= 3
    (folder,) = {Path(entry).parent for pid in command.workers() for entry in opened(pid) if "pipeplan-run-" in entry}
    assert folder.is_dir()
    if stopped:
        os.kill(command.workers()[0], signal.SIGSTOP)
    command.process.kill()
    assert command.left_running(15.0) == []
    assert not folder.exists()


@slow
def test_a_log_that_takes_no_more_lines_is_told_and_training_goes_on(tmp_path: Path, started: list[Command]) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full, which is always full")
    command = start(tmp_path, "none", "--steps", 30, "--log", "/dev/full")
    started.append(command)
    code, words = command.end()
    assert code == 0, words
    assert words.count("remark: --log /dev/full: No space left on device; its lines end before step 1, training") == 1
    assert "Traceback" not in words
    assert "step 30/30" in words


@slow
def test_a_disk_that_takes_no_checkpoint_ends_the_run(
    tmp_path: Path, started: list[Command], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "kept"
    monkeypatch.setenv(
        "PYTHONDONTWRITEBYTECODE", "1"
    )  # Python writes the half of it that it may, and fails on it later
    command = start(tmp_path, "none", "--steps", 5, "--checkpoint", kept, "--checkpoint-every", 1)
    most = 2000  # bytes of any file that it, and what it starts, writes
    resource.prlimit(command.process.pid, resource.RLIMIT_FSIZE, (most, most))
    started.append(command)
    code, words = command.end()
    assert code == 4, words
    said = re.escape(f"{kept}: the checkpoint of step 1 cannot be written (File too large); make room there")
    assert re.match(rf"pipeplan: rank \d, step 1, in a checkpoint: {said}", words.rstrip().splitlines()[-1]), words
    assert "Traceback" not in words
    assert newest(kept) is None
    assert command.left_running() == []


@slow
@pytest.mark.parametrize("fault", [OSError("nobody listens"), SystemExit(0)], ids=repr)
def test_a_listener_that_fails_ends_the_run(fault: BaseException, tmp_path: Path) -> None:
    """Else nothing would be left that sees a rank hang."""

    class Deaf(Heard):
        def step(self, step: int, loss: float, seconds: float) -> None:
            raise fault

    model = write_sleep_model(tmp_path / "model.py", layers=2, forward_s=0, backward_s=0)
    with pytest.raises(type(fault)) as raised:
        run(plan_of(model, num_ranks=2), tmp_path, Deaf(), steps=1_000_000)
    assert raised.value is fault
    assert multiprocessing.active_children() == []


def opened(pid: int) -> set[str]:
    """The files that a process has open or in its memory."""
    return {line.split(maxsplit=5)[5] for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "/" in line}
