from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.jobs import Shape, jobs
from support.naive_model import Naive

from planner.schedules import Placement, Schedule, ScheduleName, build, shape_fault
from planner.simulate import Job, simulate


def shapes(max_ranks: int = 4) -> st.SearchStrategy[Shape]:
    ranks = st.integers(1, max_ranks)
    return st.tuples(ranks, st.integers(1, 3), st.just(Placement.LOOP)) | st.tuples(
        ranks, st.just(2), st.just(Placement.V)
    )


@st.composite
def scheduled(draw: st.DrawFn) -> tuple[Job, Schedule]:
    """A random job, and one of the schedules that its shape can have."""
    num_ranks, virtual, placement = draw(shapes())
    job = draw(jobs(shapes=st.just((num_ranks, virtual, placement))))
    fitting = [name for name in ScheduleName if not shape_fault(name, virtual=virtual, placement=placement)]
    schedule = build(
        draw(st.sampled_from(fitting)),
        num_ranks=num_ranks,
        virtual=virtual,
        num_microbatches=job.num_microbatches,
        placement=placement,
    )
    return job, schedule


@settings(max_examples=200, deadline=None)
@given(scheduled())
def test_agrees_with_an_event_simulation(pair: tuple[Job, Schedule]) -> None:
    job, schedule = pair
    timeline, naive = simulate(job, schedule), Naive(job, schedule)
    for span in timeline.spans():
        stage, letter, m = span.action
        assert span.start_s == pytest.approx(naive.starts[stage, letter.value, m], abs=1e-12)
        assert span.end_s == pytest.approx(naive.ends[stage, letter.value, m], abs=1e-12)
    assert timeline.iteration_s == pytest.approx(naive.iteration_s, abs=1e-12)
    assert [use.peak_memory_bytes for use in timeline.ranks] == naive.peaks
    assert [use.peak_memory_bytes for use in simulate(job, schedule, levels=False).ranks] == naive.peaks
