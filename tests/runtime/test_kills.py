"""A run that writes checkpoints is killed at random moments, and goes on as if nothing had been."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
from support.launched import Command
from support.runs import EVERYTHING, plan_of, run

from planner.plan import write_plan
from planner.runtime.saved import newest, step_of


@pytest.mark.parametrize(
    ("seed", "kills"),
    [(0, 3), *(pytest.param(seed, 10, marks=[pytest.mark.slow, pytest.mark.timeout(1800)]) for seed in range(1, 6))],
)
def test_killed_at_random_moments_it_goes_on(seed: int, kills: int, tmp_path: Path) -> None:
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
        steps = [row["step"] for row in command.rows()]
        assert steps == sorted(set(steps)), "a resumed run keeps the lines of the steps before it, and no other"
    through = run(plans[0], tmp_path, steps=done).result
    logged = {row["step"]: row["loss"] for row in command.rows() if row["step"] < done}
    assert len(logged) > kills / 2
    assert logged == {step: through.losses[step] for step in logged}
    result = run(plans[0], tmp_path, steps=done, checkpoints=kept, resume=True).result
    assert result.weights_sha256 == through.weights_sha256
