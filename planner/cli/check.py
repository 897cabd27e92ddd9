"""``pipeplan check``: does an edited plan keep the rules, does it fit, and are its figures fresh?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from planner.cli.console import err, out, print_json
from planner.errors import InputError, NothingFitsError, PipeplanError

if TYPE_CHECKING:
    from planner.plan import Plan
    from planner.plan.check import PlanCheck


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("check")(check)


def check(
    plan: Path = typer.Argument(metavar="PLAN", help="The plan file.", show_default=False),
    write: bool = typer.Option(False, "--write", help="Write stale figures anew (comments in the file are lost then)."),
    json: bool = typer.Option(False, "--json", help="Print {ok, stale, errors, remarks}."),
) -> None:
    """Check a plan that was edited: its rules, its memory, its figures.

    Exit code 2 where a rule is broken, 3 where a rank does not fit, else 0, also where figures that follow from the
    profile are stale.
    """
    from planner.plan import write_plan

    report: dict[str, Any] = {"ok": True, "stale": [], "errors": [], "remarks": []}
    try:
        said, found = _found(plan)
        report |= {"stale": list(found.stale), "errors": [*found.errors, *found.overflows]}
        report["remarks"] = list(found.remarks)
        _raise_faults(plan, found)
        if write and found.fresh != said:
            write_plan(found.fresh, plan)
    except PipeplanError as error:
        report |= {"ok": False, "errors": report["errors"] or [str(error)]}
        raise
    finally:
        if json:
            print_json(report)
    if not json:
        _tell(plan, found, write)


def _found(path: Path) -> tuple[Plan, PlanCheck]:
    from planner.plan import read_plan
    from planner.plan.check import check_plan, profile_of

    plan = read_plan(path)
    profile = profile_of(plan, path)
    try:
        return plan, check_plan(plan, profile)
    except InputError as error:
        raise InputError(f"{path}: {error.message}", hint=error.hint) from error


def _raise_faults(path: Path, found: PlanCheck) -> None:
    if found.errors:
        raise InputError(f"{path}: {found.errors[0]}{_more(found.errors)}", hint="correct its actions or its schedule")
    if found.overflows:
        raise NothingFitsError(
            f"{path}: {found.overflows[0]}{_more(found.overflows)}",
            hint="recompute a stage, move layers away, take a smaller microbatch, or solve again",
        )


def _more(faults: tuple[str, ...]) -> str:
    return f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""


def _tell(path: Path, found: PlanCheck, write: bool) -> None:
    for remark in found.remarks:
        err.print(f"remark: {remark}", markup=False, soft_wrap=True)
    if not found.stale:
        out.print(
            f"{path}: keeps all rules, fits, and its figures follow from the profile", markup=False, soft_wrap=True
        )
        return
    for figures in found.stale:
        out.print(f"{'written anew' if write else 'stale'}: {figures}", markup=False, soft_wrap=True)
    word = "its figures are fresh now" if write else "but figures are stale; --write writes them anew"
    out.print(f"{path}: keeps all rules and fits, {word}", markup=False, soft_wrap=True)
