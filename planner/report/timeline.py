"""A simulated iteration as text: one line a rank, time from left to right, readable at 80 columns without colour.

    rank 0 F0F1F2F3·········B0──F4B1──  97 %  1.5 GiB

An action begins with its letter and micro-batch where there is room for them, and is filled up with a line; idle time
is dots. Stages above a rank's lowest have small letters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich.text import Text

from planner.schedules import Letter, Order
from planner.simulate import Timeline
from planner.units import format_bytes, format_seconds

_STYLES: Final = {
    Letter.FORWARD: "black on green",
    Letter.BACKWARD: "white on blue",
    Letter.BACKWARD_INPUT: "black on cyan",
    Letter.BACKWARD_WEIGHT: "black on yellow",
}
_IDLE: Final = "·"
_LINE: Final = "─"


def timeline_text(timeline: Timeline, *, width: int = 80) -> list[Text]:
    """The lines of the picture: an axis, then every rank with its busy share and its peak memory."""
    names = [f"rank {rank} " for rank in range(len(timeline.schedule))]
    ends = [
        f" {100 * use.busy_s / timeline.makespan_s if timeline.makespan_s else 0:3.0f} %"
        + (f" {format_bytes(use.peak_memory_bytes):>8}" if timeline.memory else "")
        for use in timeline.ranks
    ]
    indent = max(map(len, names))
    cells = max(10, width - indent - max(map(len, ends)))
    lines = [axis_text(timeline.makespan_s, indent=indent, cells=cells)]
    for name, end, order, starts, stops in zip(
        names, ends, timeline.schedule, timeline.starts_s, timeline.ends_s, strict=True
    ):
        row = row_text(order, starts, stops, whole_s=timeline.makespan_s, cells=cells)
        lines.append(Text(f"{name:<{indent}}") + row + Text(end))
    return lines


def legend(timeline: Timeline) -> str:
    """What the letters of this picture mean."""
    words = {
        Letter.FORWARD: "F forward",
        Letter.BACKWARD: "B backward",
        Letter.BACKWARD_INPUT: "I backward for the input",
        Letter.BACKWARD_WEIGHT: "W for the weights",
    }
    used = {action.letter for order in timeline.schedule for action in order}
    said = [words[letter] for letter in Letter if letter in used] + [f"{_IDLE} idle"]
    if len({action.stage for action in timeline.schedule[0]}) > 1:
        said.append("small letters: a rank's upper stages")
    return ", ".join(said)


def axis_text(whole_s: float, *, indent: int, cells: int) -> Text:
    """Its start, its middle and its end."""
    end = format_seconds(whole_s)
    middle = format_seconds(whole_s / 2)
    half = cells // 2
    left = f"0{middle:>{half + len(middle) // 2}}"
    return Text(f"{'':{indent}}{left}{end:>{max(0, cells - len(left))}}", style="dim")


def row_text(order: Order, starts_s: Sequence[float], ends_s: Sequence[float], *, whole_s: float, cells: int) -> Text:
    """One rank: every action that fills a cell is drawn from its first to its last; others share the cells left."""
    scale = cells / whole_s if whole_s else 0.0
    lowest = min((action.stage for action in order), default=0)
    shares: list[dict[tuple[str, Letter], float]] = [{} for _ in range(cells)]
    drawn: dict[int, tuple[str, Letter]] = {}
    for (stage, letter, m), start, end in zip(order, starts_s, ends_s, strict=True):
        first, last = start * scale, end * scale
        word = letter.value if stage == lowest else letter.value.lower()
        begin, stop = round(first), min(cells, round(last))
        label = f"{word}{m}" if len(f"{word}{m}") <= stop - begin else word
        for cell in range(begin, stop):
            place = cell - begin
            drawn[cell] = (label[place] if place < len(label) else _LINE, letter)
        for cell in range(int(first), min(cells, int(last) + 1)):
            share = min(last, cell + 1) - max(first, cell)
            shares[cell][word, letter] = shares[cell].get((word, letter), 0.0) + share
    made = Text()
    for cell in range(cells):
        busy = sum(shares[cell].values())
        if cell not in drawn and busy >= 1 / 2:
            drawn[cell] = max(shares[cell], key=lambda entry: shares[cell][entry])
        text, drawn_letter = drawn.get(cell, (_IDLE, None))
        made.append(text, style=_STYLES[drawn_letter] if drawn_letter else "dim")
    return made
