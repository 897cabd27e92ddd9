"""``pipeplan simulate``: what the time model says of a plan, under its own schedule or under others."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from planner.cli.console import err, out, print_json, remark, say, say_if_estimated
from planner.errors import InputError

if TYPE_CHECKING:
    from planner.plan import Plan
    from planner.plan.plan import Predicted
    from planner.profile import Profile
    from planner.report.bubble import Bubble
    from planner.schedules import Schedule, ScheduleName
    from planner.simulate import Job, Timeline


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("simulate")(simulate)


def simulate(
    plan: Path = typer.Argument(metavar="PLAN", help="The plan file.", show_default=False),
    schedule: str = typer.Option(
        None,
        "--schedule",
        metavar="A,B",
        help="Schedules to try instead of the plan's own: gpipe, 1f1b, zb-h1, zb-h2 (one stage a rank); "
        "interleaved-1f1b, looped-bfs, zb-h1 (more); zb-v, dualpipe-v, v-half, v-min (placement v); synthesised.",
        show_default=False,
    ),
    json: bool = typer.Option(False, "--json", help="Print what is predicted, and where the idle time comes from."),
) -> None:
    """Simulate one iteration of a plan: its time, its idle time by cause, its memory, its timeline.

    Stages, sends and returns count as they stand in the file. With several schedules they stand side by side. The
    plan's own schedule warms up as the plan says, another one as it does by default.
    """
    from planner.plan import read_plan
    from planner.plan.check import profile_of
    from planner.plan.job import job_of

    said = read_plan(plan)
    profile = profile_of(said, plan)
    try:
        job = job_of(said, profile)
        runs, left_out = _runs(said, job, _names(said, schedule))
    except InputError as error:
        raise InputError(f"{plan}: {error.message}", hint=error.hint) from error
    warn_if_stale(said, profile, plan)
    for text in left_out:
        remark(text)
    if json:
        say_if_estimated(said.profile.provenance, said.profile.device, to=err)
        documents = [_document(run) for run in runs]
        print_json(
            documents
            if len(runs) + len(left_out) > 1
            else {key: documents[0][key] for key in documents[0] if key != "name"}
        )
        return
    _tell_shape(said)
    if len(runs) > 1:
        _tell_side_by_side(runs, job)
    else:
        _tell_one(runs[0], job)
    _tell_warmups(said, [run.name for run in runs])
    say_if_estimated(said.profile.provenance, said.profile.device)


def warn_if_stale(said: Plan, profile: Profile, path: Path) -> str:
    """Say on stderr, and return, that the figures of a plan's stages are those of an earlier cut or profile."""
    from planner.plan.check import stale_stages

    text = ""
    try:
        if stale_stages(said, profile):
            text = f"figures of {path} are stale; pipeplan check {path} --write writes them anew"
    except InputError as error:
        text = str(error)
    if text:
        remark(text)
    return text


class _Run(NamedTuple):
    """One schedule of a plan, simulated."""

    name: ScheduleName
    timeline: Timeline
    predicted: Predicted
    bubble: Bubble


def _names(plan: Plan, asked: str | None) -> list[ScheduleName]:
    from planner.schedules import ScheduleName

    if asked is None:
        return [plan.schedule.name]
    words = list(dict.fromkeys(word.strip() for word in asked.split(",") if word.strip()))
    wrong = [word for word in words if word not in set(ScheduleName)]
    if wrong or not words:
        what = f"there is no schedule {', '.join(map(repr, wrong))}" if wrong else "--schedule names none"
        raise InputError(what, hint=f"there are {', '.join(ScheduleName)}")
    return [ScheduleName(word) for word in words]


def _runs(plan: Plan, job: Job, names: list[ScheduleName]) -> tuple[list[_Run], list[str]]:
    """The schedules that suit the plan, and why the others do not. Raises InputError where none does."""
    runs, left_out = [], []
    for name in names:
        try:
            runs.append(_run(plan, job, name))
        except InputError as error:
            if len(names) == 1:
                raise
            left_out.append(f"{name} is left out: {error.message}; {error.hint}")
    if not runs:
        raise InputError(f"none of these schedules suits the plan: {left_out[0]}", hint="name one that does")
    return runs, left_out


def _run(plan: Plan, job: Job, name: ScheduleName) -> _Run:
    from planner.plan.check import bound_that_holds
    from planner.plan.job import predicted_of
    from planner.report.bubble import bubble_of
    from planner.schedules import Wiring, check_schedule
    from planner.simulate import simulate as run

    schedule = _schedule(plan, job, name)
    found = check_schedule(schedule, num_microbatches=job.num_microbatches, wiring=Wiring.of(job.stages))
    if found.errors:
        more = f" (and {len(found.errors) - 1} more)" if len(found.errors) > 1 else ""
        raise InputError(f"{name}: {found.errors[0]}{more}", hint="correct its actions or its warmup")
    timeline = run(job, schedule)
    predicted = predicted_of(
        timeline, global_batch=plan.batch.global_batch, bound_s=bound_that_holds(plan, job.cluster)
    )
    return _Run(name, timeline, predicted, bubble_of(job, timeline))


def _schedule(plan: Plan, job: Job, name: ScheduleName) -> Schedule:
    """The plan's own schedule where that is asked for, else that schedule at its default warm-up."""
    from planner.plan.job import schedule_of
    from planner.schedules import ScheduleName, build
    from planner.simulate import Walk
    from planner.simulate.synthesise import synthesise

    if name is plan.schedule.name:
        return schedule_of(plan)
    if name is not ScheduleName.SYNTHESISED:
        return build(
            name,
            num_ranks=plan.parallel.pipeline,
            virtual=plan.parallel.virtual,
            num_microbatches=plan.batch.microbatches,
            placement=plan.schedule.placement,
        )
    made = synthesise(Walk(job))
    if made is None:
        raise InputError("no order of these stages fits the memory", hint="solve again, or recompute a stage")
    return made


def _document(run: _Run) -> dict[str, Any]:
    from planner.files import plain

    document: dict[str, Any] = {"name": run.name.value, "bound_s": None, "gap": None}
    document.update(plain(run.predicted), bubble=plain(run.bubble))
    return document


def _tell_shape(plan: Plan) -> None:
    sizes, batch = plan.parallel, plan.batch

    def count(number: int, word: str, plural: str = "s") -> str:
        return f"{number} {word}{'' if number == 1 else plural}"

    say(
        f"{plan.model.name}: {count(sizes.pipeline, 'rank')} of {count(sizes.virtual, 'stage')}, "
        f"{count(batch.microbatches, 'micro-batch', 'es')} of {batch.microbatch}, {count(sizes.data, 'replica')}, "
        f"placement {plan.schedule.placement.value}",
        indent=2,
    )


def _tell_one(run: _Run, job: Job) -> None:
    from planner.report.timeline import legend, timeline_text
    from planner.units import format_rate, format_seconds

    predicted, bubble = run.predicted, run.bubble
    gap = "" if predicted.gap is None else f", {100 * max(0.0, predicted.gap):.2f} % over the bound"
    say(
        f"{run.name.value}: {format_seconds(predicted.iteration_s)} an iteration, "
        f"{format_rate(predicted.samples_per_s)} samples/s{gap}",
        indent=2,
    )
    say(
        f"idle {100 * predicted.bubble_fraction:.1f} %: ends {format_seconds(bubble.skew_s)}, "
        f"imbalance {format_seconds(bubble.imbalance_s)}, links {format_seconds(bubble.links_s)}, "
        f"order {format_seconds(bubble.rest_s)}",
        indent=2,
    )
    say(f"peak memory {_peak(run, job)}", indent=2)
    out.print()
    for line in timeline_text(run.timeline, width=min(out.width, 120)):
        out.print(line, no_wrap=True, crop=True)
    say(legend(run.timeline), indent=2)


def _tell_warmups(plan: Plan, names: list[ScheduleName]) -> None:
    """How deep each rank warms up under every schedule that has such a depth: the plan's own, or the default."""
    from planner.schedules import default_warmup

    sizes = plan.parallel
    for name in names:
        default = default_warmup(
            name, num_ranks=sizes.pipeline, virtual=sizes.virtual, num_microbatches=plan.batch.microbatches
        )
        if default is None:
            continue
        own = plan.schedule.warmup if name is plan.schedule.name else None
        depths = default if own is None else own
        shown = ", ".join(map(str, depths[:8])) + (", ..." if len(depths) > 8 else "")
        say(
            f"warm-up of {name.value}: {shown} ({'its default' if depths == default else 'as the plan says'})", indent=2
        )


def _tell_side_by_side(runs: list[_Run], job: Job) -> None:
    from rich.table import Table

    from planner.units import format_seconds

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("schedule", no_wrap=True)
    for heading in ("iteration", "idle", "ends", "imbalance", "links", "order", "peak"):
        table.add_column(heading, justify="right", no_wrap=True)
    for run in sorted(runs, key=lambda run: run.predicted.iteration_s):
        bubble = run.bubble
        table.add_row(
            run.name.value,
            format_seconds(run.predicted.iteration_s),
            f"{100 * run.predicted.bubble_fraction:.1f} %",
            *(format_seconds(part) for part in (bubble.skew_s, bubble.imbalance_s, bubble.links_s, bubble.rest_s)),
            _peak(run, job, short=True),
        )
    out.print(table)
    say("ends: filling and draining; order: what another order of actions could save")


def _peak(run: _Run, job: Job, *, short: bool = False) -> str:
    """The largest peak, on which rank, and whether it fits."""
    from planner.cluster import memory_limit
    from planner.units import format_bytes

    limit = memory_limit(job.cluster)
    use = max(run.timeline.ranks, key=lambda use: use.peak_memory_bytes)
    peak = format_bytes(use.peak_memory_bytes)
    fits = limit is None or use.peak_memory_bytes <= limit
    if short:
        return peak if fits else f"{peak} !"
    if limit is None:
        return f"{peak} on rank {use.rank}"
    return f"{peak} on rank {use.rank}, of {format_bytes(limit)}{'' if fits else ': DOES NOT FIT'}"
