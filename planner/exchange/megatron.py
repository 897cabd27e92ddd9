"""A plan as options of Megatron-LM: pipeline size, layout, batch, recompute.

    --pipeline-model-parallel-layout "Ett|tt|ttL"     stage by stage along the data flow; E embedding, t a decoder
                                                      layer, L the last norm, the output layer and the loss

Megatron-LM builds its own model, so what counts is how many of its layers go where. Stages are placed in loops over the
ranks, its orders are 1F1B and interleaved 1F1B, each with one warm-up depth, and recompute is all or none.
"""

from __future__ import annotations

import re
from pathlib import Path

from planner.exchange.modules import containers, item_of
from planner.exchange.target import Planned, planned, refuse_other_schedules, refuse_skips, tied
from planner.plan import Plan
from planner.schedules import ScheduleName

_EMBEDDING, _LAST = "E", "L"


def megatron_options(path: Path, goal: Path | None = None) -> str:
    """The options for the plan in a file, as a shell array to source. ``goal``: where they will lie.

    Raises InputError where the plan is wrong, or asks for what Megatron-LM does not have.
    """
    made = planned(path, system="Megatron-LM")
    refuse_skips(made)
    _refuse_schedule(made)
    stages = _symbols(made)
    plan = made.plan
    options = [
        f"--pipeline-model-parallel-size {plan.parallel.pipeline}",
        f"--tensor-model-parallel-size {plan.parallel.tensor}",
        f"--micro-batch-size {plan.batch.microbatch}",
        f"--global-batch-size {plan.batch.global_batch}",
        f"--num-layers {sum(stage.count('t') for stage in stages)}",
        *_recompute(made, stages),
    ]
    if len(stages) > 1:
        options.insert(1, f'--pipeline-model-parallel-layout "{layout_text(stages)}"')
    if plan.parallel.sequence:
        options.append("--sequence-parallel")
    if not tied(made) and not _tied_in_one_stage(made):
        options.append("--untie-embeddings-and-output-weights")
    name = goal.name if goal else f"{path.stem}_megatron.sh"
    rows = "".join(f"  {option}\n" for option in options)
    return f"{_comment(made, stages, name)}PIPEPLAN_OPTIONS=(\n{rows})\n"


def _refuse_schedule(made: Planned) -> None:
    plan = made.plan
    sizes = plan.parallel
    refuse_other_schedules(made, ScheduleName.INTERLEAVED if sizes.virtual > 1 else ScheduleName.ONE_F_ONE_B)
    if sizes.virtual > 1 and sizes.pipeline == 1:
        made.refuse("several stages on the one rank of a pipeline", "solve with --virtual 1")
    if sizes.virtual > 1 and plan.batch.microbatches % sizes.pipeline:
        made.refuse(
            f"{plan.batch.microbatches} micro-batches over {sizes.pipeline} ranks of several stages",
            "its interleaved order takes a multiple of the ranks: another --batch or --microbatch, or --virtual 1",
        )


def _symbols(made: Planned) -> list[str]:
    """Every stage's layers as Megatron-LM spells them, e.g. ``Ettt``."""
    units = _units(made)
    home: dict[str, int] = {}
    stages = []
    for stage, layers in enumerate(made.cut):
        for layer in layers:
            unit = units[layer.name]
            if home.setdefault(unit, stage) != stage:
                words = {_EMBEDDING: "what comes before the decoder layers", _LAST: "what comes after them"}
                made.refuse(
                    f"a cut within {words.get(unit, unit)}: {layer.name} is in stage {stage}, the rest of it in stage "
                    f"{home[unit]}",
                    f"move {layer.name} to stage {home[unit]}",
                )
        found = dict.fromkeys(units[layer.name] for layer in layers)
        stages.append("".join(unit if unit in (_EMBEDDING, _LAST) else "t" for unit in found))
    return stages


def _units(made: Planned) -> dict[str, str]:
    """What Megatron-LM takes each layer for: a decoder layer, by its module's name, or E before them, or L after."""
    layers = made.profile.layers
    found = containers(layers)
    if len(found) != 1:
        said = f"a model that repeats layers in {', '.join(found)}" if found else "a model without a row of like layers"
        made.refuse(said, "its models are one row of decoder layers between an embedding and an output layer")
    items = [item if item and item.container == found[0] else None for item in map(item_of, layers)]
    rows = [index for index, item in enumerate(items) if item]
    if rows[0] == 0 or rows[-1] == len(layers) - 1:
        end = "before" if rows[0] == 0 else "after"
        made.refuse(f"a model without a layer {end} {found[0]}", "its models begin with an embedding and end with L")
    units = {}
    for index, (layer, item) in enumerate(zip(layers, items, strict=True)):
        if item is None and rows[0] < index < rows[-1]:
            made.refuse(f"layer {layer.name} between decoder layers", f"only those of {found[0]} may stand there")
        units[layer.name] = str(item) if item else _EMBEDDING if index < rows[0] else _LAST
    return units


def layout_text(stages: list[str]) -> str:
    """Stages as the layout option takes them: joined by bars, runs of one letter written ``t*8``."""
    return "|".join(re.sub(r"t{3,}", lambda run: f"t*{len(run[0])}", stage) for stage in stages)


def _recompute(made: Planned, stages: list[str]) -> list[str]:
    again = [stage.recompute for stage in made.plan.stages]
    if not any(again):
        return []
    if not all(again):
        made.refuse(
            f"recompute of stage {again.index(True)} and not of stage {again.index(False)}: it has one setting for all",
            "solve with --recompute none or --recompute all",
        )
    most = max(stage.count("t") for stage in stages)
    return ["--recompute-granularity full", "--recompute-method uniform", f"--recompute-num-layers {most}"]


def _tied_in_one_stage(made: Planned) -> bool:
    """Whether layers of one stage share a parameter, as embedding and output layer do in a stage of all layers."""
    names = [name for layer in made.profile.layers for name in layer.shared or {}]
    return len(names) > len(set(names))


def _comment(made: Planned, stages: list[str], name: str) -> str:
    plan: Plan = made.plan
    sizes = plan.parallel
    lines = [
        f"{plan.model.name}, planned by pipeplan in {made.path.name}, as options of Megatron-LM: a bash array.",
        "",
        f"    source {name}",
        '    torchrun --nproc-per-node ... pretrain_gpt.py "${PIPEPLAN_OPTIONS[@]}" <the options of your model>',
        "",
        f"It is for {sizes.gpus} GPUs in all: pipeline {sizes.pipeline}, tensor {sizes.tensor}, and data {sizes.data},",
        "which Megatron-LM takes from what these leave. Stage by stage (E embedding, t decoder layer, L last norm,",
        "output layer and loss):",
        *(f"    stage {index} on pipeline rank {index % sizes.pipeline}: {text}" for index, text in enumerate(stages)),
    ]
    if len(stages) > 1:
        lines.append("--pipeline-model-parallel-layout needs Megatron-LM core 0.14 or later.")
    if any(stage.recompute for stage in plan.stages):
        lines.append("Megatron-LM recomputes decoder layers alone: what E and L save stays held.")
    return "".join(f"# {line}".rstrip() + "\n" for line in lines)
