"""What the runtime itself costs: steps whose layers do nothing, and steps whose layers only sleep, over the prediction.

    .venv/bin/python scripts/bench/runtime.py [--rounds 3]

Best and median over the steps of all rounds, since others use the machine too; CPU time of a step over all ranks does
not hang on them.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from statistics import median

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from rich.console import Console
from rich.table import Table
from support.runs import plan_of, run, timed_plan
from support.sleep import write_sleep_model

from planner.schedules import Placement, ScheduleName

SHAPES = {
    "gpipe": {"schedule": ScheduleName.GPIPE},
    "1f1b": {"schedule": ScheduleName.ONE_F_ONE_B},
    "interleaved-1f1b": {"schedule": ScheduleName.INTERLEAVED, "virtual": 2},
    "zb-v": {"schedule": ScheduleName.ZB_V, "virtual": 2, "placement": Placement.V},
}


def main() -> None:
    """Print both tables."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--ranks", type=int, default=4)
    options.add_argument("--microbatches", type=int, default=16)
    given = options.parse_args()
    table = Table(title=f"P = {given.ranks}, M = {given.microbatches}", title_justify="left")
    for name in ("schedule", "zero work, best", "median", "sleep / predicted, best", "median"):
        table.add_column(name, justify="right" if name != "schedule" else "left")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        naps = write_sleep_model(folder / "naps.py", layers=2 * given.ranks, forward_s=0.01, backward_s=0.02)
        idle = write_sleep_model(folder / "idle.py", layers=2 * given.ranks, forward_s=0, backward_s=0)
        for title, shape in SHAPES.items():
            zero, ratios = [], []
            for _ in range(given.rounds):
                size = {"num_ranks": given.ranks, "microbatches": given.microbatches, "microbatch": 1} | shape
                steps = run(plan_of(idle, **size), folder, steps=60).result.steps[10:]
                zero += [step.iteration_s for step in steps]
                plan = timed_plan(naps, **size)
                steps = run(plan, folder, steps=6).result.steps[1:]
                ratios += [step.iteration_s / plan.predicted.iteration_s for step in steps]
            table.add_row(
                title,
                f"{min(zero) * 1e3:.1f} ms",
                f"{median(zero) * 1e3:.1f} ms",
                f"{min(ratios):.4f}",
                f"{median(ratios):.4f}",
            )
    Console().print(table)


if __name__ == "__main__":
    main()
