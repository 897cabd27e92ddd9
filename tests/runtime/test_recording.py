"""What a run records of a step, action by action."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.runs import EVERYTHING, plan_of, run

from planner.plan import schedule_of
from planner.report.trace import read_recording, write_recording
from planner.runtime.recording import check_recording
from planner.schedules import Action, Letter, format_order


def test_a_run_records_when_each_action_ran(tmp_path: Path) -> None:
    """Of two steps the second counts: its figures are no medians, but those of one step, to be held together."""
    plan = plan_of(EVERYTHING, num_ranks=2)
    schedule = schedule_of(plan)
    outcome = run(plan, tmp_path, steps=2, record=True)
    recording = outcome.recording
    assert recording is not None
    assert outcome.measured is not None
    assert (recording.steps, recording.iteration_s) == (1, outcome.measured.iteration_s)
    spans: dict[Action, tuple[float, float]] = {}
    for rank, order, told in zip(recording.ranks, schedule, outcome.result.ranks, strict=True):
        assert rank.actions == format_order(order)
        last = 0.0
        for action, start, end in zip(order, rank.starts_s, rank.ends_s, strict=True):
            assert last <= start <= end
            spans[action], last = (start, end), end
        assert last <= rank.ended_s
        assert sum(end - start for start, end in zip(rank.starts_s, rank.ends_s, strict=True)) == pytest.approx(
            told.busy_s
        )
        assert rank.peak_memory_bytes == told.peak_memory_bytes
    assert min(start for start, _ in spans.values()) == 0.0
    for m in range(plan.batch.microbatches):
        forward, backward = Letter.FORWARD, Letter.BACKWARD
        way = [Action(0, forward, m), Action(1, forward, m), Action(1, backward, m), Action(0, backward, m)]
        begins = [spans[action][0] for action in way]
        assert begins == sorted(begins), "one clock on all ranks: nothing starts before what it reads"
    write_recording(tmp_path / "run.json", recording, plan)
    again = read_recording(tmp_path / "run.json")
    assert again == recording
    check_recording(again, plan, schedule)


def test_what_was_not_asked_for_is_not_recorded(tmp_path: Path) -> None:
    assert run(plan_of(EVERYTHING, num_ranks=1), tmp_path, steps=2).recording is None
