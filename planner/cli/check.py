"""``pipeplan check``: does an edited plan keep the rules, does it fit, and are its figures fresh?"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import typer

from planner.cli.console import err, out, print_json, remark, say, say_if_estimated
from planner.errors import InputError, NothingFitsError, PipeplanError

if TYPE_CHECKING:
    from planner.plan import Plan
    from planner.plan.check import PlanCheck

RENDEZVOUS: Final = "would block if sends waited"
"""In every remark on actions that other runtimes than ours could get stuck at: not for those who only plan and run."""
_RANKS_SHOWN: Final = 8


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("check")(check)


def check(
    plan: Path = typer.Argument(metavar="PLAN", help="The plan file.", show_default=False),
    write: bool = typer.Option(False, "--write", help="Write stale figures anew (comments in the file are lost then)."),
    explain: bool = typer.Option(False, "--explain", help="Say which actions would block if sends waited, too."),
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
        _tell(plan, said, found, write=write, explain=explain)
    say_if_estimated(said.profile.provenance, said.profile.device, to=err if json else out)


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


def _tell(path: Path, said: Plan, found: PlanCheck, *, write: bool, explain: bool) -> None:
    if not found.stale:
        say(f"{path}: keeps all rules, fits, and its figures follow from the profile", indent=2)
    else:
        word = "its figures are fresh now" if write else "but figures are stale; --write writes them anew"
        say(f"{path}: keeps all rules and fits, {word}", indent=2)
        for figures in found.stale:
            say(f"{'written anew' if write else 'stale'}: {figures}", indent=7)
    _tell_figures(said, found.fresh)
    for text in found.remarks:
        if explain or RENDEZVOUS not in text:
            remark(text)


def _tell_figures(said: Plan, fresh: Plan) -> None:
    """What the edit makes of time, bound and memory."""
    from planner.cluster import memory_limit
    from planner.units import format_bytes, format_seconds

    old, new = said.predicted, fresh.predicted
    assert new is not None, "a plan that was checked is predicted"
    now = format_seconds(new.iteration_s)
    if old is None or math.isclose(old.iteration_s, new.iteration_s, rel_tol=1e-9):
        say(f"iteration: {now}, idle {100 * new.bubble_fraction:.1f} %")
    else:
        change = f" ({100 * (new.iteration_s / old.iteration_s - 1):+.1f} %)" if old.iteration_s else ""
        say(f"iteration: {format_seconds(old.iteration_s)} -> {now}{change}, idle {100 * new.bubble_fraction:.1f} %")
    if new.bound_s is not None and new.gap is not None:
        proven = "no named schedule is faster" if fresh.search and fresh.search.proven else "another plan may be faster"
        say(f"bound: {format_seconds(new.bound_s)}, {100 * new.gap:.2f} % over it; {proven}")
    elif old is not None and old.bound_s is not None:
        say("bound: none, as it was proven for another batch, cluster or profile; solve again for one")
    limit = memory_limit(fresh.cluster)
    peaks = sorted(new.ranks, key=lambda rank: -rank.peak_memory_bytes)[:_RANKS_SHOWN]
    shown = ", ".join(
        f"rank {rank.rank} {format_bytes(rank.peak_memory_bytes)}" for rank in sorted(peaks, key=lambda one: one.rank)
    )
    more = f" (the largest of {len(new.ranks)})" if len(new.ranks) > _RANKS_SHOWN else ""
    say(f"memory: {shown}{more}" + (f", of {format_bytes(limit)} a rank" if limit is not None else ""), indent=8)
