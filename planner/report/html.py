"""A page that stands alone: no network, no other file; it opens from disk, and prints.

page/*.html       Jinja2 templates: they escape whatever they are given
page/*.js         the pictures, drawn on canvases, from the JSON in the page (planner.report.page_data)
plan_page.py      what a plan's page says
profile_page.py   what a profile's page says
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

import planner
from planner.profile import Profile
from planner.report.page_data import as_json
from planner.report.palette import DARK, LIGHT, css_variables
from planner.report.summary import optimizer_words
from planner.units import format_bytes

_FOLDER: Final = Path(__file__).parent / "page"
_SCRIPTS: Final = ("data.js", "units.js", "chart.js", "schedule.js", "memory.js", "layers.js", "main.js")


def render(template: str, data: dict[str, Any], *, parts: Sequence[tuple[str, str]], **said: Any) -> str:
    """A page from its template. ``data``: for the pictures; ``parts``: id and short name of each; all else: words."""

    def asset(name: str) -> Markup:
        return Markup((_FOLDER / name).read_text(encoding="utf-8"))

    return str(
        _templates()
        .get_template(template)
        .render(
            parts=[{"id": name, "short": short} for name, short in parts],
            light=Markup(css_variables(LIGHT)),
            dark=Markup(css_variables(DARK)),
            style=asset("style.css"),
            script=Markup("\n").join(map(asset, _SCRIPTS)),
            data=Markup(as_json(data)),
            footer=f"Made by pipeplan {planner.__version__}.",
            **said,
        )
    )


@cache
def _templates() -> Environment:
    return Environment(
        loader=FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def provenance_notices(profile: Profile) -> Iterator[dict[str, str]]:
    """That a profile's costs were not measured."""
    if profile.provenance == "estimated":
        yield {"kind": "plain", "text": f"The layers' costs are estimates for {profile.device.name}, not measurements."}
    elif profile.provenance == "imported":
        yield {"kind": "plain", "text": "The layers' costs were imported from another system's file."}


def figure(name: str, value: str, note: str, *, measured: str = "", bad: bool = False) -> dict[str, Any]:
    """One of the tiles at the top: a value, what was measured of it, and a note."""
    return {"name": name, "value": value, "note": note, "measured": measured, "bad": bad, "long": len(value) > 10}


def unbroken(text: str) -> str:
    """A figure and its unit on one line."""
    return text.replace(" ", "\u00a0")


def share_of(part: float, whole: float) -> float:
    """A part of a whole; 0 where there is none."""
    return part / whole if whole else 0.0


def profile_facts(profile: Profile) -> Iterator[tuple[str, str]]:
    """What the figures rest on, as terms and their words."""
    yield "Layer costs", f"{profile.provenance}, {profile.dtype}"
    memory = f", {format_bytes(profile.device.memory_bytes)}" if profile.device.memory_bytes else ""
    yield "Device", f"{profile.device.name}{memory}"
    if profile.device.software:
        yield "Software", ", ".join(f"{name} {version}" for name, version in profile.device.software.items())
    yield "Optimizer", optimizer_words(profile)
    yield "Model", f"{profile.model.source}, fingerprint {profile.model.fingerprint[:12]}"
