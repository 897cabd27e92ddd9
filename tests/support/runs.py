"""Plans made straight from a captured model, with an even cut, and runs of them in this process's own launcher."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import torch

from planner.capture import Capture, RandomKey, StageProgram, capture, load_model_file
from planner.capture import Stage as StageOfModel
from planner.cluster import Cluster, ClusterLinks, Link
from planner.graph import Stage, Transfer
from planner.plan import (
    Batch,
    Parallel,
    Plan,
    PlannedModel,
    PlannedProfile,
    PlannedSchedule,
    predicted_of,
    schedule_of,
    write_plan,
)
from planner.profile import ProfiledLinks
from planner.runtime.links import measure_links
from planner.runtime.result import Outcome
from planner.runtime.run import RunOptions, run_plan
from planner.schedules import Placement, ScheduleName, ranks_of
from planner.simulate import simulate
from planner.simulate.job import Job

EVERYTHING = Path(__file__).parent / "everything.py"
"""The model file with all that makes cutting hard."""


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
    tensor: int = 1,
    sequence: bool | None = None,
    zero1: bool = False,
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
        parallel=Parallel(
            gpus=num_ranks * data * tensor,
            pipeline=num_ranks,
            virtual=virtual,
            data=data,
            tensor=tensor,
            sequence=sequence,
            zero1=zero1 or None,
        ),
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


def timed_plan(model_path: Path, **shape: Any) -> Plan:
    """An even plan whose stages were timed one by one in this process, and what the time model foretells of it."""
    plan = plan_of(model_path, **shape)
    links = _links()
    link = Link(latency_s=links.latency_s, bandwidth_bytes_per_s=links.bandwidth_bytes_per_s)
    cluster = Cluster(links=ClusterLinks(intra_node=link), overlap=links.overlap)
    programs = captured(model_path, plan.batch.microbatch).stages([stage.layers for stage in plan.stages])
    stages = []
    for stage, program in zip(plan.stages, programs, strict=True):
        forward_s, backward_s = _seconds(program, captured(model_path, plan.batch.microbatch))
        sends = [Transfer(to_stage=made.readers[0], bytes=made.num_bytes) for made in program.sends]
        returns = [Transfer(to_stage=made.producer, bytes=made.num_bytes) for made in program.receives]
        figures = {"forward_s": forward_s, "backward_input_s": backward_s, "backward_weight_s": 0.0}
        stages.append(dataclasses.replace(stage, **figures, sends=tuple(sends), returns=tuple(returns)))
    job = Job(
        stages=tuple(stages),
        num_ranks=plan.parallel.pipeline,
        num_microbatches=plan.batch.microbatches,
        cluster=cluster,
        gradient_bytes_per_trainable_byte=1.0,
        state_bytes_per_trainable_byte=0.0,
        step_s_per_trainable_byte=0.0,
    )
    timeline = simulate(job, schedule_of(plan), memory=False)
    predicted = predicted_of(timeline, global_batch=plan.batch.global_batch, bound_s=None)
    return dataclasses.replace(plan, stages=tuple(stages), cluster=cluster, predicted=predicted)


@cache
def _links() -> ProfiledLinks:
    links = measure_links("cpu")
    assert links is not None
    return links


def _seconds(program: StageProgram, found: Capture, *, repeats: int = 8) -> tuple[float, float]:
    """Medians of F and B of a stage of a chain."""
    stage = StageOfModel(program, found.module)
    received = {made.name: torch.randn(made.shape) for made in program.receives}
    gradients = {made.name: torch.randn(made.shape) for made in program.sends}
    forwards, backwards = [], []
    for _ in range(repeats):
        start = time.perf_counter()
        stage.forward(0, found.batch.inputs, found.batch.target, received, RandomKey(0, 0, 0))
        between = time.perf_counter()
        stage.backward(0, gradients, 1.0)
        forwards.append(between - start)
        backwards.append(time.perf_counter() - between)
    return median(forwards), median(backwards)
