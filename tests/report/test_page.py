"""The page of a plan in a real browser: it shows the plan, by mouse and keyboard, in both themes, at any size."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.browser import chromium, opened, tooltip
from support.command import pipeplan
from support.plans import chain_profile, fresh_plan, plans, profiles, save
from support.recordings import recorded

from planner.plan import Plan, read_plan, schedule_of
from planner.plan.check import profile_of
from planner.profile import Edge, EdgeTensor, Profile
from planner.report.overview import Overview, overview_of
from planner.report.palette import DARK, LIGHT
from planner.report.plan_page import plan_page
from planner.report.trace import write_recording
from planner.schedules import Letter, ScheduleName
from planner.units import format_bytes, format_rate, format_seconds

LEFT, TOP = 58, 22
"""Where a schedule's rows begin in its picture."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@dataclasses.dataclass(frozen=True)
class Shown:
    """A page, and what it must show."""

    path: Path
    overview: Overview
    row: int

    def point(self, page: Any, rank: int, time_s: float, *, source: str = "predicted") -> tuple[float, float]:
        """Where a moment of a rank lies in the window, from the plan's figures and what of it is on show."""
        canvas, row = page.locator(f"#schedule-{source} canvas"), TOP + (rank + 0.5) * self.row
        below = canvas.bounding_box()["y"] + row - page.viewport_size["height"] / 3
        page.evaluate("below => window.scrollBy({top: below, behavior: 'instant'})", below)
        box = canvas.bounding_box()
        start, end = page.evaluate("[pipeplan.span.from, pipeplan.span.to]")
        return box["x"] + LEFT + (time_s - start) / (end - start) * (box["width"] - LEFT - 1), box["y"] + row


def _page(plan: Plan, profile: Profile, folder: Path, *, row: int, words: Sequence[object] = ()) -> Shown:
    path = save(plan, profile, folder, bound_s=plan.predicted and plan.predicted.iteration_s / 1.02)
    html = folder / "report.html"
    answer = pipeplan("show", path, "--html", html, *words)
    assert answer.code == 0, answer
    again = read_plan(path)
    return Shown(html, overview_of(again, profile_of(again, path)), row)


def _even(count: int, num_stages: int) -> list[list[str]]:
    names = [f"block.{index}" for index in range(count)]
    each = count // num_stages
    return [names[place : place + each] for place in range(0, count, each)]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Shown:
    """P = 4, M = 8, split backwards."""
    profile = chain_profile(8)
    plan = fresh_plan(profile, _even(8, 4), ranks=4, microbatches=8, name=ScheduleName.ZB_H1)
    return _page(plan, profile, tmp_path_factory.mktemp("small"), row=32)


@pytest.fixture(scope="module", params=[64, pytest.param(512, marks=pytest.mark.slow)])
def large(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Shown:
    """P = 64, M = 64 or 512."""
    profile = chain_profile(64)
    plan = fresh_plan(profile, _even(64, 64), ranks=64, microbatches=request.param)
    return _page(plan, profile, tmp_path_factory.mktemp("large"), row=14)


def _text(page: Any) -> str:
    return " ".join(page.locator("main").inner_text().split())


def _row(page: Any, section: str, name: str) -> list[str]:
    """The cells of the table row that a heading names."""
    rows = page.locator(f"#{section} tbody tr")
    found = [row for row in rows.all() if row.locator("th").inner_text() == name]
    assert len(found) == 1, (section, name)
    return [cell.strip() for cell in found[0].locator("td").all_inner_texts()]


def test_the_figures_are_the_plans(browser: Any, small: Shown) -> None:
    shown = small.overview
    with opened(browser, small.path) as page:
        text = _text(page)
        assert page.title() == "chain · pipeplan"
        for figure in (
            format_seconds(shown.predicted.iteration_s),
            f"{format_rate(shown.predicted.samples_per_s)}/s",
            f"{100 * shown.predicted.bubble_fraction:.1f} %",
            "2.00 % over the bound",
            "zb-h1",
        ):
            assert figure in text
        for rank in shown.predicted.ranks:
            cells = _row(page, "bubble", str(rank.rank))
            assert cells[1] == format_seconds(rank.busy_s)
            assert cells[3] == format_bytes(rank.peak_memory_bytes)
        for stage in shown.plan.stages:
            cells = _row(page, "stages", str(stage.stage))
            assert cells[0] == str(stage.rank)
            assert cells[2:5] == [
                format_seconds(seconds)
                for seconds in (stage.forward_s, stage.backward_input_s, stage.backward_weight_s)
            ]
            page.locator("#stages tbody tr").nth(stage.stage).locator("summary").click()
            assert _row(page, "stages", str(stage.stage))[1].split("\n")[1:] == list(stage.layers)
        assert _row(page, "rivals", "this plan, zb-h1")[2] == format_seconds(shown.predicted.iteration_s)
        assert _row(page, "rivals", "by hand: one GPU")[0] == "1"


def test_what_is_drawn_from_is_the_simulation(browser: Any, small: Shown) -> None:
    """The packed columns, read back by the page itself: times, messages, memory."""
    timeline = small.overview.timeline
    near = timeline.iteration_s * 1e-6
    with opened(browser, small.path) as page:
        read = page.evaluate(
            "() => { const {actions, predicted, memory} = pipeplan.data; const told = {};"
            "for (let i = 0; i < actions.length; i++) told[actions.name(i)] = [actions.rank[i], predicted.start[i],"
            " predicted.end[i], actions.readers(i).map(({i: to}) => [actions.name(to), predicted.arrives(i, to)])];"
            "return {told, memory: memory.map(({times, bytes}) => [[...times], [...bytes]])}; }"
        )
    arrivals = {(message.action, message.to_stage): message.arrived_s for message in timeline.messages}
    assert len(read["told"]) == sum(map(len, timeline.schedule))
    for rank, action, start, end in timeline.spans():
        told_rank, told_start, told_end, readers = read["told"][str(action)]
        assert (told_rank, told_start, told_end) == (rank, pytest.approx(start, abs=near), pytest.approx(end, abs=near))
        stage = small.overview.plan.stages[action.stage]
        given = {Letter.FORWARD: stage.sends, Letter.BACKWARD_WEIGHT: ()}.get(action.letter, stage.returns)
        assert len(readers) == len(given)
        for entry, (reader, there) in zip(given, readers, strict=True):
            assert re.fullmatch(rf"{entry.to_stage}[FI]{action.microbatch}", reader)
            assert there == pytest.approx(arrivals[action, entry.to_stage], abs=near)
    for rank, levels in enumerate(timeline.memory):
        times, held = read["memory"][rank]
        assert times == pytest.approx([level.time_s for level in levels], abs=near)
        assert held == [level.bytes for level in levels]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_action_is_drawn_where_it_runs_in_its_colour(browser: Any, small: Shown, theme: str) -> None:
    palette = LIGHT if theme == "light" else DARK
    with opened(browser, small.path, theme=theme) as page:
        scale = page.locator("#schedule-predicted canvas").bounding_box()["width"] - LEFT - 1
        scale /= small.overview.timeline.iteration_s
        probes = [
            [LEFT + start * scale + min(4.0, (end - start) * scale / 3), TOP + rank * small.row + 27, action.letter]
            for rank, action, start, end in small.overview.timeline.spans()
            if end > start  # the I of a stage that returns nothing takes no time
        ]
        found = page.evaluate(
            "probes => { const canvas = document.querySelector('#schedule-predicted canvas');"
            "const {data, width} = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);"
            "return probes.map(([x, y]) => 4 * (Math.round(y) * width + Math.round(x)))"
            ".map(place => [...data.subarray(place, place + 4)]); }",
            probes,
        )
    for (_, _, letter), (*colour, alpha) in zip(probes, found, strict=True):
        assert "#" + "".join(f"{part:02x}" for part in colour) == palette.actions[letter][0]
        assert alpha == 255


def test_an_action_says_on_hover_what_it_does(browser: Any, small: Shown) -> None:
    shown = small.overview
    words = {"F": "forward", "B": "backward", "I": "backward for the input", "W": "backward for the weights"}
    with opened(browser, small.path) as page:
        for rank, action, start, end in [span for span in shown.timeline.spans() if span.end_s > span.start_s][::9]:
            page.mouse.move(*small.point(page, rank, (start + end) / 2))
            heading, figures = tooltip(page)
            assert heading == f"{action} {words[action.letter]}"
            assert figures["rank, stage"] == f"{rank}, {action.stage}"
            assert figures["takes"] == format_seconds(end - start)
            stage = shown.plan.stages[action.stage]
            if action.letter is Letter.FORWARD and stage.sends:
                size, to = format_bytes(stage.sends[0].bytes), action._replace(stage=stage.sends[0].to_stage)
                assert figures["sends"].startswith(f"{size} to {to} on rank {rank + 1}, there")
        idle = shown.timeline.starts_s[3][0] / 2
        page.mouse.move(*small.point(page, 3, idle))
        heading, figures = tooltip(page)
        assert (heading, figures["until"], figures["waits for"]) == ("idle", "3F0", "2F0 of rank 2")
        page.mouse.move(2, 2)
        assert tooltip(page) == ("", {})


def test_the_keyboard_reaches_everything(browser: Any, small: Shown) -> None:
    orders = small.overview.timeline.schedule
    with opened(browser, small.path) as page:
        reached = set()
        for _ in range(80):
            page.keyboard.press("Tab")
            reached.add(page.evaluate("(e => e.dataset.zoom ?? e.dataset.themeChoice ?? (e.closest('.picture')?.id"
                                      " ?? (e.id || e.hash || e.tagName)))(document.activeElement)"))  # fmt: skip
        wanted = {"in", "out", "all", "left", "right", "auto", "light", "dark", "memory-rank", "SUMMARY"}
        assert wanted | {"schedule-predicted", "memory", "layers", "#main", "#stages"} <= reached
        page.locator("#schedule-predicted canvas").focus()
        said = page.locator("#said")
        for key, name in (
            ("ArrowRight", str(orders[0][0])),
            ("ArrowRight", str(orders[0][1])),
            ("ArrowLeft", str(orders[0][0])),
            ("End", str(orders[0][-1])),
            ("Home", str(orders[0][0])),
            ("ArrowDown", str(orders[1][0])),
            ("ArrowUp", str(orders[0][1])),  # the one that ran when 1F0 began
        ):
            page.keyboard.press(key)
            assert said.inner_text().startswith(f"{name} "), key
            assert tooltip(page)[0].startswith(f"{name} ")
        page.keyboard.press("+")
        assert page.locator("#zoom").inner_text() == "2 ×"
        page.keyboard.press("0")
        assert page.locator("#zoom").inner_text() == "1 ×"
        page.keyboard.press("Escape")
        assert tooltip(page) == ("", {})
        page.locator("#layers canvas").focus()
        page.keyboard.press("End")
        assert said.inner_text().startswith("block.7: kind block, stage 3, ")


def test_the_keyboard_reads_what_ranks_hold(browser: Any, small: Shown) -> None:
    shown = small.overview
    with opened(browser, small.path) as page:
        said, rank = page.locator("#said"), shown.fullest
        page.locator("#memory canvas").focus()
        page.keyboard.press("Home")
        for key, way in (("ArrowDown", 1), ("ArrowDown", 1), ("ArrowUp", -1)):
            page.keyboard.press(key)
            rank = min(3, max(0, rank + way))
            assert f": rank {rank} holds " in said.inner_text()
            assert page.locator("#memory-rank").input_value() == str(rank)
        levels, limit = shown.timeline.memory[rank], f" of {format_bytes(shown.limit_bytes)}"
        page.keyboard.press("Home")
        for level in levels[:12]:
            assert said.inner_text().endswith(f": rank {rank} holds {format_bytes(level.bytes)}{limit}")
            assert tooltip(page)[1][f"rank {rank}"] == format_bytes(level.bytes)
            page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowLeft")
        assert said.inner_text().endswith(f"holds {format_bytes(levels[11].bytes)}{limit}")
        for _ in range(3):
            page.keyboard.press("+")
        page.keyboard.press("End")
        assert said.inner_text().endswith(f"holds {format_bytes(levels[-1].bytes)}{limit}")
        assert page.evaluate("pipeplan.span.to") == pytest.approx(shown.timeline.iteration_s), "it is brought into view"
        page.keyboard.press("Escape")
        assert tooltip(page) == ("", {})


def test_the_theme_follows_the_system_and_the_switch(browser: Any, small: Shown) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"

    def rgb(colour: str) -> str:
        return f"rgb({', '.join(str(int(colour[place : place + 2], 16)) for place in (1, 3, 5))})"

    with opened(browser, small.path, theme="dark") as page:
        assert page.evaluate(ground) == rgb(DARK.ground)
        page.get_by_role("button", name="Light").click()
        assert page.evaluate(ground) == rgb(LIGHT.ground)
        assert page.evaluate("colours.ground") == LIGHT.ground, "the pictures follow"
        page.emulate_media(color_scheme="light")
        page.get_by_role("button", name="Dark").click()
        assert page.evaluate(ground) == rgb(DARK.ground)
        assert page.get_by_role("button", name="Dark").get_attribute("aria-pressed") == "true"
        page.get_by_role("button", name="Auto").click()
        assert page.evaluate(ground) == rgb(LIGHT.ground)


def test_a_large_schedule_stays_small_and_can_be_read_by_zooming(browser: Any, large: Shown) -> None:
    timeline = large.overview.timeline
    assert large.path.stat().st_size < 1_000_000
    with opened(browser, large.path) as page:
        assert page.evaluate("document.getElementsByTagName('*').length") < 5_000
        for _ in range(6):
            page.get_by_role("button", name="Zoom in").click()
        assert page.locator("#zoom").inner_text() == "64 ×"
        for rank in (0, 31, 63):
            middle = page.evaluate("(pipeplan.span.from + pipeplan.span.to) / 2")
            place = next(i for i, end in enumerate(timeline.ends_s[rank]) if end > middle)
            moment = (timeline.starts_s[rank][place] + timeline.ends_s[rank][place]) / 2
            page.mouse.move(*large.point(page, rank, moment))
            assert tooltip(page)[0].startswith(f"{timeline.schedule[rank][place]} ")
        page.keyboard.down("Control")
        page.mouse.wheel(0, 800)
        page.keyboard.up("Control")
        page.wait_for_function("pipeplan.span.zoom < 20")
        page.get_by_role("button", name="Whole iteration").click()
        assert page.locator("#zoom").inner_text() == "1 ×"
        box = page.locator("#overview canvas").bounding_box()
        page.get_by_role("button", name="Zoom in").click()
        page.mouse.click(box["x"] + box["width"] - 2, box["y"] + 10)
        assert page.evaluate("pipeplan.span.to") == pytest.approx(timeline.iteration_s)


def test_a_drag_moves_and_a_double_click_zooms(browser: Any, small: Shown) -> None:
    whole = small.overview.timeline.iteration_s
    with opened(browser, small.path) as page:
        x, y = small.point(page, 1, whole / 2)
        page.mouse.dblclick(x, y)
        start, end = page.evaluate("[pipeplan.span.from, pipeplan.span.to]")
        assert end - start == pytest.approx(whole / 3)
        page.mouse.down()
        page.mouse.move(x - 100, y)
        page.mouse.up()
        width = page.locator("#schedule-predicted canvas").bounding_box()["width"] - LEFT - 1
        moved = page.evaluate("pipeplan.span.from") - start
        assert moved == pytest.approx(100 / width * (end - start), rel=0.02)


def test_nothing_is_wider_than_a_telephone(browser: Any, small: Shown) -> None:
    with opened(browser, small.path, width=390, height=800) as page:
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        boxes = page.evaluate("[...document.querySelectorAll('.scroll')].map(box => box.scrollWidth - box.clientWidth)")
        assert boxes == [0] * 3, "no table is moved sideways"
        assert page.locator("#schedule-predicted canvas").bounding_box()["width"] > 300
        start, end = small.overview.timeline.starts_s[2][0], small.overview.timeline.ends_s[2][0]
        page.mouse.move(*small.point(page, 2, (start + end) / 2))
        box = page.locator("#tooltip").bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 390


def test_it_prints_in_light_without_controls_and_in_full(browser: Any, small: Shown, tmp_path: Path) -> None:
    with opened(browser, small.path, theme="dark") as page:
        page.get_by_role("button", name="Dark").click()
        page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
        page.emulate_media(media="print")
        assert page.evaluate("colours.card") == LIGHT.card
        assert page.locator(".bar").is_hidden()
        assert page.locator(".zoom").is_hidden()
        assert page.locator("#stages table").is_visible()
        page.emulate_media(media="screen")
        page.evaluate("window.dispatchEvent(new Event('afterprint'))")
        assert page.evaluate("colours.card") == DARK.card
        assert page.pdf().startswith(b"%PDF")


def test_readable_quantities_read_as_in_the_terminal(browser: Any, small: Shown) -> None:
    numbers = [0, 1e-9, 2.5e-7, 9.99e-4, 0.0123, 0.5, 1, 9.994, 59.97, 119.9, 121, 1e5]
    sizes = [0, 1, 999, 1000, 1024, 1536, 123456, 5 * 1024**2, 999.6 * 1024**3, 3e15]
    with opened(browser, small.path) as page:
        assert page.evaluate("numbers => numbers.map(formatSeconds)", numbers) == [*map(format_seconds, numbers)]
        assert page.evaluate("sizes => sizes.map(formatBytes)", sizes) == [*map(format_bytes, sizes)]


NASTY = (
    "</script><script>document.title='taken'</script>",
    '"><img src=x onerror=alert(1)>',
    "it's {{ 7 * 7 }} & <b>bold</b>",
    "слой № 3 层 🙂 \u202e\u2028 \\u003c",
)


def test_names_are_text_whatever_they_hold(browser: Any, tmp_path: Path) -> None:
    profile = chain_profile(4)
    renamed = dict(zip((layer.name for layer in profile.layers), NASTY, strict=True))
    profile = dataclasses.replace(
        profile,
        model=dataclasses.replace(profile.model, name=NASTY[0]),
        device=dataclasses.replace(profile.device, name=NASTY[1]),
        layers=tuple(dataclasses.replace(layer, name=renamed[layer.name], kind=NASTY[2]) for layer in profile.layers),
        edges=tuple(
            dataclasses.replace(edge, source=renamed[edge.source], target=renamed[edge.target])
            for edge in profile.edges
        ),
    )
    shown = _page(fresh_plan(profile, [[name] for name in NASTY], ranks=4), profile, tmp_path, row=32)
    assert pipeplan("show", tmp_path / "profile.json", "--html", tmp_path / "profile.html").code == 0
    with opened(browser, shown.path) as page:
        assert page.title() == f"{NASTY[0]} · pipeplan"
        assert page.evaluate("document.scripts.length") == 2
        assert page.locator("img, b >> text=bold").count() == 0
        cells = page.locator("#stages tbody td.words").evaluate_all("cells => cells.map(cell => cell.textContent)")
        assert cells == list(NASTY)
        start, end = shown.overview.timeline.starts_s[1][0], shown.overview.timeline.ends_s[1][0]
        page.mouse.move(*shown.point(page, 1, (start + end) / 2))
        assert " ".join(tooltip(page)[1]["layers"].split()) == " ".join(NASTY[1].split())
    with opened(browser, tmp_path / "profile.html") as page:
        names = page.locator("#table tbody th").evaluate_all("cells => cells.map(cell => cell.textContent)")
        assert names == list(NASTY)


def test_predicted_and_measured_stand_one_above_the_other(browser: Any, tmp_path: Path) -> None:
    profile = chain_profile(4)
    plan = fresh_plan(profile, _even(4, 2), ranks=2)
    slower, before = 1.5, overview_of(plan, profile)
    timeline, recording = before.timeline, recorded(before, slower=1.5, steps=4, memory=2.0)
    write_recording(tmp_path / "run.json", recording, plan)
    shown = _page(plan, profile, tmp_path, row=32, words=["--measured", tmp_path / "run.json"])
    with opened(browser, shown.path) as page:
        text = _text(page)
        assert f"Predicted, {format_seconds(timeline.iteration_s)}" in text
        assert f"Measured, {format_seconds(recording.iteration_s)} (the median of 4 steps)" in text
        assert f"measured {format_seconds(recording.iteration_s)} (+50.0 %)" in text
        peak = timeline.ranks[1].peak_memory_bytes
        cells = [" ".join(cell.split()) for cell in _row(page, "bubble", "1")]
        assert cells[-3] == f"{format_bytes(2 * peak)} (+100.0 %)"
        first = next(message for message in timeline.messages if message.to_rank == 1)
        assert cells[-2] == format_seconds(first.arrived_s - first.handed_s)
        assert cells[-1] == f"{format_seconds(slower * (first.arrived_s - first.handed_s))} (1)"
        above, below = (page.locator(f"#schedule-{name} canvas").bounding_box() for name in ("predicted", "measured"))
        assert above["y"] + above["height"] < below["y"]
        assert (above["x"], above["width"]) == (below["x"], below["width"])
        place = len(timeline.schedule[1]) - 1
        start, end = timeline.starts_s[1][place], timeline.ends_s[1][place]
        page.mouse.move(*shown.point(page, 1, slower * (start + end) / 2, source="measured"))
        heading, figures = tooltip(page)
        assert heading.startswith(f"{timeline.schedule[1][place]} ")
        assert figures["takes"] == format_seconds(slower * (end - start))
        assert figures["predicted"].startswith(format_seconds(end - start))


def test_branches_are_drawn_in_the_order_of_the_stages(browser: Any, tmp_path: Path) -> None:
    """Two branches side by side in the profile; a stage takes each: the cut curve follows the stages, with arcs."""
    profile = chain_profile(6)
    tensor = EdgeTensor(name="x", bytes_per_sample=1000.0, fixed_bytes=0, grad=True)
    pairs = ((0, 1), (0, 2), (1, 3), (2, 4), (3, 5), (4, 5))
    edges = tuple(Edge(source=f"block.{a}", target=f"block.{b}", tensors=(tensor,)) for a, b in pairs)
    profile = dataclasses.replace(profile, edges=edges)
    cut = [["block.0"], ["block.1", "block.3"], ["block.2", "block.4"], ["block.5"]]
    shown = _page(fresh_plan(profile, cut, ranks=4), profile, tmp_path, row=32)
    with opened(browser, shown.path) as page:
        layers = page.evaluate("pipeplan.data.layers")
        assert layers["names"] == [name for stage in cut for name in stage]
        assert layers["starts"] == [0, 1, 3, 5]
        assert layers["cut_bytes"] == [1000, 2000, 2000, 2000, 2000, 0]
        assert sorted(arc[:2] for arc in layers["arcs"]) == [[0, 3], [2, 5]]
        for width in (660, 800, 1000, 1280):
            page.set_viewport_size({"width": width, "height": 900})
            wide = "[...document.querySelectorAll('.scroll')].map(box => box.scrollWidth - box.clientWidth)"
            assert page.evaluate(wide) == [0] * 3, f"no table is moved sideways at {width}"


def test_a_profile_has_a_page_of_its_layers(browser: Any, tmp_path: Path) -> None:
    profile = dataclasses.replace(chain_profile(5), provenance="estimated")
    save(fresh_plan(profile, _even(5, 1), ranks=1), profile, tmp_path)
    html = tmp_path / "profile.html"
    assert pipeplan("show", tmp_path / "profile.json", "--microbatch", 2, "--html", html).code == 0
    with opened(browser, html) as page:
        text = _text(page)
        assert "estimates for a cpu, not measurements" in text
        cost = profile.layers[3].costs[1]
        cells = _row(page, "table", "block.3")
        assert cells[1:4] == [
            format_seconds(seconds) for seconds in (cost.forward_s, cost.backward_input_s, cost.backward_weight_s)
        ]
        assert cells[7] == format_bytes(cost.saved_bytes)
        assert cells[-2:] == [format_bytes(2000), f"{format_bytes(2000)} → block.4"]
        box = page.locator("#layers canvas").bounding_box()
        page.mouse.move(box["x"] + LEFT + (box["width"] - LEFT) * 0.5, box["y"] + 60)
        assert tooltip(page)[0] == "block.2"


def test_what_is_wrong_with_a_plan_stands_at_its_top(browser: Any, tmp_path: Path) -> None:
    profile = chain_profile(4)
    plan = fresh_plan(profile, _even(4, 2), ranks=2)
    plan = dataclasses.replace(plan, cluster=dataclasses.replace(plan.cluster, memory_bytes=30_000))
    plan = dataclasses.replace(plan, stages=(dataclasses.replace(plan.stages[0], forward_s=1.0), plan.stages[1]))
    shown = _page(plan, profile, tmp_path, row=32)
    with opened(browser, shown.path) as page:
        notices = page.locator(".notice:visible").all_inner_texts()
        assert any("does not fit" in notice for notice in notices)
        assert any("stale" in notice for notice in notices)
        assert page.locator("tr.bad").count() > 0


@pytest.mark.slow
def test_any_plan_is_drawn_and_reached_by_the_keyboard(browser: Any, tmp_path: Path) -> None:
    @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def check(data: st.DataObject) -> None:
        profile = data.draw(profiles())
        plan = data.draw(plans(profile))
        (tmp_path / "page.html").write_text(plan_page(overview_of(plan, profile)))
        with opened(browser, tmp_path / "page.html", width=data.draw(st.sampled_from([320, 390, 900, 1600]))) as page:
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
            page.locator("#schedule-predicted canvas").focus()
            for key in ("ArrowRight", "ArrowDown", "End", "+", "-", "ArrowUp", "Home", "0"):
                page.keyboard.press(key)
            assert tooltip(page)[0].startswith(f"{schedule_of(plan)[0][0]} ")
            page.locator("#layers canvas").focus()
            page.keyboard.press("End")
            assert tooltip(page)[0] == plan.stages[-1].layers[-1]
            page.locator("#memory canvas").hover()
            assert "rank 0" in tooltip(page)[1]

    check()


def test_labels_stay_within_their_blocks(browser: Any, small: Shown) -> None:
    """At any zoom, what is written on an action is no wider than it."""
    with opened(browser, small.path, width=500) as page:
        wide = page.evaluate(
            "() => { const found = [], own = SchedulePicture.prototype.drawBlock, write = Picture.prototype.write;"
            "let room = 0;"
            "SchedulePicture.prototype.drawBlock = function (i, from, to, ...rest) {"
            " room = to - from; own.call(this, i, from, to, ...rest); room = 0; };"
            "Picture.prototype.write = function (text, ...rest) {"
            " write.call(this, text, ...rest);"
            " if (room) found.push([text, this.pen.measureText(text).width, room]); };"
            "const picture = pipeplan.pictures[0];"
            "for (const zoom of [1, 1.5, 2, 3, 5, 9]) {"
            " pipeplan.span.show(0, pipeplan.span.whole / zoom); picture.drawNow(); }"
            "SchedulePicture.prototype.drawBlock = own; Picture.prototype.write = write;"
            "return found; }"
        )
    assert {text[0] for text, _, _ in wide} == {"F", "I", "W"}
    assert all(width <= room for _, width, room in wide)


def test_labels_meet_no_other_and_stay_inside(browser: Any, tmp_path: Path) -> None:
    """The limit right above what was measured, which is what was predicted; cuts one layer apart; wide and narrow."""
    profile = chain_profile(40)
    cut = [[f"block.{index}"] for index in range(7)] + [[f"block.{index}" for index in range(7, 40)]]
    plan = fresh_plan(profile, cut, ranks=8)
    peak = max(use.peak_memory_bytes for use in overview_of(plan, profile).timeline.ranks)
    cluster = dataclasses.replace(plan.cluster, memory_bytes=round(1.02 * peak), memory_reserve_fraction=0.0)
    plan = dataclasses.replace(plan, cluster=cluster)
    write_recording(tmp_path / "run.json", recorded(overview_of(plan, profile)), plan)
    shown = _page(plan, profile, tmp_path, row=32, words=["--measured", tmp_path / "run.json"])
    for width in (320, 1280):
        with opened(browser, shown.path, width=width) as page:
            drawn = page.evaluate(
                "() => [pipeplan.memory, pipeplan.layers].map(picture => { const said = [];"
                "picture.write = function (text, x, y, rest = {}) {"
                " Picture.prototype.write.call(this, text, x, y, rest);"
                " const wide = this.pen.measureText(text).width, left = {left: 0, center: wide / 2, right: wide};"
                " const from = x - left[rest.align ?? 'left'];"
                " said.push([text, from, y - 5, from + wide, y + 5]); };"
                "picture.drawNow(); delete picture.write; return [picture.width, picture.height, said]; })"
            )
        for wide, high, said in drawn:
            for place, (text, left, top, right, bottom) in enumerate(said):
                assert left >= -1, (width, text)
                assert right <= wide + 1, (width, text)
                assert top >= 0, (width, text)
                assert bottom <= high, (width, text)
                for other, *box in said[:place]:
                    meets = left < box[2] and box[0] < right and top < box[3] and box[1] < bottom
                    assert not meets, (width, text, other)
        texts = {text for _, _, said in drawn for text, *_ in said}
        assert {"limit " + format_bytes(round(1.02 * peak)), f"measured peak {format_bytes(peak)}"} <= texts


# Every piece of text with how its colour stands out from what lies under it (WCAG's ratio), for what has a box.
_CONTRASTS = """() => {
  const parse = (colour) => {
    const found = colour.match(/[\\d.]+/g).map(Number);
    return colour.startsWith('color(') ? [found[0] * 255, found[1] * 255, found[2] * 255, found[3] ?? 1] : [...found.slice(0, 3), found[3] ?? 1];
  };
  const over = ([r, g, b, a], under) => [r, g, b].map((part, i) => a * part + (1 - a) * under[i]);
  const ground = (element) => {
    const own = parse(getComputedStyle(element).backgroundColor);
    return own[3] === 1 ? own.slice(0, 3) : over(own, element.parentElement ? ground(element.parentElement) : [255, 255, 255]);
  };
  const light = (colour) => {
    const [r, g, b] = colour.map((part) => part / 255).map((part) => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b + 0.05;
  };
  const told = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.textContent.trim() || !element.checkVisibility() || element.closest('script, noscript, .unseen, .skip')) continue;
    const back = ground(element), text = over(parse(getComputedStyle(element).color), back);
    const [low, high] = [light(back), light(text)].sort((one, other) => one - other);
    told.push([walker.currentNode.textContent.trim().slice(0, 40), high / low]);
  }
  return told;
}"""  # noqa: E501 - JavaScript


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_all_text_stands_out_and_all_that_acts_has_a_name(
    browser: Any, small: Shown, tmp_path: Path, theme: str, width: int
) -> None:
    """Also of a plan that does not fit and is stale, whose words are coloured, and of a profile."""
    profile = chain_profile(4)
    plan = fresh_plan(profile, _even(4, 2), ranks=2)
    plan = dataclasses.replace(plan, cluster=dataclasses.replace(plan.cluster, memory_bytes=30_000))
    bad = _page(plan, profile, tmp_path, row=32)
    assert pipeplan("show", tmp_path / "profile.json", "--html", tmp_path / "profile.html").code == 0
    for path in (small.path, bad.path, tmp_path / "profile.html"):
        with opened(browser, path, theme=theme, width=width) as page:
            told = page.evaluate(_CONTRASTS)
            assert len(told) > 50
            assert [text for text, ratio in told if ratio < 4.5] == []
            nameless = page.evaluate(
                "() => [...document.querySelectorAll('button, select, canvas[tabindex], a, summary, output, [role]')]"
                ".filter(one => !(one.getAttribute('aria-label') || one.labels?.length || one.textContent.trim()"
                " || ['status', 'alert', 'tooltip'].includes(one.role ?? one.getAttribute('role'))))"
                ".map(one => one.outerHTML.slice(0, 80))"
            )
            assert nameless == []
            assert page.evaluate("document.querySelectorAll('th:not([scope])').length") == 0
            twice = page.evaluate("[...document.querySelectorAll('[id]')].map(one => one.id)")
            assert len(twice) == len(set(twice))
            levels = page.evaluate("[...document.querySelectorAll('h1, h2, h3')].map(one => +one.tagName[1])")
            assert levels[0] == 1
            assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
