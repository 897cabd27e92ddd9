"""``pipeplan solve``: the best plan for so many GPUs, and the proof."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from planner.cli.console import err, if_estimated, out, print_json, say_if_estimated
from planner.errors import InputError

if TYPE_CHECKING:
    from planner.graph import LayerGraph
    from planner.plan import Plan
    from planner.schedules import ScheduleName
    from planner.search import Asked, Found, Progress


_SELDOM_S = 0.1
"""The line of progress is written no more often."""


class Recompute(StrEnum):
    """Which stages run their forward again for the backward."""

    AUTO = "auto"
    NONE = "none"
    ALL = "all"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("solve")(solve)


def solve(
    profile: Path | None = typer.Argument(None, help="The profile (default: the newest in profiles/)."),
    gpus: int = typer.Option(..., min=1, help="GPUs (processes, where there is none) at most."),
    batch: int | None = typer.Option(None, min=1, help="Samples per optimizer step (default: the profile's)."),
    memory: str | None = typer.Option(
        None, help="Memory of each GPU, e.g. 80GiB or h100-sxm (default: the profiled device's)."
    ),
    cluster: Path | None = typer.Option(None, help="A cluster file: nodes, links, memory."),
    output: Path = typer.Option(Path("plan.yaml"), "-o", "--output", help="Where the plan is written."),
    explain: bool = typer.Option(False, "--explain", help="Show the cut, where its time goes, what else was near."),
    effort: int = typer.Option(1, min=1, help="Look at so many times as many plans: where the best is not proven."),
    max_seconds: float | None = typer.Option(None, min=0.0, help="Take the best plan found by then."),
    schedule: str | None = typer.Option(None, help="Schedules to choose from, e.g. 1f1b,zb-h1 (default: all)."),
    pipeline: str | None = typer.Option(None, help="Pipeline sizes to choose from, e.g. 2,4."),
    virtual: str | None = typer.Option(None, help="Stages a rank to choose from, e.g. 1,2 (default: 1 to 4)."),
    data: str | None = typer.Option(None, help="Numbers of replicas to choose from, e.g. 1,2,4 (default: all)."),
    tensor: str | None = typer.Option(None, help="Tensor ranks a stage to choose from (default: all profiled)."),
    microbatch: str | None = typer.Option(None, help="Micro-batch sizes to choose from, e.g. 1,2."),
    zero1: bool = typer.Option(
        False, "--zero1", help="Spread the optimizer's state over the replicas (with --data D)."
    ),
    recompute: Recompute = typer.Option(Recompute.AUTO, help="Which stages recompute: as it helps, none, all."),
    as_json: bool = typer.Option(False, "--json", help="Print the plan, alternatives and baselines as JSON."),
) -> None:
    """Find the fastest plan there is for a profiled model, and prove how close to the best it is.

    Exit code 3 where nothing fits, with what is missing and the smallest change that would do.
    """
    from planner.cluster import parse_memory, read_cluster, resolve
    from planner.files import check_replaceable, check_writable, plain
    from planner.graph import LayerGraph
    from planner.plan import write_plan
    from planner.plan.build import plan_of
    from planner.profile import read_profile
    from planner.search import Asked
    from planner.search.shortfall import NoPlanFitsError
    from planner.search.space import tensor_left_out

    notes: list[str] = []
    path = profile or _newest(notes)
    check_replaceable(output, "pipeplan-plan")
    check_writable(output)
    read = read_profile(path)
    graph = LayerGraph.of(read)
    asked = Asked(
        gpus=gpus,
        global_batch=batch or read.global_batch or _default_batch(graph, gpus, notes),
        cluster=resolve(
            read_cluster(cluster) if cluster is not None else None,
            read,
            parse_memory(memory) if memory is not None else None,
        ),
        schedules=_schedules(schedule),
        pipeline=_sizes("--pipeline", pipeline),
        virtual=_sizes("--virtual", virtual),
        data=_sizes("--data", data),
        tensor=_sizes("--tensor", tensor),
        microbatch=_sizes("--microbatch", microbatch),
        recompute=recompute.value,
        zero1=zero1,
        effort=effort,
        max_seconds=max_seconds,
    )
    try:
        found = _search(graph, asked, every_tensor_size=explain)
    except KeyboardInterrupt:
        err.print("ended before any plan was found: nothing is written", markup=False, soft_wrap=True)
        raise
    except NoPlanFitsError as error:
        if as_json:
            missing = [plain(entry) for entry in error.missing]
            early = {"ended_early": True} if error.ended_early else {}
            change = {"missing": missing, "smallest_change": error.smallest_change}
            print_json(change | early | _estimated(graph))
        raise
    if asked.cluster.links is None or asked.cluster.links.intra_node is None:
        notes.append("remark: no links are known, so messages cost nothing here; --cluster names them")
    if asked.cluster.memory_bytes is None:
        notes.append("remark: no memory is known, so all fits here; --memory or --cluster names it")
    notes += [
        f"remark: tensor size {size} is left out: {fault}" for size, (fault, _) in tensor_left_out(graph, asked).items()
    ]
    for note in notes:
        err.print(note, markup=False, soft_wrap=True)
    plan = plan_of(found, profile_path=path, plan_path=output)
    write_plan(plan, output)
    if as_json:
        print_json(_document(plan, found))
    else:
        _tell(found, explain)
        say_if_estimated(plan.profile.provenance, plan.profile.device)
    following = "simulate" if plan.profile.provenance == "imported" else "run"  # an imported profile has no model file
    err.print(f"wrote {output}; next: pipeplan {following} {output}", markup=False, soft_wrap=True)
    if found.interrupted and max_seconds is None:
        raise KeyboardInterrupt


def _newest(notes: list[str]) -> Path:
    """The newest file in profiles/, and a note that says so."""
    files = sorted(Path("profiles").glob("*.json"), key=lambda file: (file.stat().st_mtime, file.name))
    if not files:
        raise InputError("profiles/: holds no profile", hint="make one with: pipeplan profile model.py")
    notes.append(f"profile: {files[-1]} (the newest in profiles/)")
    return files[-1]


def _default_batch(graph: LayerGraph, gpus: int, notes: list[str]) -> int:
    from planner.search.space import largest_batch

    size = largest_batch(graph, gpus)
    notes.append(f"global batch: {size} samples (8 · {gpus} GPUs · the largest measured size; --batch sets it)")
    return size


def _schedules(text: str | None) -> tuple[ScheduleName, ...]:
    from planner.search import EVERY

    if text is None:
        return EVERY
    known = {name.value: name for name in EVERY}
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if word not in known:
            raise InputError(f"--schedule: {word!r} is no schedule", hint=f"choose from {', '.join(known)}")
    return tuple(name for word, name in known.items() if word in words)


def _sizes(option: str, text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        sizes = tuple(sorted({int(word) for word in text.split(",")}))
    except ValueError:
        sizes = ()
    if not sizes or sizes[0] < 1:
        raise InputError(f"{option}: {text!r} is no list of sizes", hint="write whole numbers from 1 on, e.g. 2,4")
    return sizes


def _search(graph: LayerGraph, asked: Asked, *, every_tensor_size: bool) -> Found:
    """The search, with a line of progress on terminals; then of each tensor size it ruled out, if they are told."""
    import time

    from planner.search import solve as search
    from planner.search.each_tensor import with_each_tensor_size
    from planner.units import format_seconds

    with err.status("searching") as status:
        told_s = 0.0

        def watch(progress: Progress) -> None:
            nonlocal told_s
            if time.monotonic() - told_s < _SELDOM_S:  # it is called at every step, and counting takes a moment
                return
            told_s = time.monotonic()
            best = format_seconds(progress.best_s) if progress.best_s < float("inf") else "none yet"
            status.update(
                f"{progress.phase}: {progress.solved} solved, {progress.pruned} ruled out of "
                f"{progress.configurations}; best {best}, next bound {format_seconds(progress.bound_s)}"
            )

        seen = watch if err.is_terminal else None
        found = search(graph.profile, asked, seen)
        return with_each_tensor_size(found, graph.profile, seen) if every_tensor_size else found


def _tell(found: Found, explain: bool) -> None:
    from planner.report.explain import told

    for part in told(found, explain=explain):
        out.print(part)


def _document(plan: Plan, found: Found) -> dict[str, Any]:
    """The plan, with the best of every other configuration and the baselines."""
    from planner.files import plain
    from planner.plan.build import name_of

    others = [
        {"name": name_of(one), "iteration_s": one.iteration_s, "fits": True}
        for one in found.alternatives
        if one is not found.best
    ]
    by_hand = [
        {
            "name": one.name,
            "iteration_s": one.candidate.iteration_s if one.candidate else None,
            "fits": one.fits,
        }
        for one in found.baselines
    ]
    document: dict[str, Any] = plain(plan)
    return document | {"alternatives": others, "baselines": by_hand} | _estimated(found.graph)


def _estimated(graph: LayerGraph) -> dict[str, str]:
    """What a document says where it rests on estimates."""
    words = if_estimated(graph.profile.provenance, graph.profile.device.name)
    return {"estimated": words} if words is not None else {}
