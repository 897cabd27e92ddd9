"""Prediction beside measurement: its figures, its messages by their definition, its screen."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.command import pipeplan
from support.plans import chain_profile, fresh_plan, plans, profiles, save
from support.recordings import recorded

from planner.cluster import Cluster, ClusterLinks, Link
from planner.profile import Profile
from planner.report.beside import beside
from planner.report.overview import overview_of
from planner.report.trace import write_recording
from planner.schedules import ScheduleName
from planner.units import format_bytes, format_seconds


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data(), st.sampled_from([0.5, 1.0, 1.25]))
def test_a_run_that_keeps_the_prediction_s_pace_is_off_by_that_pace(data: st.DataObject, slower: float) -> None:
    profile = data.draw(profiles())
    shown = overview_of(data.draw(plans(profile)), profile)
    told = beside(shown, recorded(shown, slower=slower, memory=1.5))
    pairs = [(told.iteration_s, slower)]
    for rank in told.ranks:
        pairs += [(rank.busy_s, slower), (rank.peak_memory_bytes, 1.5)]
    for pair, factor in pairs:
        if pair.predicted > 1000 or (pair.predicted and factor == slower):
            assert pair.off == pytest.approx(factor - 1, abs=1e-3)
    for rank, use in zip(told.ranks, shown.timeline.ranks, strict=True):
        assert (rank.busy_s.predicted, rank.peak_memory_bytes.predicted) == (use.busy_s, use.peak_memory_bytes)


def _linked(profile: Profile, name: ScheduleName, *, ranks: int, overlap: bool, seconds: float) -> Any:
    """An even cut whose messages take so long, all of it latency, over a chain whose ranks wait for many of them."""
    link = Link(latency_s=seconds, bandwidth_bytes_per_s=1e15)
    cluster = Cluster(
        links=ClusterLinks(intra_node=link, inter_node=link), overlap=overlap, memory_reserve_fraction=0.1
    )
    names = [layer.name for layer in profile.layers]
    each = len(names) // ranks
    cut = [names[place : place + each] for place in range(0, len(names), each)]
    return overview_of(fresh_plan(profile, cut, name=name, ranks=ranks, microbatches=6, cluster=cluster), profile)


@pytest.mark.parametrize("name", [ScheduleName.ONE_F_ONE_B, ScheduleName.ZB_H1])
def test_a_message_is_what_a_rank_waited_for_it(name: ScheduleName) -> None:
    """A run exactly as predicted measures each message as it was predicted; which were waited for, by a second way."""
    shown = _linked(chain_profile(8), name, ranks=4, overlap=True, seconds=0.003)
    told = beside(shown, recorded(shown, slower=1.0))
    waited = [0] * 4
    ends = [end for row in shown.timeline.ends_s for end in row]
    for message in shown.timeline.messages:
        busy = any(
            start < message.taken_s and end > message.handed_s
            for start, end in zip(
                shown.timeline.starts_s[message.to_rank], shown.timeline.ends_s[message.to_rank], strict=True
            )
        )
        waited[message.to_rank] += not busy
    assert len(ends) > sum(waited) > 0
    assert told.differences == ()
    assert [rank.waited for rank in told.ranks] == waited
    for rank in told.ranks:
        assert rank.message_s is not None
        assert rank.message_s.predicted == pytest.approx(0.003)
        assert rank.message_s.measured == pytest.approx(0.003)


def test_messages_that_lengthen_actions_are_predicted_by_their_link() -> None:
    shown = _linked(chain_profile(8), ScheduleName.ONE_F_ONE_B, ranks=4, overlap=False, seconds=0.003)
    told = beside(shown, recorded(shown, slower=1.0))
    assert told.message_s is not None
    assert told.message_s.predicted == pytest.approx(0.003)
    assert told.message_s.measured == pytest.approx(0.0, abs=1e-12)


def test_a_slower_stage_is_named() -> None:
    shown = _linked(chain_profile(8), ScheduleName.ONE_F_ONE_B, ranks=2, overlap=True, seconds=1e-5)
    profile = chain_profile(8)
    slow = dataclasses.replace(
        shown.plan,
        stages=(shown.plan.stages[0], dataclasses.replace(shown.plan.stages[1], forward_s=0.2)),
    )
    run = recorded(overview_of(slow, profile), slower=1.0)
    (stage,) = beside(shown, run).differences
    assert stage.startswith("stage 1 on rank 1 (block.4 to block.7): F ")


@pytest.mark.parametrize(("ranks", "name"), [(1, "1f1b"), (2, "1f1b"), (4, "zb-h1"), (16, "1f1b")])
def test_the_terminal_lays_them_side_by_side_on_one_screen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, name: str
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    profile = chain_profile(2 * ranks)
    cut = [[f"block.{2 * rank}", f"block.{2 * rank + 1}"] for rank in range(ranks)]
    plan = fresh_plan(profile, cut, name=ScheduleName(name), ranks=ranks, microbatches=8)
    path = save(plan, profile, tmp_path)
    shown = overview_of(plan, profile)
    run = recorded(shown, slower=1.5, memory=2.0)
    write_recording(tmp_path / "run.json", run, plan)
    answer = pipeplan("show", path, "--measured", tmp_path / "run.json")
    lines = [line.rstrip() for line in answer.out.splitlines()]
    assert (answer.code, answer.err) == (0, "")
    assert max(map(len, lines)) <= 80
    assert len(lines) < 24
    foretold, took = format_seconds(shown.timeline.iteration_s), format_seconds(run.iteration_s)
    assert f"iteration {foretold} predicted, {took} measured (+50.0 %)" in answer.out
    everything = pipeplan("show", path, "--measured", tmp_path / "run.json", "--all").out.splitlines()
    for use in shown.timeline.ranks:
        row = next(line for line in everything if line.split()[:1] == [str(use.rank)])
        for figure in (
            f"{format_seconds(use.busy_s)} {format_seconds(1.5 * use.busy_s)} +50.0 %",
            f"{format_bytes(use.peak_memory_bytes)} {format_bytes(2 * use.peak_memory_bytes)} +100.0 %",
        ):
            assert figure in " ".join(row.split())
        assert sum(line.lstrip().startswith(f"rank {use.rank} predicted ") for line in everything) == 1
    document = json.loads(pipeplan("show", path, "--measured", tmp_path / "run.json", "--json").out)
    assert document["measured"]["iteration_s"] == {
        "predicted": pytest.approx(shown.timeline.iteration_s),
        "measured": pytest.approx(run.iteration_s),
    }
    assert len(document["measured"]["ranks"]) == ranks
