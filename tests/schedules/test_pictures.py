"""Each schedule's module shows its picture: the code must draw just that one."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator

import pytest

from planner.schedules import Placement, ScheduleName, build, parse_action

MODULES = ("gpipe", "one_f_one_b", "interleaved", "looped_bfs", "zero_bubble", "zb_v", "dualpipe_v", "v_memory")
TITLES = {
    "gpipe": ScheduleName.GPIPE,
    "one_f_one_b": ScheduleName.ONE_F_ONE_B,
    "interleaved": ScheduleName.INTERLEAVED,
    "looped_bfs": ScheduleName.LOOPED_BFS,
    "zb_v": ScheduleName.ZB_V,
    "dualpipe_v": ScheduleName.DUALPIPE_V,
}


def pictures() -> Iterator[tuple[str, str, list[list[str]]]]:
    """(module, heading, rows of cells) of every picture in the docstrings."""
    for module in MODULES:
        text = importlib.import_module(f"planner.schedules.{module}").__doc__ or ""
        heading = ""
        rows: list[list[str]] = []
        for line in text.splitlines():
            match = re.match(r"\s*(.*?)\s*rank (\d): (.*)", line)
            if not match:
                continue
            if match[1]:
                if rows:
                    yield module, heading, rows
                heading, rows = match[1], []
            rows.append(match[3].split())
        yield module, heading, rows


@pytest.mark.parametrize(("module", "heading", "rows"), list(pictures()))
def test_the_picture_is_what_the_code_makes(module: str, heading: str, rows: list[list[str]]) -> None:
    sizes = dict(re.findall(r"(\w)=(\d+)", heading))
    warmup = re.search(r"warm-up ([\d ]+)", heading)
    name = TITLES.get(module) or ScheduleName(heading.split(",")[0])
    in_a_v = name in (ScheduleName.ZB_V, ScheduleName.DUALPIPE_V, ScheduleName.V_HALF, ScheduleName.V_MIN)
    schedule = build(
        name,
        num_ranks=int(sizes["P"]),
        virtual=2 if in_a_v else int(sizes.get("v", 1)),
        num_microbatches=int(sizes["M"]),
        placement=Placement.V if in_a_v else Placement.LOOP,
        warmup=tuple(map(int, warmup[1].split())) if warmup else None,
    )
    assert len(schedule) == len(rows)
    for order, cells in zip(schedule, rows, strict=True):
        shown = [parse_action(cell) for cell in cells if cell != "..."]
        assert list(order[: len(shown)]) == shown
        assert cells[-1] == "..." or len(order) == len(shown)
