"""The runtime beside torch.distributed.pipelining: what each adds to a step, run by turns on the same layers.

    .venv/bin/python scripts/bench/runtime.py sleep [--ranks 4] [--microbatches 16] [--rounds 5] [--schedules 1f1b,zb-v]
    .venv/bin/python scripts/bench/runtime.py zero          layers that do nothing: milliseconds of a step
    .venv/bin/python scripts/bench/runtime.py transformer   the blocks of a transformer on two ranks
    .venv/bin/python scripts/bench/runtime.py split         I and W over B, and the memory that I needs, on one stage

sleep: layers that sleep for F, I and W each, one a stage; step over the simulated ideal (links free) of each one's own
order of actions, step after step. Best and median over the steps of all rounds: others may use the machine too, so the
best counts.
bare: plain autograd and sockets in the same order, nothing else: what this machine leaves to be won. It has no I and W.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from rich.console import Console
from rich.table import Table
from split_backward import compare_splits
from support.runs import plan_of, run
from support.sleep import write_sleep_model

from planner.cluster import Cluster
from planner.graph import Stage, Transfer
from planner.schedules import Letter, Placement, Schedule, ScheduleName, build, format_order, parse_action, ranks_of
from planner.simulate import simulate
from planner.simulate.job import Job

SHAPES: dict[str, dict[str, Any]] = {
    "1f1b": {"schedule": ScheduleName.ONE_F_ONE_B},
    "interleaved-1f1b": {"schedule": ScheduleName.INTERLEAVED, "virtual": 2},
    "zb-h1": {"schedule": ScheduleName.ZB_H1, "virtual": 2},
    "zb-v": {"schedule": ScheduleName.ZB_V, "virtual": 2, "placement": Placement.V},
}
NAP_S = 0.02
TORCH = Path(__file__).with_name("torch_pipelining.py")
BARE = Path(__file__).with_name("bare.py")

TRANSFORMER = """
import torch
from torch import nn

WIDTH, LENGTH, VOCABULARY = 384, 128, 512

class Embedded(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
    def forward(self, x):
        return self.tokens(x)

def block():
    return nn.TransformerEncoderLayer(WIDTH, 6, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)

def model():
    return nn.Sequential(Embedded(), *(block() for _ in range(6)), nn.Linear(WIDTH, VOCABULARY))

def batch(size):
    return torch.randint(VOCABULARY, (size, LENGTH)), torch.randint(VOCABULARY, (size, LENGTH))

def loss(output, target):
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())

def optimizer(params):
    return torch.optim.SGD(params, lr=0.01)
"""


class Side:
    """Seconds of the steps of one of the two."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.ideal_s = 0.0

    def told(self, *, over_ideal: bool) -> tuple[str, str]:
        """Best and median, over the ideal or in milliseconds."""
        if not self.seconds:
            return "", ""
        scale = self.ideal_s if over_ideal else 1e-3
        return f"{min(self.seconds) / scale:.4g}", f"{median(self.seconds) / scale:.4g}"


def main() -> None:
    """Print one table."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("what", choices=("sleep", "zero", "transformer", "split"))
    options.add_argument("--ranks", type=int, default=4)
    options.add_argument("--microbatches", type=int, default=16)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--steps", type=int, default=4)
    options.add_argument("--schedules", default=",".join(SHAPES))
    given = options.parse_args()
    if given.what == "split":
        Console().print(compare_splits(given.rounds))
        return
    with tempfile.TemporaryDirectory() as name:
        Console().print(_sides(given, Path(name)))


def _sides(given: argparse.Namespace, folder: Path) -> Table:
    ranks = 2 if given.what == "transformer" else given.ranks
    table = Table(title=f"{given.what}: P = {ranks}, M = {given.microbatches}", title_justify="left")
    unit = "over ideal" if given.what == "sleep" else "ms"
    for column in ("schedule", f"ours {unit}, best", "median", "torch's, best", "median", "bare, best", "median"):
        table.add_column(column, justify="left" if column == "schedule" else "right")
    for title in given.schedules.split(","):
        shape = SHAPES[title]
        stages = ranks * shape.get("virtual", 1)
        path, cut = _model(given.what, folder, stages)
        ours, theirs, bare = sides = Side(), Side(), Side()
        for _ in range(given.rounds):
            _run_ours(path, cut, ours, shape, given, ranks)
            _run_torch(path, cut, theirs, title, given, ranks)
            if given.what != "transformer":
                _run_bare(path, bare, shape, given, ranks)
        table.add_row(title, *(word for side in sides for word in side.told(over_ideal=given.what == "sleep")))
    return table


def _model(what: str, folder: Path, stages: int) -> tuple[Path, list[int]]:
    """The model file, and how many of its layers (entries of a Sequential) each stage has."""
    path = folder / f"{what}{stages}.py"
    if what == "transformer":
        path.write_text(TRANSFORMER)
        bounds = [round(stage * 8 / stages) for stage in range(stages + 1)]
        return path, [last - first for first, last in pairwise(bounds)]
    nap_s = NAP_S if what == "sleep" else 0
    write_sleep_model(path, layers=stages, forward_s=nap_s, backward_s=nap_s, weight_s=nap_s)
    return path, [1] * stages


def _run_ours(
    path: Path, cut: list[int], side: Side, shape: dict[str, Any], given: argparse.Namespace, ranks: int
) -> None:
    size = {"num_ranks": ranks, "microbatches": given.microbatches, "microbatch": 1} | shape
    plan = plan_of(path, **size)
    layers = [name for stage in plan.stages for name in stage.layers]
    ends = [sum(cut[: stage + 1]) for stage in range(len(cut))]
    stage_of = [bisect_right(ends, int(name.partition(".")[0])) for name in layers]
    same = [[name for name, where in zip(layers, stage_of, strict=True) if where == stage] for stage in range(len(cut))]
    plan = plan_of(path, **size, cut=same)
    side.ideal_s = ideal_s(_order(shape, ranks, given.microbatches), [stage.rank for stage in plan.stages])
    warm = 10 if given.what == "zero" else 1
    steps = run(plan, path.parent, steps=_num_steps(given)).result.steps
    side.seconds += [step.iteration_s for step in steps[warm:]]


def _run_torch(path: Path, cut: list[int], side: Side, title: str, given: argparse.Namespace, ranks: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        words = [ranks, given.microbatches, title, path, ",".join(map(str, cut)), _num_steps(given), folder]
        started = [
            subprocess.Popen([sys.executable, str(TORCH), str(rank), *map(str, words)], stderr=subprocess.DEVNULL)
            for rank in range(ranks)
        ]
        codes = [process.wait(timeout=600) for process in started]
        assert not any(codes), f"torch's processes ended with {codes}"
        told = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(ranks)]
    ends = [max(row) for row in zip(*(process["ends"] for process in told), strict=True)]
    warm = 10 if given.what == "zero" else 1
    side.seconds += [after - before for before, after in list(pairwise(ends))[warm - 1 :]]
    places = ranks_of(ranks, SHAPES[title].get("virtual", 1), SHAPES[title].get("placement", Placement.LOOP))
    order = tuple(tuple(map(parse_action, process["order"])) for process in told)
    side.ideal_s = ideal_s(order if order[0] else _order(SHAPES[title], ranks, given.microbatches), places)


def _run_bare(path: Path, side: Side, shape: dict[str, Any], given: argparse.Namespace, ranks: int) -> None:
    order = _order(shape, ranks, given.microbatches)
    if any(action.letter in (Letter.BACKWARD_INPUT, Letter.BACKWARD_WEIGHT) for row in order for action in row):
        return
    places = ranks_of(ranks, shape.get("virtual", 1), Placement.LOOP)
    words = [path, _num_steps(given), json.dumps(places), json.dumps([format_order(row) for row in order])]
    told = subprocess.run([sys.executable, str(BARE), *map(str, words)], check=True, capture_output=True, timeout=600)
    ends = [max(row) for row in zip(*json.loads(told.stdout), strict=True)]
    warm = 10 if given.what == "zero" else 1
    side.seconds += [after - before for before, after in list(pairwise(ends))[warm - 1 :]]
    side.ideal_s = ideal_s(order, places)


def _order(shape: dict[str, Any], ranks: int, microbatches: int) -> Schedule:
    return build(
        shape["schedule"],
        num_ranks=ranks,
        virtual=shape.get("virtual", 1),
        num_microbatches=microbatches,
        placement=shape.get("placement", Placement.LOOP),
    )


def _num_steps(given: argparse.Namespace) -> int:
    return 60 if given.what == "zero" else given.steps + 1


def ideal_s(schedule: Schedule, ranks: Sequence[int]) -> float:
    """Seconds of a step of stages of equal naps under the time model, with free links and no optimizer.

    It is the second of two, as they are timed: a rank that is done begins the next while others end the one before.
    """
    count = 1 + max(action.microbatch for action in schedule[0])
    twice = tuple(
        (*row, *(action._replace(microbatch=action.microbatch + count) for action in row)) for row in schedule
    )
    ends_s = simulate(_naps(2 * count, len(schedule), ranks), twice, memory=False).ends_s
    return max(row[-1] for row in ends_s) - max(row[len(row) // 2 - 1] for row in ends_s)


def _naps(num_microbatches: int, num_ranks: int, ranks: Sequence[int]) -> Job:
    zeros = dict.fromkeys(
        (
            "parameter_bytes", "trainable_bytes", "buffer_bytes", "input_bytes", "saved_bytes",
            "saved_for_weight_bytes", "workspace_bytes",
        ),
        0,
    )  # fmt: skip
    stages = tuple(
        Stage(
            stage=number,
            rank=rank,
            layers=(str(number),),
            recompute=False,
            forward_s=NAP_S,
            backward_input_s=NAP_S,
            backward_weight_s=NAP_S,
            sends=(Transfer(to_stage=number + 1, bytes=1),) if number + 1 < len(ranks) else (),
            returns=(Transfer(to_stage=number - 1, bytes=1),) if number else (),
            **zeros,
        )
        for number, rank in enumerate(ranks)
    )
    return Job(
        stages=stages,
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        cluster=Cluster(),
        gradient_bytes_per_trainable_byte=1.0,
        state_bytes_per_trainable_byte=0.0,
        step_s_per_trainable_byte=0.0,
    )


if __name__ == "__main__":
    main()
