"""``pipeplan run`` as its user starts it, in processes that can be found, stopped and killed from outside."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PATIENCE_S = 240


class Command:
    """A run of the plan in a folder, marked so that every process it starts can be found again."""

    def __init__(self, folder: Path, *options: object, plan: str = "plan.yaml") -> None:
        self.log = folder / "log.jsonl"
        self.mark = f"PIPEPLAN_TEST={uuid.uuid4()}"
        name, _, value = self.mark.partition("=")
        words = ["run", folder / plan, "--log", self.log, *options]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "planner", *map(str, words)],
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

    def workers(self) -> list[int]:
        """The processes that train: those that the forking server has started."""
        return [pid for pid in self._living() if self.process.pid not in (pid, _parent(pid))]

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

    def rows(self) -> list[dict[str, Any]]:
        """The whole lines of the log."""
        if not self.log.exists():
            return []
        return [json.loads(line) for line in self.log.read_text().splitlines(keepends=True) if line.endswith("\n")]

    def wait_for_step(self, step: int = 0) -> None:
        """Until a step is done."""
        until = time.monotonic() + PATIENCE_S
        while not any(row["step"] > step for row in self.rows()):
            assert time.monotonic() < until, "it never starts"
            if self.process.poll() is not None:
                raise AssertionError(f"it has ended: {self.process.communicate()[1]}")
            time.sleep(0.05)

    def clear(self) -> None:
        """Whatever comes, nothing is left of it."""
        for pid in self.left_running(0):
            os.kill(pid, signal.SIGKILL)
        self.process.kill()
        self.process.communicate()


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
