"""A plan as settings of torchtitan: the modules of each model part, and its schedule by name or as CSV.

torchtitan gives each stage the whole model without the modules of the others: top-level modules (``norm``) and entries
of top-level containers (``layers.3``) are what it can take out. Stages lie in loops or, for its two schedules in a V,
in a V. Recompute is one setting for all stages.
"""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

from planner.exchange.modules import parts_of
from planner.exchange.target import Planned, list_text, planned, refuse_skips, refuse_ties
from planner.exchange.torch_csv import schedule_csv
from planner.exchange.torch_limits import refuse_what_its_runtime_lacks
from planner.schedules import Placement, ScheduleName

_SYSTEM = "torchtitan"

_NAMED = {
    ScheduleName.GPIPE: "GPipe",
    ScheduleName.ONE_F_ONE_B: "1F1B",
    ScheduleName.INTERLEAVED: "Interleaved1F1B",
}
"""Schedules whose order torch makes from the name alone, just as ours. All others are written as CSV: LoopedBFS, for
one, runs its backwards from the last micro-batch to the first there."""


def torchtitan_settings(path: Path, goal: Path | None = None) -> str:
    """Python that sets a trainer's config for the plan in a file. ``goal``: where it will lie.

    Raises InputError where the plan is wrong, or asks for what torchtitan does not have.
    """
    made = planned(path, system=_SYSTEM)
    refuse_skips(made)
    refuse_ties(made)
    refuse_what_its_runtime_lacks(made)
    _refuse_what_its_config_lacks(made)
    plan = made.plan
    name, csv = _schedule(made)
    text = files("planner.exchange").joinpath("torchtitan_settings.py.txt").read_text(encoding="utf-8")
    return text.format(
        model=plan.model.name,
        plan=path.name,
        stem=(goal.stem if goal else f"{path.stem}_torchtitan").replace("-", "_"),
        gpus=plan.parallel.gpus,
        parts=list_text(model_parts(made)),
        schedule=json.dumps(name),
        csv=f'"""\\\n{csv}"""' if csv else "None",
        pipeline=plan.parallel.pipeline,
        data=plan.parallel.data,
        tensor=_tensor(made),
        microbatch=plan.batch.microbatch,
        local=plan.batch.microbatch * plan.batch.microbatches,
        global_batch=plan.batch.global_batch,
        recompute=plan.stages[0].recompute,
    )


def _tensor(made: Planned) -> str:
    """The tensor size; with several ranks, whether they hold parts of the tokens (its default) between split ops."""
    sizes = made.plan.parallel
    if sizes.tensor == 1:
        return "1"
    return f"{sizes.tensor},\n        enable_sequence_parallel={bool(sizes.sequence)}"


def model_parts(made: Planned) -> list[list[str]]:
    """The modules of every stage, by the names that torchtitan takes."""
    home: dict[str, int] = {}
    stages: list[list[str]] = []
    for stage, layers in enumerate(made.cut):
        stages.append([])
        for layer in layers:
            parts = parts_of(layer)
            if not parts:
                made.refuse(f"layer {layer.name}, which no module of the model runs", "put its work into a module")
            for part in parts:
                if home.setdefault(part, stage) != stage:
                    one = f"keep {part} in one stage" if "." in part else "where lists lie deeper, export --to torch"
                    made.refuse(
                        f"a cut within module {part}, which stages {home[part]} and {stage} both run",
                        f"it moves whole top-level modules and entries of top-level lists: {one}",
                    )
                if part not in stages[stage]:
                    stages[stage].append(part)
    return stages


def _schedule(made: Planned) -> tuple[str, str | None]:
    """The schedule's name for torchtitan, and the CSV of its order where the name does not make it."""
    plan = made.plan
    known = _NAMED.get(plan.schedule.name)
    if known and made.warmup_is_default and plan.batch.microbatches % plan.parallel.pipeline == 0:
        return known, None
    if plan.schedule.placement is Placement.V:
        return "ZBVZeroBubble", schedule_csv(made.schedule)
    return "1F1B" if plan.parallel.virtual == 1 else "Interleaved1F1B", schedule_csv(made.schedule)


def _refuse_what_its_config_lacks(made: Planned) -> None:
    plan = made.plan
    if plan.schedule.placement is Placement.FREE:
        made.refuse("placement free", "it places stages in loops or in a V: solve with another schedule")
    again = [stage.recompute for stage in plan.stages]
    if any(again) and not all(again):
        made.refuse(
            f"recompute of stage {again.index(True)} and not of stage {again.index(False)}: it has one setting for all",
            "solve with --recompute none or --recompute all",
        )
