"""The runtime goes at the speed of the plan: on layers that only sleep, all beyond the prediction is its own doing."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import pytest
from support.runs import run, timed_plan
from support.sleep import write_sleep_model

TRIES = 4
WITHIN = 0.03


def test_layers_that_sleep_take_as_long_as_predicted(tmp_path: Path) -> None:
    """P = 4, M = 16: the median iteration is within 3 % of the prediction, in the best of a few tries.

    A machine that others use too adds to what is measured, and to what is predicted; so the whole is tried again.
    """
    model = write_sleep_model(tmp_path / "naps.py", layers=4, forward_s=0.02, backward_s=0.04)
    ratios = []
    for _ in range(TRIES):
        plan = timed_plan(model, num_ranks=4, microbatches=16)
        assert plan.predicted is not None
        assert plan.predicted.iteration_s > 19 * 0.06, "what the sleep alone takes"
        outcome = run(plan, tmp_path, steps=6)
        iterations = [step.iteration_s for step in outcome.result.steps[1:]]
        ratios.append(median(iterations) / plan.predicted.iteration_s)
        if abs(ratios[-1] - 1) <= WITHIN:
            return
    pytest.fail(f"measured over predicted: {ratios}")
