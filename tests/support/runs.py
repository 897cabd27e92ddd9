"""Plans made straight from a captured model, with an even cut, and runs of them in this process's own launcher."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from planner.capture import Capture, capture, load_model_file
from planner.cluster import Cluster
from planner.graph import Stage
from planner.plan import Batch, Parallel, Plan, PlannedModel, PlannedProfile, PlannedSchedule, write_plan
from planner.runtime.result import Outcome
from planner.runtime.run import RunOptions, run_plan
from planner.schedules import Placement, ScheduleName, ranks_of


@cache
def captured(model_path: Path, microbatch: int) -> Capture:
    return capture(load_model_file(model_path), microbatch_size=microbatch)


def even_cut(layers: Sequence[str], num_stages: int) -> list[tuple[str, ...]]:
    """Stages of about as many layers each."""
    bounds = [round(stage * len(layers) / num_stages) for stage in range(num_stages + 1)]
    return [tuple(layers[start:end]) for start, end in itertools.pairwise(bounds)]


def plan_of(
    model_path: Path,
    *,
    num_ranks: int,
    microbatch: int = 2,
    microbatches: int = 4,
    schedule: ScheduleName = ScheduleName.ONE_F_ONE_B,
    virtual: int = 1,
    placement: Placement = Placement.LOOP,
    warmup: tuple[int, ...] | None = None,
    data: int = 1,
    recompute: bool = False,
    cut: Sequence[Sequence[str]] | None = None,
) -> Plan:
    """A plan that runs; its figures are made up, as a run needs none."""
    found = captured(model_path, microbatch)
    ranks = ranks_of(num_ranks, virtual, placement)
    stages = cut or even_cut([layer.name for layer in found.layers], len(ranks))
    zeros = {field.name: 0 for field in dataclasses.fields(Stage) if field.name.endswith("_bytes")}
    return Plan(
        model=PlannedModel(name=model_path.stem, source=str(model_path), fingerprint=found.fingerprint),
        profile=PlannedProfile(path="none.json", sha256="0" * 64, provenance="estimated", device="none"),
        cluster=Cluster(),
        batch=Batch(global_batch=microbatch * microbatches * data, microbatch=microbatch, microbatches=microbatches),
        parallel=Parallel(gpus=num_ranks * data, pipeline=num_ranks, virtual=virtual, data=data, tensor=1),
        schedule=PlannedSchedule(name=schedule, placement=placement, warmup=warmup),
        stages=tuple(
            Stage(
                stage=number,
                rank=ranks[number],
                layers=tuple(layers),
                recompute=recompute,
                forward_s=float(len(layers)),
                backward_input_s=float(len(layers)),
                backward_weight_s=float(len(layers)),
                **zeros,
            )
            for number, layers in enumerate(stages)
        ),
    )


class Heard:
    """What a run told while it went."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, float, float]] = []
        self.remarks: list[str] = []
        self.text = ""

    def step(self, step: int, loss: float, seconds: float) -> None:
        self.steps.append((step, loss, seconds))

    def remark(self, text: str) -> None:
        self.remarks.append(text)

    def details(self, text: str) -> None:
        self.text += text


def run(plan: Plan, folder: Path, heard: Heard | None = None, **options: Any) -> Outcome:
    """Run a plan to its end."""
    path = folder / "plan.yaml"
    write_plan(plan, path)
    outcome = run_plan(path, RunOptions(**({"steps": 3} | options)), heard or Heard())
    assert outcome is not None
    return outcome
