"""``pipeplan schema``: the JSON Schema of a file format."""

from __future__ import annotations

from enum import StrEnum

import typer

from planner.cli.console import print_json


class Format(StrEnum):
    """The file formats."""

    PROFILE = "profile"
    PLAN = "plan"
    CLUSTER = "cluster"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("schema")(schema)


def schema(format: Format = typer.Argument(help="Which file format.")) -> None:  # noqa: A002 - the user's word
    """Print the JSON Schema of profile, plan or cluster files."""
    from planner.cluster import Cluster
    from planner.files import schema_of
    from planner.plan.plan import Plan
    from planner.profile import Profile

    print_json(schema_of({Format.PROFILE: Profile, Format.PLAN: Plan, Format.CLUSTER: Cluster}[format]))
