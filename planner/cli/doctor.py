"""``pipeplan doctor``: is all here that planning and running needs, and does it work?"""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from planner.cli.console import err, print_json, say

if TYPE_CHECKING:
    from planner.doctor import Finding

_STYLES = {"ok": "", "warning": "yellow", "broken": "bold red"}


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("doctor")(doctor)


def doctor(
    as_json: bool = typer.Option(False, "--json", help="Print {ok, checks: [{name, state, fact, mend, figures}]}."),
) -> None:
    """Check this machine: Python, packages, solver, torch, backends, GPUs, processes, link, disk.

    It solves a small integer programme, starts two processes and measures the link between them, which takes some
    seconds. Each line says ok, warning or broken, with the mend.

    Exit code 4 where something is broken, as a run here would fail; else 0.
    """
    from planner.doctor import State, examine
    from planner.errors import RunError
    from planner.files import plain

    findings = []
    with err.status("asking") as status:
        for finding in examine():
            findings.append(finding)
            status.update(f"asking: {finding.name} is {finding.state.value}")
            if not as_json:
                _tell(finding)
    broken = [finding.name for finding in findings if finding.state is State.BROKEN]
    if as_json:
        print_json({"ok": not broken, "checks": [{"mend": ""} | plain(finding) for finding in findings]})
    if broken:
        raise RunError(
            f"{len(broken)} of {len(findings)} checks found something broken: {', '.join(broken)}",
            hint="mend it as their lines say" if not as_json else "mend it as `mend` says",
        )
    warnings = sum(finding.state is State.WARNING for finding in findings)
    if not as_json:
        said = f", {warnings} with a warning" if warnings else ""
        err.print(f"nothing is broken: {len(findings)} checks{said}", markup=False)


def _tell(finding: Finding) -> None:
    state = finding.state.value
    say(f"{state:8}{finding.name}: {finding.fact}", indent=8, style=_STYLES[state])
    if finding.mend:
        say(f"        {finding.mend}", indent=8)
