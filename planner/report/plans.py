"""Plans side by side as tables that keep to 80 columns: words are folded, figures never cut."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from planner.search import Candidate, Found
from planner.units import format_bytes, format_seconds

_LETTERS = {"P": "pipeline ranks", "D": "replicas", "T": "tensor ranks", "v": "stages a rank"}
_DOT = "·"
_WIDTH, _LEAST = 80, 6
"""Of a table; of a column of words where figures leave no more."""
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
                span_of(stage.layers),
                format_seconds(stage.forward_s),
                format_seconds(stage.backward_input_s + stage.backward_weight_s),
                f"{load / mean:.0%}" if mean else "",
                format_bytes(stage.parameter_bytes),
                format_bytes(sum(entry.bytes for entry in stage.sends)) if stage.sends else "",
                format_bytes(candidate.timeline.ranks[stage.rank].peak_memory_bytes),
            )
        )
    headings = ("k", *(["r"] if several else []), "layers", "F", "B", "share", "params", "sends", "memory")
    return table(headings, [rows], words=("layers",))


def span_of(names: Sequence[str]) -> str:
    """A stage's layers in short: the only one, or the first, the last, and how many."""
    return names[0] if len(names) == 1 else f"{names[0]}…{names[-1]} ({len(names)})"


def table(headings: Sequence[str], sections: Sequence[Sequence[Sequence[str]]], *, words: Sequence[str]) -> Table:
    """A table without walls. Columns of ``words`` go on below where room is short; figures are never cut."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), collapse_padding=True, header_style="bold")
    columns = [[row[place] for section in (*sections, [headings]) for row in section] for place in range(len(headings))]
    figures = [max(map(len, cells)) for cells, heading in zip(columns, headings, strict=True) if heading not in words]
    room = _WIDTH - sum(figures) - 2 * len(headings)
    for cells, heading in zip(columns, headings, strict=True):
        if heading in words:  # between its words; names of layers anywhere, where they are long or room is short
            longest = max(len(word) for cell in cells for word in cell.split(" "))
            least = min(12, longest, max(_LEAST, room // len(words)))
            made.add_column(heading, justify="left", overflow="fold", min_width=least)
        else:
            made.add_column(heading, justify="right", no_wrap=True, min_width=max(map(len, cells)))
    for section in sections:
        made.add_section()
        for row in section:
            made.add_row(*map(Text, row), style="bold" if row[0] == "best" else "")  # names may look like markup
    return made


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
