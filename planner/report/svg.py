"""The schedule as a picture that can stand in a document: a row a rank, light or dark as the reader's system is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final
from xml.sax.saxutils import escape

from planner.errors import InputError
from planner.report.overview import Overview
from planner.report.palette import DARK, LIGHT, css_variables
from planner.report.summary import bound_words, percent, provenance_words, shape_words
from planner.schedules import Action, Letter
from planner.units import format_seconds

MOST_ACTIONS: Final = 4_000
_WIDTH, _LEFT, _TOP, _ROW = 1000, 62, 62, 30
_WORDS: Final = {
    Letter.FORWARD: "forward",
    Letter.BACKWARD: "backward",
    Letter.BACKWARD_INPUT: "backward, input",
    Letter.BACKWARD_WEIGHT: "backward, weights",
}
_STYLE: Final = f"""
svg {{ {css_variables(LIGHT)} }}
@media (prefers-color-scheme: dark) {{ svg {{ {css_variables(DARK)} }} }}
text {{ font: 12px system-ui, sans-serif; fill: var(--text); }}
.ground {{ fill: var(--card); }} .dim {{ fill: var(--dim); font-size: 11px; }} .line {{ stroke: var(--line); }}
.title {{ font-size: 15px; font-weight: 600; }} .m {{ text-anchor: middle; font-weight: 600; }}
""" + " ".join(
    f".{letter} {{ fill: var(--{letter}); }} .m.{letter} {{ fill: var(--{letter}-text); }}" for letter in "FBIW"
)


def schedule_svg(shown: Overview) -> str:
    """The picture of a plan's schedule. Raises InputError where it has more actions than such a picture can show."""
    count = sum(map(len, shown.timeline.schedule))
    if count > MOST_ACTIONS:
        raise InputError(
            f"the plan has {count} actions, and a picture shows at most {MOST_ACTIONS}", hint="make a page, with --html"
        )
    height = _TOP + _ROW * shown.job.num_ranks + 44
    title = escape(f"{shown.plan.model.name}: {shape_words(shown)}")
    words = (
        f"{format_seconds(shown.timeline.iteration_s)} an iteration, {percent(shown.predicted.bubble_fraction)} idle"
    )
    if shown.profile.provenance != "measured":
        words += f"; {provenance_words(shown.profile)}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" '
        f'font-size="12"><!-- pipeplan-picture/1 --><title>{title}</title><style>{_STYLE}</style>',
        f'<rect class="ground" width="{_WIDTH}" height="{height}" rx="10"/>',
        f'<text class="title" x="14" y="26">{title}</text>',
        f'<text class="dim" x="14" y="44">{escape(f"{words}; {bound_words(shown)}")}</text>',
        *_axis(shown, height),
        *_ranks(shown),
        *_legend(shown, height),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _scale(shown: Overview) -> float:
    """Units of the picture for a second."""
    return (_WIDTH - _LEFT - 14) / (shown.timeline.iteration_s or 1.0)


def _axis(shown: Overview, height: int) -> Iterator[str]:
    """Five marks, from 0 to the end of the iteration."""
    floor = height - 38
    for quarter in range(5):
        seconds = shown.timeline.iteration_s * quarter / 4
        x = _number(_LEFT + seconds * _scale(shown))
        yield f'<line class="line" x1="{x}" y1="{_TOP - 6}" x2="{x}" y2="{floor}"/>'
        anchor = "start" if not quarter else "end" if quarter == 4 else "middle"
        yield f'<text class="dim" text-anchor="{anchor}" x="{x}" y="{floor + 13}">{format_seconds(seconds)}</text>'


def _ranks(shown: Overview) -> Iterator[str]:
    timeline = shown.timeline
    for rank, order in enumerate(timeline.schedule):
        top = _TOP + rank * _ROW
        yield f'<text x="14" y="{top + 18}">rank {rank}</text>'
        lowest = min((action.stage for action in order), default=0)
        for action, start, end in zip(order, timeline.starts_s[rank], timeline.ends_s[rank], strict=True):
            yield from _block(
                shown, action, start * _scale(shown), end * _scale(shown), top, upper=action.stage > lowest
            )


def _block(shown: Overview, action: Action, start: float, end: float, top: int, *, upper: bool) -> Iterator[str]:
    """One action; those of a rank's upper stages are a little lower, so that chunks are told apart in grey too."""
    wide, letter = end - start, action.letter.value
    if wide <= 0:
        return
    drop = 5 if upper else 0
    gap = 1 if wide > 3 else 0
    yield (
        f'<rect class="{letter}" x="{_number(_LEFT + start)}" y="{top + 2 + drop}" width="{_number(wide - gap)}" '
        f'height="{_ROW - 4 - drop}"><title>{action}: {format_seconds((end - start) / _scale(shown))}</title></rect>'
    )
    label = next((text for text in (f"{letter}{action.microbatch}", letter) if 7.6 * len(text) <= wide - 2), None)
    if label:
        middle = _number(_LEFT + (start + end - gap) / 2)
        yield f'<text class="m {letter}" x="{middle}" y="{top + 19 + drop / 2:g}">{label}</text>'


def _legend(shown: Overview, height: int) -> Iterator[str]:
    used = {action.letter for order in shown.timeline.schedule for action in order}
    x = _LEFT
    for letter, words in _WORDS.items():
        if letter in used:
            yield f'<rect class="{letter}" x="{x}" y="{height - 18}" width="12" height="12"/>'
            yield f'<text class="dim" x="{x + 17}" y="{height - 8}">{letter} {words}</text>'
            x += 40 + 7 * len(words)
    if len({action.stage for action in shown.timeline.schedule[0]}) > 1:
        yield f'<text class="dim" x="{x}" y="{height - 8}">lower blocks: a rank\'s upper stages</text>'


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
