"""``pipeplan export``: a plan's schedule for other systems."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

import typer

from planner.cli.console import out
from planner.errors import InputError


class Target(StrEnum):
    """The formats that can be written."""

    TORCH_CSV = "torch-csv"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("export")(export)


def export(
    plan: Path = typer.Argument(metavar="PLAN", help="The plan file.", show_default=False),
    target: Target = typer.Option(..., "--to", metavar="SYSTEM", help="torch-csv.", show_default=False),
    output: Path = typer.Option(
        None, "-o", "--output", help="The file to write (default: stdout).", show_default=False
    ),
) -> None:
    """Write a plan's schedule for another system.

    torch-csv: its actions, a row a rank, as torch.distributed.pipelining reads them.
    """
    from planner.files import write_atomically

    text = {Target.TORCH_CSV: _torch_csv}[target](plan)
    if output is None:
        typer.echo(text, nl=False)
        return
    if output.exists() and output.samefile(plan):
        raise InputError(f"{output}: is the plan", hint="name another file with -o")
    write_atomically(output, text)
    out.print(f"{output}: {len(text.splitlines())} rows", markup=False, soft_wrap=True)


def _torch_csv(path: Path) -> str:
    from planner.exchange.torch_csv import schedule_csv
    from planner.plan import read_plan
    from planner.plan.job import schedule_of
    from planner.schedules import Wiring, check_schedule

    plan = read_plan(path)
    try:
        schedule = schedule_of(plan)
    except InputError as error:
        raise InputError(f"{path}: {error.message}", hint=error.hint) from error
    found = check_schedule(schedule, num_microbatches=plan.batch.microbatches, wiring=Wiring.of(plan.stages))
    if found.errors:
        raise InputError(f"{path}: {found.errors[0]}", hint="correct its actions or its schedule")
    return schedule_csv(schedule)
