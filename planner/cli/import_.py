"""``pipeplan import``: other systems' profiles and schedules become profiles and plans of ours."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

import typer

from planner.cli.console import err, remark
from planner.errors import InputError


class Source(StrEnum):
    """The formats that can be read."""

    PIPEDREAM = "pipedream"
    DNN_PARTITIONING = "dnn-partitioning"
    PIPER = "piper"
    TORCH_CSV = "torch-csv"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("import")(import_)


def import_(
    file: Path = typer.Argument(metavar="FILE", help="The file to read.", show_default=False),
    source: Source = typer.Option(
        ..., "--from", metavar="SYSTEM", help="pipedream, dnn-partitioning, piper or torch-csv.", show_default=False
    ),
    microbatch_size: int = typer.Option(
        None, min=1, help="Samples that the file's times are for (pipedream needs it; others: 1).", show_default=False
    ),
    plan: Path = typer.Option(None, "--plan", help="The plan that a torch-csv schedule is for.", show_default=False),
    output: Path = typer.Option(
        None,
        "-o",
        "--output",
        help="The file to write (default: profiles/<name>.json; torch-csv: <name>.yaml beside the plan).",
        show_default=False,
    ),
) -> None:
    """Read another system's profile into one of ours, to plan with; or a schedule into a plan.

    pipedream: graph.txt. dnn-partitioning and piper: their JSON. Times become seconds; half of the backward each counts
    as I and as W.

    torch-csv: a schedule as torch.distributed.pipelining writes it, a row a rank, becomes the plan's own actions.
    """
    if source is Source.TORCH_CSV:
        _import_schedule(file, plan, output)
    else:
        _import_profile(file, source, microbatch_size, output)


def _import_schedule(file: Path, plan: Path | None, output: Path | None) -> None:
    from planner.exchange.torch_csv import import_torch_csv
    from planner.files import check_replaceable
    from planner.plan import write_plan

    if plan is None:
        raise InputError(f"{file}: a schedule says nothing of stages", hint="name the plan it is for with --plan")
    goal = output or plan.with_name(f"{file.stem}.yaml")
    made, remarks = import_torch_csv(file, plan_path=plan, goal=goal)
    check_replaceable(goal, "pipeplan-plan")
    write_plan(made, goal)
    for text in remarks:
        remark(text)
    actions = sum(len(text.split()) for text in made.actions or ())
    said = f"wrote {goal} ({actions} actions on {made.parallel.pipeline} ranks); next: pipeplan simulate {goal}"
    err.print(said, markup=False, soft_wrap=True)


def _import_profile(file: Path, source: Source, microbatch_size: int | None, output: Path | None) -> None:
    from planner.exchange.dnn_partitioning import import_dnn_partitioning
    from planner.exchange.pipedream import import_pipedream
    from planner.exchange.piper import import_piper
    from planner.files import check_replaceable
    from planner.profile import write_profile

    readers = {
        Source.PIPEDREAM: import_pipedream,
        Source.DNN_PARTITIONING: import_dnn_partitioning,
        Source.PIPER: import_piper,
    }
    goal = output or Path("profiles") / f"{file.name.partition('.')[0] or 'imported'}.json"
    profile, remarks = readers[source](file, microbatch_size=microbatch_size)
    check_replaceable(goal, "pipeplan-profile")
    write_profile(profile, goal)
    for text in remarks:
        remark(text)
    size = f"{len(profile.layers)} layers, {len(profile.edges)} edges"
    err.print(f"wrote {goal} ({size}); next: pipeplan solve {goal} --gpus N", markup=False, soft_wrap=True)
