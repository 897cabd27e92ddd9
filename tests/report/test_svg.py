"""The schedule as a picture for documents."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.command import pipeplan, refused
from support.plans import chain_profile, fresh_plan, plans, profiles, save

from planner.report.overview import overview_of
from planner.report.svg import schedule_svg

SVG = "{http://www.w3.org/2000/svg}"


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_every_action_is_a_block_where_and_as_long_as_it_runs(data: st.DataObject) -> None:
    profile = data.draw(profiles())
    shown = overview_of(data.draw(plans(profile)), profile)
    root = ElementTree.fromstring(schedule_svg(shown))
    width = float(root.attrib["viewBox"].split()[2])
    blocks = [box for box in root.iter(f"{SVG}rect") if box.attrib.get("class") in tuple("FBIW") and len(box)]
    spans = [span for span in shown.timeline.spans() if span.end_s > span.start_s]
    assert len(blocks) == len(spans)
    scale = (width - 62 - 14) / shown.timeline.iteration_s
    for box, (rank, action, start, end) in zip(blocks, spans, strict=True):
        assert box.attrib["class"] == action.letter
        assert (box[0].text or "").startswith(f"{action}: ")
        assert float(box.attrib["x"]) == pytest.approx(62 + start * scale, abs=0.06)
        assert float(box.attrib["width"]) == pytest.approx((end - start) * scale, abs=1.06)
        assert 62 + 30 * rank < float(box.attrib["y"]) < 62 + 30 * (rank + 1)


def test_it_stands_alone_and_names_are_text(tmp_path: Path) -> None:
    profile = chain_profile(2)
    profile = dataclasses.replace(profile, model=dataclasses.replace(profile.model, name="</svg><script>&\"'"))
    path = save(fresh_plan(profile, [["block.0"], ["block.1"]], ranks=2), profile, tmp_path)
    assert pipeplan("show", path, "--svg", tmp_path / "x.svg").code == 0
    text = (tmp_path / "x.svg").read_text()
    root = ElementTree.fromstring(text)
    assert root.findtext(f"{SVG}title", "").startswith("</svg><script>&\"': 2 GPUs")
    assert not re.search(r"href|url\(|@import|<script", text)
    assert "prefers-color-scheme: dark" in text


def test_estimates_are_said_on_every_output(tmp_path: Path) -> None:
    profile = dataclasses.replace(chain_profile(2), provenance="estimated")
    path = save(fresh_plan(profile, [["block.0"], ["block.1"]], ranks=2), profile, tmp_path)
    outputs = {option: tmp_path / option for option in ("html", "svg", "trace")}
    words = [word for option, output in outputs.items() for word in (f"--{option}", output)]
    assert "estimated" in pipeplan("show", path, *words).out.lower()
    for output in outputs.values():
        assert "estimate" in output.read_text().lower(), output.name
    assert '"provenance": "estimated"' in pipeplan("show", path, "--json").out


def test_what_a_picture_cannot_show_is_refused(tmp_path: Path) -> None:
    profile = chain_profile(2)
    path = save(fresh_plan(profile, [["block.0"], ["block.1"]], ranks=2, microbatches=2000), profile, tmp_path)
    assert "8000 actions" in refused(pipeplan("show", path, "--svg", tmp_path / "x.svg"))
    assert "no schedule" in refused(pipeplan("show", tmp_path / "profile.json", "--svg", tmp_path / "x.svg"))
