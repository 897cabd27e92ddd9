"""A plan as a PipelineModule of DeepSpeed: its boundaries, its micro-batches.

DeepSpeed takes a list of layers, each of which reads what the one before gave, and cuts it into one stage a rank, which
run 1F1B. The entries here are runs of the plan's layers between which a single tensor passes:

    layers    token   blocks.0.norm  blocks.0.attention   head
    entries   0       1              1                    2        (the norm's input is read again inside)
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from planner.exchange.target import (
    Planned,
    list_text,
    planned,
    refuse_other_schedules,
    refuse_skips,
    refuse_tensor_parallel,
)
from planner.profile import Layer
from planner.schedules import ScheduleName

Entry = tuple[Layer, ...]


def deepspeed_module(path: Path, goal: Path | None = None) -> str:
    """Python with the PipelineModule for the plan in a file, and its config. ``goal``: where it will lie.

    Raises InputError where the plan is wrong, or asks for what DeepSpeed does not have.
    """
    made = planned(path, system="DeepSpeed's PipelineModule")
    refuse_tensor_parallel(made)
    refuse_skips(made)
    refuse_other_schedules(made, ScheduleName.ONE_F_ONE_B)
    plan = made.plan
    entries = entries_of(made)
    boundaries = _boundaries(made, entries)
    text = files("planner.exchange").joinpath("deepspeed_module.py.txt").read_text(encoding="utf-8")
    return text.format(
        model=plan.model.name,
        plan=path.name,
        stem=(goal.stem if goal else f"{path.stem}_deepspeed").replace("-", "_"),
        gpus=plan.parallel.gpus,
        stages=len(plan.stages),
        layers=list_text(list(dict.fromkeys(name for layer in entry for name in layer.modules)) for entry in entries),
        boundaries=boundaries,
        intervals=[(boundaries[stage.stage + 1] - boundaries[stage.stage]) * stage.recompute for stage in plan.stages],
        tied=_tied(entries),
        global_batch=plan.batch.global_batch,
        microbatch=plan.batch.microbatch,
        microbatches=plan.batch.microbatches,
    )


def entries_of(made: Planned) -> list[Entry]:
    """The layers, in runs between which a single tensor passes, from each run to the next alone."""
    layers = made.profile.layers
    position = {layer.name: index for index, layer in enumerate(layers)}
    passing: list[set[tuple[str, str]]] = [set() for _ in layers]  # at [i]: what passes from before layer i to it or on
    for edge in made.profile.edges:
        for tensor in edge.tensors:
            for index in range(position[edge.source] + 1, position[edge.target] + 1):
                passing[index].add((edge.source, tensor.name))
    entries: list[list[Layer]] = []
    begun = 0
    for index, layer in enumerate(layers):
        from_last = all(position[source] >= begun for source, _ in passing[index])
        if index == 0 or (len(passing[index]) == 1 and from_last):
            entries.append([])
            begun = index
        entries[-1].append(layer)
    return [tuple(entry) for entry in entries]


def _boundaries(made: Planned, entries: list[Entry]) -> list[int]:
    start_of = {entry[0].name: index for index, entry in enumerate(entries)}
    boundaries = []
    for stage, layers in enumerate(made.cut):
        if layers[0].name not in start_of:
            inside = next(entry for entry in entries if layers[0] in entry)
            made.refuse(
                f"the start of stage {stage} at layer {layers[0].name}: more than one tensor passes there, or one that "
                "is older",
                f"begin stage {stage} at {inside[0].name}, or after {inside[-1].name}",
            )
        boundaries.append(start_of[layers[0].name])
    return [*boundaries, len(entries)]


def _tied(entries: list[Entry]) -> dict[str, list[int]]:
    users: dict[str, list[int]] = {}
    for index, entry in enumerate(entries):
        for name in dict.fromkeys(name for layer in entry for name in layer.shared or {}):
            users.setdefault(name, []).append(index)
    return {name: found for name, found in users.items() if len(found) > 1}
