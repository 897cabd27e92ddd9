"""The picture of a simulated iteration, and where its idle time comes from."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.jobs import chain_job, jobs

from planner.cluster import Link
from planner.report.bubble import bubble_of
from planner.report.timeline import legend, timeline_text
from planner.schedules import Placement, ScheduleName, build
from planner.simulate import Job, Timeline, simulate

SHAPES = st.tuples(st.integers(1, 4), st.integers(1, 3), st.just(Placement.LOOP))


def run(job: Job, name: ScheduleName) -> Timeline:
    virtual = len(job.stages) // job.num_ranks
    schedule = build(
        name,
        num_ranks=job.num_ranks,
        virtual=virtual,
        num_microbatches=job.num_microbatches,
        placement=Placement.LOOP,
    )
    return simulate(job, schedule)


def test_the_picture_is_the_schedule() -> None:
    """Twelve units of time in 48 cells: F takes four, B eight, and each says which it is."""
    timeline = run(chain_job(2, 3, message_bytes=0), ScheduleName.ONE_F_ONE_B)
    lines = [str(line) for line in timeline_text(timeline, width=7 + 48 + len("  75 %      5 B"))]
    assert lines[0].split() == ["0", "6", "s", "12", "s"]
    assert len(lines[0]) == 55
    assert lines[1:] == [
        "rank 0 F0──F1──········B0──────F2──B1──────····B2──────  75 %      2 B",
        "rank 1 ····F0──B0──────F1──B1──────F2──B2──────········  75 %      1 B",
    ]
    assert legend(timeline) == "F forward, B backward, · idle"


@settings(max_examples=50, deadline=None)
@given(jobs(shapes=SHAPES), st.integers(40, 120))
def test_every_picture_fits_its_width(job: Job, width: int) -> None:
    lines = timeline_text(run(job, ScheduleName.ZB_H1), width=width)
    assert len(lines) == job.num_ranks + 1
    assert all(line.cell_len <= width for line in lines)


@settings(max_examples=100, deadline=None)
@given(jobs(shapes=SHAPES), st.sampled_from((ScheduleName.INTERLEAVED, ScheduleName.ZB_H1, ScheduleName.LOOPED_BFS)))
def test_the_parts_of_the_bubble_are_all_of_it(job: Job, name: ScheduleName) -> None:
    timeline = run(job, name)
    bubble = bubble_of(job, timeline)
    parts = (bubble.skew_s, bubble.imbalance_s, bubble.links_s, bubble.rest_s)
    assert min(parts) >= 0
    assert sum(parts) == pytest.approx(timeline.bubble_fraction * timeline.makespan_s, abs=1e-9)


def test_the_bubble_of_equal_stages_is_all_skew() -> None:
    job = chain_job(4, 8)
    bubble = bubble_of(job, run(job, ScheduleName.ONE_F_ONE_B))
    assert (bubble.skew_s, bubble.imbalance_s, bubble.links_s, bubble.rest_s) == (9, 0, 0, 0)


def test_links_are_told_apart() -> None:
    job = chain_job(4, 8, link=Link(latency_s=0.5, bandwidth_bytes_per_s=1e9))
    free = bubble_of(chain_job(4, 8), run(chain_job(4, 8), ScheduleName.ONE_F_ONE_B))
    bubble = bubble_of(job, run(job, ScheduleName.ONE_F_ONE_B))
    assert bubble.skew_s == pytest.approx(free.skew_s)
    assert bubble.links_s > 1
