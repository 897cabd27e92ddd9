"""Why this plan: the best plans beside what people do by hand, and what decides the winner, in lines a person reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich import box
from rich.table import Table

from planner.cluster import memory_limit
from planner.schedules import ScheduleName
from planner.search import Candidate, Found
from planner.units import format_bytes, format_seconds


def plans_table(found: Found, *, most: int = 6) -> Table:
    """The best plan of each configuration, fastest first, then the baselines."""
    plans = [
        _row(found, "next best" if place else "best", candidate)
        for place, candidate in enumerate(found.alternatives[:most])
    ]
    by_hand: list[tuple[str, ...]] = []
    for baseline in found.baselines:
        if baseline.candidate is None:
            by_hand.append((baseline.name, "", "", "cannot be made", "", "", "", ""))
        else:
            *figures, memory = _row(found, baseline.name, baseline.candidate)
            by_hand.append((*figures, memory if baseline.fits else f"{memory} (!)"))
    headings = ("plan", _shape_heading(found), "b · M", "schedule", "iteration", "ratio", "bubble", "memory")
    return _table(headings, (plans, by_hand), words=("plan", "schedule"))


def _shape_heading(found: Found) -> str:
    """Only what was searched: P alone is the number of GPUs."""
    parts = ["P", *["D"] * (max(found.asked.data) > 1), *["v"] * (max(found.asked.virtual) > 1)]
    return " · ".join(parts) if len(parts) > 1 else "GPUs"


def _table(
    headings: tuple[str, ...], sections: Sequence[Sequence[tuple[str, ...]]], *, words: tuple[str, ...]
) -> Table:
    """A table without walls. Columns of ``words`` go on below where room is short; figures are never cut."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), collapse_padding=True, header_style="bold")
    for place, heading in enumerate(headings):
        width = max(len(row[place]) for section in (*sections, [headings]) for row in section)
        if heading in words:
            table.add_column(heading, justify="left", overflow="fold")
        else:
            table.add_column(heading, justify="right", no_wrap=True, min_width=width)
    for section in sections:
        table.add_section()
        for row in section:
            table.add_row(*row, style="bold" if row[0] == "best" else "")
    return table


def _row(found: Found, name: str, candidate: Candidate) -> tuple[str, ...]:
    shape = candidate.configuration
    sizes = {"P": shape.pipeline, "D": shape.data, "v": shape.virtual, "GPUs": shape.gpus}
    return (
        name,
        " · ".join(str(sizes[part]) for part in _shape_heading(found).split(" · ")),
        f"{shape.microbatch_size} · {shape.num_microbatches}",
        candidate.schedule.value,
        format_seconds(candidate.iteration_s),
        f"{candidate.iteration_s / found.best.iteration_s:.3f}" if found.best.iteration_s else "",
        f"{candidate.timeline.bubble_fraction:.1%}",
        format_bytes(candidate.peak_memory_bytes),
    )


def why(found: Found) -> Iterator[str]:
    """A few lines: how good it is, what is proven, what it is held up by, what it wins over."""
    best = found.best
    yield _headline(found)
    yield _proof(found)
    yield from _fewer_gpus(found)
    yield _bottleneck(best)
    yield from _against_baselines(found)


def _headline(found: Found) -> str:
    best, shape = found.best, found.best.configuration
    rate = found.asked.global_batch / best.iteration_s if best.iteration_s else 0.0
    depth = f", warm-up {' '.join(map(str, best.warmup))}" if best.warmup else ""
    copies = f"{shape.data} replicas of " if shape.data > 1 else ""
    each = f", {shape.virtual} a rank ({shape.placement.value})" if shape.virtual > 1 else ""
    return (
        f"{_counted(shape.gpus, 'GPU')}: {copies}{_counted(len(best.stages), 'stage')}{each}, "
        f"{_counted(shape.num_microbatches, 'micro-batch', 'es')} of {shape.microbatch_size}, {best.schedule.value}"
        f"{depth}: {format_seconds(best.iteration_s)} an iteration, {rate:.4g} samples/s"
    )


def _proof(found: Found) -> str:
    names = " or ".join(name.value for name in found.asked.schedules if name is not ScheduleName.SYNTHESISED)
    counted = f"{found.configurations} configurations: {found.solved} solved, {found.pruned} ruled out by their bound"
    if found.proven:
        said = f"no cut is faster under {names or 'any named schedule'} at any warm-up depth (proven)"
    elif found.interrupted:
        said = "the search was ended early: something faster may be left"
    else:
        said = "more cuts than could be looked at lie below it: something faster may be left"
    return f"{said}; no order of actions at all can win more than {found.gap:.2%} ({counted})"


def _fewer_gpus(found: Found) -> Iterator[str]:
    asked, used = found.asked.gpus, found.best.configuration.gpus
    if used == asked:
        return
    beside = next((one for one in found.alternatives if one.configuration.gpus > used), None)
    more = ""
    if beside is not None:
        more = f": the best plan found with {beside.configuration.gpus} takes {format_seconds(beside.iteration_s)}"
    yield f"use {used} of the {asked} GPUs; more would not be faster{more}"


def _bottleneck(best: Candidate) -> str:
    slowest = max(best.timeline.ranks, key=lambda use: use.busy_s)
    stage = next(stage for stage in best.stages if stage.rank == slowest.rank)
    share = slowest.busy_s / best.iteration_s if best.iteration_s else 0.0
    first, last = stage.layers[0], stage.layers[-1]
    named = first if first == last else f"{first} to {last}"
    return (
        f"the slowest stage is {stage.stage} ({named}), busy {share:.1%} of the iteration; "
        f"stages differ by {best.unevenness - 1:.1%} (largest over mean)"
    )


def _against_baselines(found: Found) -> Iterator[str]:
    limit = memory_limit(found.asked.cluster)
    for baseline in found.baselines:
        if baseline.candidate is None or not found.best.iteration_s:
            continue
        times = baseline.candidate.iteration_s / found.best.iteration_s
        if not baseline.fits and limit is not None:
            over = baseline.candidate.peak_memory_bytes - limit
            yield f"{baseline.name}: does not fit, {format_bytes(over)} too much on one GPU"
        elif times > 1 + 1e-9:
            yield f"{times:.3g} times as fast as {baseline.name}"
        else:
            yield f"as fast as {baseline.name}"


def _counted(count: int, word: str, plural: str = "s") -> str:
    return f"{count} {word}{'' if count == 1 else plural}"


def stages_table(candidate: Candidate) -> Table:
    """The cut: what each stage holds and costs; share is its load over the mean one."""
    loads = [stage.forward_s + stage.backward_input_s + stage.backward_weight_s for stage in candidate.stages]
    mean = sum(loads) / len(loads)
    rows = []
    for stage, load in zip(candidate.stages, loads, strict=True):
        names = stage.layers
        rows.append(
            (
                str(stage.stage),
                names[0] if len(names) == 1 else f"{names[0]}…{names[-1]} ({len(names)})",
                format_seconds(stage.forward_s),
                format_seconds(stage.backward_input_s + stage.backward_weight_s),
                f"{load / mean:.0%}" if mean else "",
                format_bytes(stage.parameter_bytes),
                format_bytes(sum(entry.bytes for entry in stage.sends)) if stage.sends else "",
                format_bytes(candidate.timeline.ranks[stage.rank].peak_memory_bytes),
            )
        )
    headings = ("k", "layers", "F", "B", "share", "params", "sends", "memory")
    return _table(headings, [rows], words=("layers",))
