"""``pipeplan import``: other systems' profiles and schedules become profiles and plans of ours."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

import typer

from planner.cli.console import err, out


class Source(StrEnum):
    """The formats that can be read."""

    PIPEDREAM = "pipedream"
    DNN_PARTITIONING = "dnn-partitioning"
    PIPER = "piper"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("import")(import_)


def import_(
    file: Path = typer.Argument(metavar="FILE", help="The file to read.", show_default=False),
    source: Source = typer.Option(
        ..., "--from", metavar="SYSTEM", help="pipedream, dnn-partitioning or piper.", show_default=False
    ),
    microbatch_size: int = typer.Option(
        None, min=1, help="Samples that the file's times are for (pipedream needs it; others: 1).", show_default=False
    ),
    output: Path = typer.Option(
        None, "-o", "--output", help="The file to write (default: profiles/<name>.json).", show_default=False
    ),
) -> None:
    """Read another system's profile into one of ours, to plan with.

    pipedream: graph.txt. dnn-partitioning and piper: their JSON. Times become seconds; half of the backward each counts
    as I and as W.
    """
    _import_profile(file, source, microbatch_size, output)


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
    for remark in remarks:
        err.print(f"remark: {remark}", markup=False, soft_wrap=True)
    out.print(f"{goal}: {len(profile.layers)} layers, {len(profile.edges)} edges", markup=False, soft_wrap=True)
