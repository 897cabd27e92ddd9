"""A plan as a script for torch.distributed.pipelining: split points, the order as CSV, and the loop around them.

Its tracer cuts before the call of a module, and its runtime runs any order of actions over stages in a row. What it
gets wrong is refused: stages that skip others, tied parameters over stages (they would become copies), and what its
runtime lacks.
"""

from __future__ import annotations

import os
from importlib.resources import files
from pathlib import Path

from planner.exchange.target import Planned, list_text, planned, refuse_skips, refuse_tensor_parallel, refuse_ties
from planner.exchange.torch_csv import schedule_csv
from planner.exchange.torch_limits import refuse_what_its_runtime_lacks

_SYSTEM = "torch.distributed.pipelining"


def torch_script(path: Path, goal: Path | None = None) -> str:
    """The script for the plan in a file. ``goal``: where it will lie (None: beside the plan).

    Raises InputError where the plan is wrong, or asks for what torch.distributed.pipelining does not have.
    """
    made = planned(path, system=_SYSTEM)
    refuse_tensor_parallel(made)
    refuse_skips(made)
    refuse_ties(made)
    refuse_what_its_runtime_lacks(made)
    plan = made.plan
    name = goal.name if goal else f"{path.stem}_torch.py"
    folder = goal.parent if goal else path.parent
    source = Path(os.path.relpath(path.parent / plan.model.source, folder)).as_posix()
    text = files("planner.exchange").joinpath("torch_pipeline.py.txt").read_text(encoding="utf-8")
    head, rule, rest = text.partition("# ---")
    constants, second, code = rest.partition("# ---")
    docstring = head.format(title=_title(made), gpus=plan.parallel.gpus, name=name, plan=path.name)
    filled = constants.format(
        source=source,
        pipeline=plan.parallel.pipeline,
        data=plan.parallel.data,
        microbatch=plan.batch.microbatch,
        microbatches=plan.batch.microbatches,
        split_points=list_text(split_points(made)) if len(made.cut) > 1 else "[]",
        ranks=[stage.rank for stage in plan.stages],
        recompute=[stage.stage for stage in plan.stages if stage.recompute],
        schedule=schedule_csv(made.schedule),
    )
    return docstring + rule + filled + second + code


def _title(made: Planned) -> str:
    plan = made.plan
    return (
        f"{plan.model.name} in {len(plan.stages)} stages on {plan.parallel.gpus} processes with "
        f"torch.distributed.pipelining, schedule {plan.schedule.name.value}."
    )


def split_points(made: Planned) -> list[str]:
    """The module whose call begins each stage but the first."""
    called: set[str] = set()
    names = []
    for stage, layers in enumerate(made.cut):
        if stage:
            first = layers[0]
            module = first.modules[0] if first.modules else ""
            begun = {name for name in called if name == module or name.startswith(f"{module}.")}
            if not module or begun or "@" in first.name:
                made.refuse(
                    f"the start of stage {stage} at layer {first.name}: it splits before the first call of a module"
                    + (f", and {min(begun)} was called before it" if begun else ""),
                    f"move {first.name} to stage {stage - 1}, or profile with --granularity block",
                )
            names.append(module)
        called.update(name for layer in layers for name in layer.modules)
    return names
