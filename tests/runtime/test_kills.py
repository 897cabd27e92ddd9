"""A run that writes checkpoints is killed at random moments, and goes on as if nothing had been."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest
from support.launched import Command
from support.runs import EVERYTHING, Heard, plan_of, run

from planner.errors import RunError
from planner.plan import write_plan
from planner.runtime.saved import newest, step_of


class Killer(Heard):
    """Kills one of a run's processes, a moment after a step is done."""

    def __init__(self, after: int, chance: random.Random) -> None:
        super().__init__()
        self.after = after
        self.delay_s = 0.1 * chance.random()
        self.chance = chance
        self.timer: threading.Timer | None = None

    def step(self, step: int, loss: float, seconds: float) -> None:
        super().step(step, loss, seconds)
        if step >= self.after and self.timer is None:
            self.timer = threading.Timer(self.delay_s, self.kill)
            self.timer.start()

    def kill(self) -> None:
        victim = self.chance.choice(sorted(child.pid or 0 for child in multiprocessing.active_children()))
        os.kill(victim, signal.SIGKILL)


@pytest.mark.parametrize(
    "kills", [pytest.param(50, marks=[pytest.mark.slow, pytest.mark.timeout(3600)]), pytest.param(3)]
)
def test_ranks_killed_at_random_moments(kills: int, tmp_path: Path) -> None:
    """One rank at a time, mostly within a checkpoint; the plan is another one every time."""
    plans = [plan_of(EVERYTHING, num_ranks=ranks, microbatches=2) for ranks in (2, 3)]
    kept = tmp_path / "kept"
    chance = random.Random(kills)
    losses: dict[int, float] = {}
    done = 0
    for attempt in range(kills):
        killer = Killer(done + 1, chance)
        options = {"steps": 100_000, "checkpoints": kept, "checkpoint_every": 1, "resume": bool(done)}
        with pytest.raises(RunError, match=r"killed by signal 9|lost contact"):
            run(plans[attempt % 2], tmp_path, killer, **options)
        last = newest(kept)
        assert last is not None
        assert step_of(last) > done, "a checkpoint of this run"
        losses |= {step: loss for step, loss, _ in killer.steps}
        done = step_of(last)
    through = run(plans[0], tmp_path, steps=done).result
    assert through.losses == tuple(losses[step] for step in range(done))
    result = run(plans[0], tmp_path, steps=done, checkpoints=kept, resume=True).result
    assert result.weights_sha256 == through.weights_sha256


@pytest.mark.parametrize(
    ("seed", "kills"),
    [pytest.param(1, 8, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])],
)
def test_a_run_killed_as_a_whole_goes_on(seed: int, kills: int, tmp_path: Path) -> None:
    """kill -9 of the launcher or of one rank, mostly within a checkpoint: there is one after every step."""
    plans = [plan_of(EVERYTHING, num_ranks=ranks, microbatches=2) for ranks in (2, 3)]
    for number, plan in enumerate(plans):
        write_plan(plan, tmp_path / f"plan{number}.yaml")
    kept = tmp_path / "kept"
    chance = random.Random(seed)
    done = 0
    for attempt in range(kills):
        resume = ["--resume"] if newest(kept) else []
        options = ("--steps", 100_000, "--checkpoint", kept, "--checkpoint-every", 1, *resume)
        command = Command(tmp_path, *options, plan=f"plan{attempt % 2}.yaml")
        try:
            command.wait_for_step(done + 1)  # so there is a checkpoint of this run
            time.sleep(chance.random() * 0.3)
            victims = [command.process.pid, *command.workers()]
            os.kill(chance.choice(victims), signal.SIGKILL)
            command.process.wait(60)
            assert command.left_running(15.0) == []
        finally:
            command.clear()
        last = newest(kept)
        assert last is not None
        assert step_of(last) >= done
        done = step_of(last)
        rows = command.rows()
        assert [row["step"] for row in rows] == sorted({row["step"] for row in rows}), "lines of steps before stay"
        rows = [row for row in rows if row["step"] <= done]
        command.log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    through = run(plans[0], tmp_path, steps=done).result
    logged = {row["step"]: row["loss"] for row in rows}
    assert logged
    assert logged == {step: through.losses[step - 1] for step in logged}
    result = run(plans[0], tmp_path, steps=done, checkpoints=kept, resume=True).result
    assert result.weights_sha256 == through.weights_sha256
