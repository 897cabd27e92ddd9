"""``pipeplan show``: a plan or a profile to look at: in the terminal, as a page, as a trace."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from planner.cli.console import err, out, print_json
from planner.errors import InputError

if TYPE_CHECKING:
    from planner.profile import Profile
    from planner.report.overview import Overview
    from planner.runtime.recording import Recording

_WIDEST = 120


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("show")(show)


def show(
    path: Path = typer.Argument(metavar="PLAN|PROFILE", help="A plan or a profile.", show_default=False),
    microbatch: int | None = typer.Option(
        None, min=1, help="Micro-batch size to show a profile at (default: the smallest).", show_default=False
    ),
    html: Path | None = typer.Option(None, help="Write a page that stands alone.", show_default=False),
    svg: Path | None = typer.Option(None, help="Write the schedule as a picture.", show_default=False),
    trace: Path | None = typer.Option(
        None, help="Write a trace for ui.perfetto.dev (packed: name it .json.gz).", show_default=False
    ),
    measured: Path | None = typer.Option(
        None,
        help="What run --trace FILE measured, beside what is predicted: here, in the page, in the trace.",
        show_default=False,
    ),
    everything: bool = typer.Option(False, "--all", help="Every stage, rank or layer, however many."),
    json: bool = typer.Option(False, "--json", help="Print all figures as one JSON document."),
) -> None:
    """Show a plan (its stages, its schedule, its memory, what it loses and where) or a profile (its layers).

    With --measured, show a run of the plan beside it: iteration, idle time, each rank's busy time and peak memory, and
    the messages that ranks waited for, from the end of the action that made one to the start of the one that needs it.
    """
    _check_outputs(html=html, svg=svg, trace=trace)
    if _is_profile(path):
        if any(option is not None for option in (svg, trace, measured)):
            raise InputError(f"{path}: a profile has no schedule", hint="solve it, and show the plan")
        _show_profile(path, microbatch, html, everything=everything, json=json)
        return
    if microbatch is not None:
        raise InputError(f"{path}: is a plan, which has its micro-batch size", hint="--microbatch is for profiles")
    shown, notices = _overview(path)
    recording = None if measured is None else _recording(measured, shown)
    if html is not None:
        from planner.report.plan_page import plan_page

        _write(html, plan_page(shown, recording, notices))
    if svg is not None:
        from planner.report.svg import schedule_svg

        _write(svg, schedule_svg(shown))
    if trace is not None:
        from planner.report.trace import write_trace

        write_trace(trace, shown, recording)
        err.print(f"wrote {trace}: open it in ui.perfetto.dev", markup=False, soft_wrap=True)
    if json:
        from planner.report.document import plan_document

        print_json(plan_document(shown, recording))
        return
    if recording is not None:
        from planner.report.beside_summary import beside_summary

        _print(beside_summary(shown, recording, width=_width(), everything=everything))
        return
    from planner.report.summary import plan_summary

    _print(plan_summary(shown, width=_width(), everything=everything))


def _check_outputs(**outputs: Path | None) -> None:
    """Raises InputError where a file cannot be written, or another than one that show wrote would be overwritten."""
    from planner.files import check_replaceable, check_writable

    formats = {"html": "pipeplan-page", "svg": "pipeplan-picture", "trace": "pipeplan-trace"}
    for option, output in outputs.items():
        if output is not None:
            check_writable(output)
            check_replaceable(output, formats[option], option=f"--{option}")


def _is_profile(path: Path) -> bool:
    """Whether a file is a profile, as its ``format`` says. Raises InputError where it is neither that nor a plan."""
    from planner.files import read_text

    start = read_text(path)[:4096]
    for kind in ("profile", "plan"):
        if f"pipeplan-{kind}/" in start:
            return kind == "profile"
    raise InputError(f"{path}: is neither a plan nor a profile", hint="it must begin with its format: pipeplan-plan/1")


def _overview(path: Path) -> tuple[Overview, list[str]]:
    """A plan, simulated, and what is wrong with its figures, said on stderr too."""
    from planner.cli.simulate import warn_if_stale
    from planner.plan import read_plan
    from planner.plan.check import profile_of
    from planner.report.overview import overview_of

    plan = read_plan(path)
    profile = profile_of(plan, path)
    try:
        shown = overview_of(plan, profile)
    except InputError as error:
        raise InputError(f"{path}: {error.message}", hint=error.hint) from error
    remark = warn_if_stale(plan, profile, path)
    return shown, [remark] if remark else []


def _recording(path: Path, shown: Overview) -> Recording:
    """What was measured of this plan. Raises InputError where it is of another."""
    from planner.report.trace import read_recording
    from planner.runtime.recording import check_recording

    recording = read_recording(path)
    try:
        check_recording(recording, shown.plan, shown.timeline.schedule)
    except InputError as error:
        raise InputError(f"{path}: {error.message}", hint=error.hint) from None
    return recording


def _write(path: Path, text: str) -> None:
    from planner.files import write_atomically

    write_atomically(path, text)
    err.print(f"wrote {path}: open it in a browser", markup=False, soft_wrap=True)


def _show_profile(path: Path, microbatch: int | None, html: Path | None, *, everything: bool, json: bool) -> None:
    from planner.graph import LayerGraph
    from planner.profile import read_profile
    from planner.report.document import profile_document
    from planner.report.layers import layer_rows
    from planner.report.summary import profile_summary

    profile = read_profile(path)
    size = _microbatch_size(path, profile, microbatch)
    rows = layer_rows(LayerGraph.of(profile), microbatch_size=size)
    if html is not None:
        from planner.report.profile_page import profile_page

        _write(html, profile_page(profile, rows, microbatch_size=size))
    if json:
        print_json(profile_document(profile, rows, microbatch_size=size))
    else:
        _print(profile_summary(profile, rows, microbatch_size=size, width=_width(), everything=everything))


def _microbatch_size(path: Path, profile: Profile, asked: int | None) -> int:
    """The size asked for, or the smallest that every layer has. Raises InputError where there is none."""
    from planner.graph import LayerGraph

    sizes = sorted({size for size, tensor in LayerGraph.of(profile).rows() if tensor == 1})
    known = ", ".join(map(str, sizes)) or "none"
    if asked is not None and asked not in sizes:
        raise InputError(f"{path}: has no costs of all layers at micro-batch size {asked}", hint=f"there are {known}")
    if not sizes:
        raise InputError(f"{path}: its layers have no micro-batch size in common", hint="profile the model again")
    return asked or sizes[0]


def _width() -> int:
    return min(out.width, _WIDEST)


def _print(lines: Any) -> None:
    for line in lines:
        out.print(line, width=_width())
    if err.is_terminal and out.is_terminal:
        err.print("--html FILE makes a page of it, --trace FILE a trace for ui.perfetto.dev", style="dim")
