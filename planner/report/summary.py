"""A plan or a profile on one screen of a terminal: 80 x 24, whatever its size, unless all of it is asked for.

What has more rows than there is room for is put together: stages and layers in runs, ranks picked evenly.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from io import StringIO
from typing import Final

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from planner.graph import LayerGraph, Stage
from planner.profile import Profile
from planner.report.layers import LayerRow, distinct_parameters, shape_of
from planner.report.overview import Overview
from planner.report.splits import split_lines
from planner.report.timeline import legend, timeline_text
from planner.units import format_bytes, format_rate, format_seconds

SCREEN: Final = 23
"""Lines of a terminal, less the prompt."""
_MOST_RANKS: Final = 8
_NOTHING: Final = 5e-5
"""A gap that is written 0.00 %: a smaller one leaves nothing to win, also to orders that no schedule names."""
_CONSOLE: Final = Console(file=StringIO())


def plan_summary(shown: Overview, *, width: int, everything: bool = False) -> Iterator[RenderableType]:
    """What a plan is, how good, its stages, its timeline."""
    stages, ranks = shown.plan.stages, shown.job.num_ranks
    head = [Text(line) for line in plan_lines(shown)]
    room = max(8, SCREEN - height(head, width) - 7)  # two gaps, headings, note, axis, legend of two lines
    if everything:
        room = ranks + len(stages)
    drawn = picked(ranks, ranks if everything else max(_MOST_RANKS, room - len(stages)) if room > 12 else room // 2)
    yield from head
    yield ""
    yield _stage_table(stages, most=room - len(drawn), width=width)
    yield ""
    lines = timeline_text(shown.timeline, width=width)
    yield from (lines[0], *(lines[1 + rank] for rank in drawn))
    left = f"; {len(drawn)} of {ranks} ranks (--all: all)" if len(drawn) < ranks else ""
    yield Text(legend(shown.timeline) + left)


def plan_lines(shown: Overview) -> Iterator[str]:
    """The plan in words: its shape, its speed, its idle time, its memory."""
    plan, predicted, bubble = shown.plan, shown.predicted, shown.bubble
    yield f"{plan.model.name}: {shape_words(shown)}"
    rate = f"{format_seconds(predicted.iteration_s)} an iteration, {format_rate(predicted.samples_per_s)} samples/s"
    yield f"{rate}; {bound_words(shown)}"
    yield (
        f"idle {percent(predicted.bubble_fraction)}: ends {format_seconds(bubble.skew_s)}, imbalance "
        f"{format_seconds(bubble.imbalance_s)}, links {format_seconds(bubble.links_s)}, order "
        f"{format_seconds(bubble.rest_s)}"
    )
    yield f"memory {memory_words(shown)}; {provenance_words(shown.profile)}"


def shape_words(shown: Overview) -> str:
    """GPUs, stages, replicas, micro-batches, schedule."""
    sizes, batch, schedule = shown.plan.parallel, shown.plan.batch, shown.plan.schedule
    words = [counted(sizes.gpus, "GPU"), counted(len(shown.plan.stages), "stage")]
    if sizes.virtual > 1:
        words[-1] += f" ({sizes.virtual} a rank, {schedule.placement.value})"
    if sizes.data > 1:
        words.append(counted(sizes.data, "replica") + (", ZeRO-1" if sizes.zero1 else ""))
    if sizes.tensor > 1:
        words.append(f"layers over {sizes.tensor} ranks" + (", tokens too" if sizes.sequence else ""))
    words.append(f"{counted(batch.microbatches, 'micro-batch', 'es')} of {batch.microbatch}")
    return ", ".join([*words, schedule.name.value])


def bound_words(shown: Overview) -> str:
    """How far from the bound, and whether it is proven to be the best."""
    gap = shown.predicted.gap
    if gap is None:
        return "no bound is known"
    over = f"{percent(max(0.0, gap), 2)} over the bound"
    best = "proven the best" if gap < _NOTHING else "no named schedule is faster"
    return f"{over}, {best}" if shown.proven else over


def memory_words(shown: Overview) -> str:
    """The largest peak, on which rank, against the limit."""
    use, limit = shown.timeline.ranks[shown.fullest], shown.limit_bytes
    said = f"{format_bytes(use.peak_memory_bytes)} on rank {use.rank}"
    if limit is None:
        return f"{said}, no limit known"
    return f"{said}, of {format_bytes(limit)}{'' if shown.fits else ': DOES NOT FIT'}"


def provenance_words(profile: Profile) -> str:
    """Where the layers' figures come from."""
    where = {"measured": "measured on ", "estimated": "ESTIMATED for ", "imported": ""}  # whose name says from where
    return f"{where[profile.provenance]}{short(profile.device.name, 30)}"


def _stage_table(stages: Sequence[Stage], *, most: int, width: int) -> Table:
    runs = list(_runs(stages, most))
    headings: Sequence[str] = ("stage", "rank", "layers", "F", "I", "W", "params", "saved", "sends")
    rows: list[Sequence[str]] = [
        (
            _span([stage.stage for stage in run]) + "R" * any(stage.recompute for stage in run),
            _span(sorted({stage.rank for stage in run})),
            named([name for stage in run for name in stage.layers]),
            format_seconds(max(stage.forward_s for stage in run)),
            format_seconds(max(stage.backward_input_s for stage in run)),
            format_seconds(max(stage.backward_weight_s for stage in run)),
            format_bytes(max(stage.parameter_bytes for stage in run)),
            format_bytes(max(stage.saved_bytes for stage in run)),
            format_bytes(max(sum(entry.bytes for entry in stage.sends) for stage in run)),
        )
        for run in runs
    ]
    notes = []
    if any(len(run) > 1 for run in runs):
        notes.append("largest of each run; --all: every stage")
    if any(stage.recompute for stage in stages):
        notes.append("R: recomputes")
    if all(stage.rank == stage.stage for stage in stages):
        headings = (headings[0], *headings[2:])
        rows = [(row[0], *row[2:]) for row in rows]
    return _table(headings, rows, width=width, caption="; ".join(notes))


def profile_summary(
    profile: Profile, rows: Sequence[LayerRow], *, microbatch_size: int, width: int, everything: bool = False
) -> Iterator[RenderableType]:
    """What a profile says, layer by layer, at one micro-batch size."""
    head = [Text(line) for line in profile_lines(profile, rows, microbatch_size=microbatch_size)]
    yield from head
    yield ""
    room = SCREEN - height(head, width) - 3  # a gap, headings, note
    runs = [[row] for row in rows] if everything or len(rows) <= room else list(_alike(rows, room))
    total = sum(row.load_s for row in rows)
    headings = ("layers", "kind", "F", "I", "W", "share", "params", "saved", "cut after")
    told = [
        (
            named([row.name for row in run]) + _marks(run),
            "+".join(dict.fromkeys(row.kind for row in run)),
            *(
                format_seconds(sum(getattr(row, part) for row in run))
                for part in ("forward_s", "backward_input_s", "backward_weight_s")
            ),
            percent(sum(row.load_s for row in run) / total, 0) if total else "",
            format_bytes(sum(row.parameter_bytes for row in run)),
            format_bytes(sum(row.saved_bytes for row in run)),
            format_bytes(run[-1].cut_bytes),
        )
        for run in runs
    ]
    notes = []
    if any(len(run) > 1 for run in runs):
        notes.append("sums over each run; --all: every layer")
    if any(row.whole_backward for row in rows):
        notes.append("*: its whole backward is in I")
    if any(max(row.tensor) > 1 for row in rows):
        notes.append("T: can be split over ranks")
    yield _table(headings, told, width=width, caption="; ".join(notes))
    yield from map(Text, split_lines(profile))


def profile_lines(profile: Profile, rows: Sequence[LayerRow], *, microbatch_size: int) -> Iterator[str]:
    """The profile in words."""
    graph = LayerGraph.of(profile)
    sizes = sorted({size for size, _ in graph.rows()})
    held = f"{format_bytes(distinct_parameters(graph))} of parameters"
    yield f"{profile.model.name}: {counted(len(rows), 'layer')}, {shape_of(graph)}, {held}, {profile.dtype}"
    yield f"{provenance_words(profile)} at micro-batch sizes {', '.join(map(str, sizes))}; below: {microbatch_size}"
    parts = [sum(getattr(row, part) for row in rows) for part in ("forward_s", "backward_input_s", "backward_weight_s")]
    seconds = ", ".join(f"{letter} {format_seconds(part)}" for letter, part in zip("FIW", parts, strict=True))
    whole = microbatch_size / sum(parts) if sum(parts) else 0.0
    saved = format_bytes(sum(row.saved_bytes for row in rows))
    yield f"all layers: {seconds}; {format_rate(whole)} samples/s; saved {saved}"
    yield f"{dearest_words(rows)}; {optimizer_words(profile)}"
    yield from (f"link: {words}" for words in link_words(profile))
    yield from accuracy_words(profile, microbatch_size)


def dearest_words(rows: Sequence[LayerRow]) -> str:
    """The largest layer, which limits how even a cut can be."""
    dearest = max(rows, key=lambda row: row.load_s)
    mean = sum(row.load_s for row in rows) / len(rows)
    times = f", {dearest.load_s / mean:.2g} times the mean" if mean else ""
    return f"largest layer: {short(dearest.name, 30)}{times}"


def optimizer_words(profile: Profile) -> str:
    """The optimizer, for each byte that is trained."""
    optimizer = profile.optimizer
    state, step = optimizer.state_bytes_per_trainable_byte, optimizer.step_s_per_trainable_byte * 2**20
    return f"{short(optimizer.name, 16)}: {state:.3g} B of state a byte, {format_seconds(step)} a MiB"


def link_words(profile: Profile) -> Iterator[str]:
    """The link that was measured, if one was."""
    links = profile.links
    if links is not None:
        speed = f"{format_seconds(links.latency_s)} and {format_bytes(links.bandwidth_bytes_per_s)}/s"
        yield f"{speed}, {'beside' if links.overlap else 'in place of'} compute"


def accuracy_words(profile: Profile, microbatch_size: int) -> Iterator[str]:
    """How well layers add up to stages, where that was measured."""
    for entry in profile.accuracy or ():
        if entry.microbatch_size == microbatch_size:
            most = percent(entry.largest_error, signed=True)
            yield f"layers add up to runs of them within {percent(entry.median_error)}, at most {most}"


def counted(count: int, word: str, plural: str = "s") -> str:
    """E.g. ``1 stage``, ``4 stages``."""
    return f"{count} {word}{'' if count == 1 else plural}"


def percent(share: float, digits: int = 1, *, signed: bool = False) -> str:
    """E.g. ``12.3 %``."""
    return f"{100 * share:{'+' if signed else ''}.{digits}f} %"


def short(text: str, most: int) -> str:
    """A text with its middle left out where it is longer; what cannot be printed is spelt out."""
    text = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)
    if len(text) <= most:
        return text
    tail = max(0, (most - 1) // 2)
    return f"{text[: most - 1 - tail]}…{text[len(text) - tail :]}"


def height(lines: Sequence[Text], width: int) -> int:
    """How many lines they take where they are folded."""
    return sum(len(line.wrap(_CONSOLE, width)) for line in lines)


def short_run(text: str, most: int) -> str:
    """A run's name shortened, but for its count and its numbers, which tell layers apart: ``e.l.3.a.query``.

    The words in front give way to their first letters, from the left; only then the middle is left out.
    """
    name, space, count = text.rpartition(" (")
    name, rest = (name, space + count) if name else (text, "")
    parts = name.split(".")
    for place, part in enumerate(parts[:-1]):
        if len(".".join(parts)) + len(rest) <= most:
            break
        if part and not part.isdigit():
            parts[place] = part[0]
    return short(".".join(parts), max(1, most - len(rest))) + rest


def _marks(run: Sequence[LayerRow]) -> str:
    whole = any(row.whole_backward for row in run)
    return " *" * whole + " T" * any(max(row.tensor) > 1 for row in run)


def named(names: Sequence[str], *, joint: str = "..") -> str:
    """E.g. ``blocks.0..5 (6)``: what the first and the last share is said once."""
    first, last = names[0], names[-1]
    if len(names) == 1:
        return first
    shared = first.rpartition(".")[0]
    if shared and last.startswith(f"{shared}."):
        last = last[len(shared) + 1 :]
    return f"{first}{joint}{last} ({len(names)})"


def _span(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return str(numbers[0])
    if list(numbers) == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]}-{numbers[-1]}"
    return ",".join(map(str, numbers)) if len(numbers) <= 2 else f"{min(numbers)}..{max(numbers)}"


def picked(count: int, most: int) -> list[int]:
    """At most so many of 0..count-1, first and last among them, evenly."""
    most = max(2, most)
    if count <= most:
        return list(range(count))
    return sorted({round(place * (count - 1) / (most - 1)) for place in range(most)})


def _runs(stages: Sequence[Stage], most: int) -> Iterator[Sequence[Stage]]:
    """Stages in at most so many runs of equal length."""
    length = -(-len(stages) // max(1, most))
    for start in range(0, len(stages), length):
        yield stages[start : start + length]


def _alike(rows: Sequence[LayerRow], most: int) -> Iterator[Sequence[LayerRow]]:
    """Layers in at most so many runs: of one kind and near times, else of equal shares of the time."""
    for tolerance in (0.02, 0.05, 0.1, 0.25, 0.5, float("inf")):
        runs: list[list[LayerRow]] = []
        for row in rows:
            if runs and _like(runs[-1][0], row, tolerance):
                runs[-1].append(row)
            else:
                runs.append([row])
        if len(runs) <= most:
            yield from runs
            return
    total, before, made, run = sum(row.load_s for row in rows) or 1.0, 0.0, 0, list[LayerRow]()
    for index, row in enumerate(rows):
        run.append(row)
        before += row.load_s
        if made < most - 1 and (before >= (made + 1) * total / most or len(rows) - index - 1 < most - made):
            yield run
            run, made = [], made + 1
    if run:
        yield run


def _like(one: LayerRow, other: LayerRow, tolerance: float) -> bool:
    same = (one.kind, one.tensor, one.whole_backward) == (other.kind, other.tensor, other.whole_backward)
    return same and abs(one.load_s - other.load_s) <= tolerance * max(one.load_s, other.load_s)


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]], *, width: int, caption: str) -> Table:
    """A table without walls in which words give way, and figures never.

    The kind gives way to the layers' names, at last altogether.
    """
    rows = list(rows)
    widths = {name: max(len(row[place]) for row in (*rows, headings)) for place, name in enumerate(headings)}
    words = {name: least for name, least in (("layers", 12), ("kind", 6)) if name in headings}
    room = width - sum(widths[name] for name in headings if name not in words) - len(headings) + 1
    if "kind" in words and room < widths["layers"] + words["kind"]:
        kept = [place for place, name in enumerate(headings) if name != "kind"]
        headings, rows = [headings[place] for place in kept], [[row[place] for place in kept] for row in rows]
        del words["kind"]
        room += 1
    for name in reversed(words):
        others = min(words["layers"], widths["layers"]) if name == "kind" else 0
        widths[name] = max(words[name], min(widths[name], room - others))
        room -= widths[name]
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold", caption=caption or None)
    table.caption_justify = "left"
    for name in headings:
        table.add_column(name, justify="left" if name in ("stage", *words) else "right", no_wrap=True)
    for row in rows:
        cells = (
            short_run(cell, widths[name]) if name in words else cell for name, cell in zip(headings, row, strict=True)
        )
        table.add_row(*map(Text, cells))
    return table
