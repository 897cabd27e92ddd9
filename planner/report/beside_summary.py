"""A run beside its plan on one screen of a terminal: 80 x 24, whatever the number of ranks, unless all is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from planner.report.beside import Beside, Pair, RankBeside, beside
from planner.report.overview import Overview
from planner.report.summary import SCREEN, counted, height, percent, provenance_words, shape_words
from planner.report.timeline import axis_text, legend, row_text
from planner.runtime.recording import Recording
from planner.units import format_bytes, format_seconds

_LEAST_RANKS = 2


def beside_summary(
    shown: Overview, recording: Recording, *, width: int, everything: bool = False
) -> Iterator[RenderableType]:
    """The iteration, the idle time, the messages; each rank's busy time, peak and messages; both timelines."""
    told = beside(shown, recording)
    head = [Text(line) for line in _lines(shown, told)]
    room = SCREEN - height(head, width) - 6  # two gaps, headings of two lines, axis, legend
    most = len(told.ranks) if everything else max(_LEAST_RANKS, room // 3)
    picked = _furthest_off(told.ranks, most)
    room -= 3 * len(picked)
    yield from head
    yield from _differences(told.differences, room if not everything else 1_000, width)
    yield ""
    yield _ranks_table([told.ranks[rank] for rank in picked])
    yield ""
    yield from _pictures(shown, recording, picked, width)
    left = f"; the {len(picked)} ranks furthest off, of {len(told.ranks)} (--all: all)"
    yield Text(legend(shown.timeline) + (left if len(picked) < len(told.ranks) else ""))


def _lines(shown: Overview, told: Beside) -> Iterator[str]:
    yield f"{shown.plan.model.name}: {shape_words(shown)}"
    steps = "one step" if told.steps == 1 else f"medians of {counted(told.steps, 'step')}"
    yield f"iteration {_words(told.iteration_s, format_seconds)}; {steps}"
    idle = told.bubble_fraction
    yield f"idle {percent(idle.predicted)} predicted, {percent(idle.measured)} measured"
    if told.message_s is not None:
        waited = sum(rank.waited for rank in told.ranks)
        were = "one was" if waited == 1 else f"{waited} were"
        yield f"a message {_words(told.message_s, format_seconds)}; {were} waited for"
    limit = "no limit known" if shown.limit_bytes is None else f"limit {format_bytes(shown.limit_bytes)} a rank"
    yield f"memory: {limit}; layers {provenance_words(shown.profile)}"


def _words(pair: Pair, show: Callable[[float], str]) -> str:
    off = "" if pair.off is None else f" ({percent(pair.off, signed=True)})"
    return f"{show(pair.predicted)} predicted, {show(pair.measured)} measured{off}"


def _differences(said: Sequence[str], room: int, width: int) -> Iterator[Text]:
    """As many as there is room for, the last ones first: what is not the stages' own is told at the end."""
    kept: list[Text] = []
    for text in reversed(said):
        line = Text(text)
        room -= height([line], width)
        if room < 0:
            break
        kept.insert(0, line)
    yield from kept


def _furthest_off(ranks: Sequence[RankBeside], most: int) -> list[int]:
    """The ranks whose busy time, then whose peak, is furthest from its prediction; in their order."""

    def off(rank: RankBeside) -> tuple[float, float, int]:
        return -abs(rank.busy_s.off or 0.0), -abs(rank.peak_memory_bytes.off or 0.0), rank.rank

    return sorted(rank.rank for rank in sorted(ranks, key=off)[:most])


def _ranks_table(ranks: Sequence[RankBeside]) -> Table:
    """Three pairs of columns; each with how far off, but messages, which are short and vary."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("rank", justify="right", no_wrap=True)
    messages = ("message", "measured") if any(rank.message_s for rank in ranks) else ()
    for heading in ("busy", "measured", "off", "peak", "measured", "off", *messages):
        table.add_column(heading, justify="right", no_wrap=True)
    for rank in ranks:
        row: list[Any] = [str(rank.rank), *_cells(rank.busy_s, format_seconds)]
        row += _cells(rank.peak_memory_bytes, format_bytes)
        row += ["", ""] if rank.message_s is None else _cells(rank.message_s, format_seconds)[:2]
        table.add_row(*row[: len(table.columns)])
    return table


def _cells(pair: Pair, show: Callable[[float], str]) -> list[str]:
    off = "" if pair.off is None else percent(pair.off, signed=True)
    return [show(pair.predicted), show(pair.measured), off]


def _pictures(shown: Overview, recording: Recording, picked: Sequence[int], width: int) -> Iterator[Text]:
    """Each rank twice, as predicted and as measured, to one scale."""
    timeline = shown.timeline
    whole_s = max([timeline.makespan_s, *(end for rank in recording.ranks for end in rank.ends_s)])
    indent = max(len(f"rank {rank} predicted ") for rank in picked)
    cells = max(10, width - indent)
    yield axis_text(whole_s, indent=indent, cells=cells)
    for rank in picked:
        own, order = recording.ranks[rank], timeline.schedule[rank]
        for name, starts, ends in (
            (f"rank {rank} predicted ", timeline.starts_s[rank], timeline.ends_s[rank]),
            ("measured ", own.starts_s, own.ends_s),
        ):
            yield Text(f"{name:>{indent}}") + row_text(order, starts, ends, whole_s=whole_s, cells=cells)
