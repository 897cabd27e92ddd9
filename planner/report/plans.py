"""Plans side by side as tables that keep to 80 columns: figures are never cut."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from rich import box
from rich.table import Table
from rich.text import Text

from planner.report.summary import named, short_run
from planner.search import Candidate, Found
from planner.units import format_bytes, format_seconds

_LETTERS = {"P": "pipeline ranks", "D": "replicas", "T": "tensor ranks", "v": "stages a rank"}
_DOT = "·"
_WIDTH, _LEAST, _FEWEST = 80, 12, 6
"""Of a table; of a column of layers' names, and of one of words, where figures leave no more."""
_SHORTER = {"even by parameters": "even by params", "plain data parallel": "data parallel"}
"""What is done by hand, where room is short."""
_PLACES = ("best", "2nd", "3rd", *(f"{place}th" for place in range(4, 20)))


def plans_table(found: Found, *, most: int = 5) -> Table:
    """The best plan, the best of other shapes, what people do by hand."""
    plans = [
        _row(found, _PLACES[place], candidate) for place, candidate in enumerate((found.best, *others(found))[:most])
    ]
    by_hand: list[tuple[str, ...]] = []
    for baseline in found.baselines:
        if baseline.candidate is None:
            by_hand.append((baseline.name, "", "", "cannot be made", "", "", "", ""))
        else:
            *figures, memory = _row(found, baseline.name, baseline.candidate)
            by_hand.append((*figures, memory if baseline.fits else f"{memory} !"))
    headings = ("plan", _parts(found), f"b{_DOT}M", "schedule", "iteration", "ratio", "idle", "memory")
    if sum(_widths(headings, [*plans, *by_hand]).values()) + len(headings) + 1 > _WIDTH:
        by_hand = [(_SHORTER.get(name, name), *figures) for name, *figures in by_hand]
    return table(headings, (plans, by_hand), words=("plan", "schedule"))


def legend(found: Found) -> str:
    """What the columns mean."""
    letters = ", ".join(f"{letter} {_LETTERS[letter]}" for letter in _parts(found).split(_DOT))
    over = any(not baseline.fits for baseline in found.baselines if baseline.candidate is not None)
    return (
        f"{letters}; b samples a micro-batch, M micro-batches; ratio: to the best; idle: share of the ranks' time; "
        f"memory: of the fullest rank{' (!: does not fit)' if over else ''}"
    )


def others(found: Found) -> list[Candidate]:
    """The best of each other shape, fastest first; plans that people make by hand stand elsewhere."""
    best = found.best.configuration
    seen = {(best.pipeline, best.data, best.tensor, best.virtual)}
    made = []
    for candidate in found.alternatives:
        shape = candidate.configuration
        key = (shape.pipeline, shape.data, shape.tensor, shape.virtual)
        if key not in seen and shape.pipeline > 1:
            seen.add(key)
            made.append(candidate)
    return made


def candidates_table(found: Found, candidates: Iterable[Candidate], *, first: str) -> Table:
    """Any plans of a search, each with a word in front."""
    headings = (first, _parts(found), f"b{_DOT}M", "iteration", "ratio", "idle", "memory")
    rows = []
    for candidate in candidates:
        name = candidate.schedule.value + (", recompute" if any(stage.recompute for stage in candidate.stages) else "")
        _, shape, sizes, _, *figures = _row(found, "", candidate)
        rows.append((name, shape, sizes, *figures))
    return table(headings, [rows], words=(first,))


def stages_table(candidate: Candidate) -> Table:
    """The cut: what each stage holds and costs; share is its load over the mean one."""
    loads = [stage.forward_s + stage.backward_input_s + stage.backward_weight_s for stage in candidate.stages]
    mean = sum(loads) / len(loads)
    several = candidate.configuration.virtual > 1
    rows = []
    for stage, load in zip(candidate.stages, loads, strict=True):
        rows.append(
            (
                f"{stage.stage}{' R' if stage.recompute else ''}",
                *([str(stage.rank)] if several else []),
                named(stage.layers),
                format_seconds(stage.forward_s),
                format_seconds(stage.backward_input_s + stage.backward_weight_s),
                f"{load / mean:.0%}" if mean else "",
                format_bytes(stage.parameter_bytes),
                format_bytes(sum(entry.bytes for entry in stage.sends)) if stage.sends else "",
                format_bytes(candidate.timeline.ranks[stage.rank].peak_memory_bytes),
            )
        )
    headings = ("k", *(["r"] if several else []), "layers", "F", "B", "share", "params", "sends", "memory")
    return table(headings, [rows], layers="layers")


def table(
    headings: Sequence[str],
    sections: Sequence[Sequence[Sequence[str]]],
    *,
    words: Sequence[str] = (),
    layers: str = "",
) -> Table:
    """A table without walls, in which figures are never cut.

    Where room is short columns stand closer; then names in the column ``layers`` lose their middle, and columns of
    ``words`` go on below, between words while that is enough.
    """
    rows = [row for section in sections for row in section]
    widths = _widths(headings, rows)
    room = _WIDTH - sum(widths.values()) - len(headings) - 1  # one at each side and between
    gap = 2 if room >= len(headings) - 1 else 1
    longest = {name: max(len(word) for row in rows for word in row[headings.index(name)].split(" ")) for name in words}
    for name, least in ((layers, _LEAST), *longest.items(), *dict.fromkeys(words, _FEWEST).items()):
        if name in widths and room < 0:
            kept = max(min(least, widths[name]), widths[name] + room)
            room += widths[name] - kept
            widths[name] = kept
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, gap - 1), collapse_padding=True, header_style="bold")
    for name in headings:
        left = name in (layers, *words)
        justify: Literal["left", "right"] = "left" if left else "right"
        made.add_column(name, justify=justify, no_wrap=name not in words, overflow="fold", width=widths[name])
    for section in sections:
        made.add_section()
        for row in section:
            cells = (
                short_run(cell, widths[name]) if name == layers else cell
                for cell, name in zip(row, headings, strict=True)
            )
            made.add_row(*map(Text, cells), style="bold" if row[0] == "best" else "")  # names may look like markup
    return made


def _widths(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> dict[str, int]:
    """The width that each column asks for."""
    return {name: max(len(row[place]) for row in (*rows, headings)) for place, name in enumerate(headings)}


def _parts(found: Found) -> str:
    """The sizes that differ among what is shown: P alone is the number of GPUs."""
    shown = [found.best, *found.alternatives, *(one.candidate for one in found.baselines if one.candidate)]
    shapes = [candidate.configuration for candidate in shown]
    parts = ["P"]
    parts += ["D"] * any(shape.data > 1 for shape in shapes)
    parts += ["T"] * any(shape.tensor > 1 for shape in shapes)
    parts += ["v"] * any(shape.virtual > 1 for shape in shapes)
    return _DOT.join(parts)


def _row(found: Found, name: str, candidate: Candidate) -> tuple[str, ...]:
    shape = candidate.configuration
    sizes = {"P": shape.pipeline, "D": shape.data, "T": shape.tensor, "v": shape.virtual}
    return (
        name,
        _DOT.join(str(sizes[part]) for part in _parts(found).split(_DOT)),
        f"{shape.microbatch_size}{_DOT}{shape.num_microbatches}",
        candidate.schedule.value,
        format_seconds(candidate.iteration_s),
        f"{candidate.iteration_s / found.best.iteration_s:.3f}" if found.best.iteration_s else "",
        f"{candidate.timeline.bubble_fraction:.1%}",
        format_bytes(candidate.peak_memory_bytes),
    )
