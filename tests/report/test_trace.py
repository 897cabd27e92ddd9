"""The trace of an iteration, held against the trace event format's rules and against the plan, both read anew here."""

from __future__ import annotations

import dataclasses
import gzip
import json
import random
import tempfile
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.command import pipeplan, refused
from support.plans import chain_profile, fresh_plan, plans, profiles, save
from support.recordings import recorded

from planner.plan import Plan, schedule_of
from planner.report.overview import Overview, overview_of
from planner.report.trace import read_recording, write_recording, write_trace
from planner.runtime.recording import Recording, recording_of

NANOSECOND = 1e-3


def _events(path: Path) -> list[dict[str, Any]]:
    document = json.loads(path.read_text())
    assert isinstance(document["traceEvents"], list)
    return document["traceEvents"]


def check_format(events: list[dict[str, Any]]) -> None:
    """The rules of the trace event format that viewers depend on; times are microseconds."""
    assert {event["ph"] for event in events} <= set("MXCsf")
    named: set[tuple[int, int, str]] = set()
    slices: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        assert isinstance(event["pid"], int), event
        assert isinstance(event["tid"], int), event
        assert event["name"], event
        if event["ph"] == "M":
            assert (event["name"], *event["args"]) in {
                ("process_name", "name"),
                ("thread_name", "name"),
                ("process_sort_index", "sort_index"),
            }
            key = (event["pid"], event["tid"], event["name"])
            assert key not in named, "named once"
            named.add(key)
            continue
        assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
            assert (event["pid"], event["tid"], "thread_name") in named
            assert (event["pid"], 0, "process_name") in named
            slices[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        elif event["ph"] == "C":
            assert all(isinstance(value, int) for value in event["args"].values())
    timed = [event["ts"] for event in events if event["ph"] != "M"]
    assert timed == sorted(timed)
    for spans in slices.values():
        last = 0.0
        for start, end in sorted(spans):
            assert start >= last - NANOSECOND / 2, "what runs on one track does not overlap"
            last = end
    _check_flows(events, slices)


def _check_flows(events: list[dict[str, Any]], slices: dict[tuple[int, int], list[tuple[float, float]]]) -> None:
    """Each arrow has one start and one end, in order, each within a slice of its thread."""
    ends: dict[tuple[str, str, int], dict[str, dict[str, Any]]] = defaultdict(dict)
    for event in events:
        if event["ph"] in "sf":
            key = (event["cat"], event["name"], event["id"])
            assert event["ph"] not in ends[key], "an id has one start and one end"
            ends[key][event["ph"]] = event
    for pair in ends.values():
        assert set(pair) == {"s", "f"}
        assert pair["f"]["bp"] == "e"
        assert pair["s"]["ts"] <= pair["f"]["ts"] + NANOSECOND
        for event in pair.values():
            spans = slices[event["pid"], event["tid"]]
            assert any(start - NANOSECOND <= event["ts"] <= end + NANOSECOND for start, end in spans)


def _compute(events: list[dict[str, Any]], source: str) -> dict[str, dict[str, Any]]:
    """The slices of the ranks' actions, by name."""
    tracks = {(e["pid"], e["tid"]) for e in events if e["ph"] == "M" and e["args"].get("name") == f"compute, {source}"}
    found = [event for event in events if event["ph"] == "X" and (event["pid"], event["tid"]) in tracks]
    made = {event["name"]: event for event in found}
    assert len(made) == len(found), "an action runs once"
    return made


def _traced(shown: Overview, recording: Recording | None = None) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        write_trace(path, shown, recording)
        return _events(path)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_the_trace_of_any_plan_keeps_the_rules_and_says_what_the_plan_says(data: st.DataObject) -> None:
    profile = data.draw(profiles())
    plan = data.draw(plans(profile))
    events = _traced(overview_of(plan, profile))
    check_format(events)
    compute = _compute(events, "predicted")
    for rank, order in enumerate(schedule_of(plan)):
        own = sorted((e for e in compute.values() if e["pid"] == rank), key=lambda e: (e["ts"], e["ts"] + e["dur"]))
        assert {event["name"] for event in own} == set(map(str, order))
        assert plan.predicted is not None
        busy = sum(event["dur"] for event in own)
        assert busy == pytest.approx(plan.predicted.ranks[rank].busy_s * 1e6, abs=2 * NANOSECOND * len(own))
        levels = [e["args"]["bytes"] for e in events if e["ph"] == "C" and e["name"] == "memory" and e["pid"] == rank]
        assert max(levels) == plan.predicted.ranks[rank].peak_memory_bytes
    ended = max(event["ts"] + event["dur"] for event in events if event["ph"] == "X")
    assert plan.predicted is not None
    assert ended == pytest.approx(plan.predicted.iteration_s * 1e6, abs=2 * NANOSECOND)
    assert Counter(map(_ends, filter(lambda event: event["ph"] in "sf", events))) == _expected_ends(plan)


def _ends(event: dict[str, Any]) -> tuple[str, str, int]:
    return event["ph"], event["name"], event["pid"]


def _expected_ends(plan: Plan) -> Counter[tuple[str, str, int]]:
    """How many arrows of each kind leave and reach each rank: one a message with bytes and micro-batch."""
    made: Counter[tuple[str, str, int]] = Counter()
    for stage in plan.stages:
        for name, entries in (("activations", stage.sends), ("gradients", stage.returns)):
            for entry in entries:
                to_rank = plan.stages[entry.to_stage].rank
                if entry.bytes and to_rank != stage.rank:
                    made["s", name, stage.rank] += plan.batch.microbatches
                    made["f", name, to_rank] += plan.batch.microbatches
    return made


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_predicted_and_measured_load_together_under_the_same_ids(data: st.DataObject) -> None:
    profile = data.draw(profiles())
    shown = overview_of(data.draw(plans(profile)), profile)
    recording = recorded(shown, more_bytes=1)
    events = _traced(shown, recording)
    check_format(events)
    foretold, measured = _compute(events, "predicted"), _compute(events, "measured")
    assert foretold.keys() == measured.keys()
    for name, event in foretold.items():
        assert (event["pid"], event["args"]) == (measured[name]["pid"], measured[name]["args"])
        assert measured[name]["ts"] == pytest.approx(event["ts"] * 1.25, abs=2 * NANOSECOND)
    arrows: dict[str, set[tuple[Any, ...]]] = {"predicted": set(), "measured": set()}
    for event in events:
        if event["ph"] in "sf":
            arrows[event["cat"]].add((event["ph"], event["pid"], event["name"], event["id"]))
    assert arrows["predicted"] == arrows["measured"]


def test_a_recording_is_read_again_as_it_was(tmp_path: Path) -> None:
    profile = chain_profile(6)
    plan = fresh_plan(profile, [["block.0", "block.1"], ["block.2", "block.3"], ["block.4", "block.5"]], ranks=3)
    shown = overview_of(plan, profile)
    recording = recorded(shown, more_bytes=1)
    write_recording(tmp_path / "run.json", recording, plan)
    assert read_recording(tmp_path / "run.json") == recording
    check_format(_events(tmp_path / "run.json"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    profile = chain_profile(4)
    return save(fresh_plan(profile, [["block.0", "block.1"], ["block.2", "block.3"]], ranks=2), profile, tmp_path)


def _measured(path: Path, **changes: Any) -> Path:
    """A file of a measurement of the plan in ``path``, with some of it changed."""
    profile = chain_profile(4)
    plan = fresh_plan(profile, [["block.0", "block.1"], ["block.2", "block.3"]], ranks=2)
    recording = dataclasses.replace(recorded(overview_of(plan, profile)), **changes)
    write_recording(path.parent / "run.json", recording, plan)
    return path.parent / "run.json"


def test_show_writes_both_into_one_file(path: Path) -> None:
    answer = pipeplan("show", path, "--trace", path.parent / "t.json", "--measured", _measured(path))
    assert answer.code == 0
    events = _events(path.parent / "t.json")
    check_format(events)
    assert len(_compute(events, "predicted")) == len(_compute(events, "measured")) == 2 * 4 * 2


def test_a_packed_trace_is_the_same_and_is_read_again(path: Path) -> None:
    plain, packed, run = (path.parent / name for name in ("t.json", "t.json.gz", "run.json.gz"))
    run.write_bytes(gzip.compress(_measured(path).read_bytes()))
    for _ in range(2):
        for file in (plain, packed):
            assert pipeplan("show", path, "--trace", file, "--measured", run).code == 0
    assert gzip.decompress(packed.read_bytes()) == plain.read_bytes()
    packed.write_bytes(packed.read_bytes()[:-20])
    assert "is cut short" in refused(pipeplan("show", path, "--measured", packed))
    other = path.parent / "other.gz"
    for held in (b"mine", gzip.compress(b"mine")):
        other.write_bytes(held)
        assert "name another file with --trace" in refused(pipeplan("show", path, "--trace", other))
        assert other.read_bytes() == held


@pytest.mark.parametrize("fault", ["model", "actions", "ranks", "times", "backwards", "none", "format"])
def test_a_measurement_of_something_else_is_refused(path: Path, fault: str) -> None:
    file = _measured(path)
    document = json.loads(file.read_text())
    held = document["pipeplan"]
    match fault:
        case "model":
            held["fingerprint"] = "0" * 64
        case "actions":
            held["ranks"][1]["actions"] = held["ranks"][1]["actions"].replace("1F0 1B0", "1B0 1F0")
        case "ranks":
            held["ranks"].pop()
        case "times":
            held["ranks"][0]["starts_s"].pop()
        case "backwards":
            held["ranks"][0]["ends_s"][0] = held["ranks"][0]["starts_s"][0]
            held["ranks"][0]["starts_s"][0] = 1.0
        case "format":
            held["format"] = "pipeplan-recording/99"
        case _:
            del document["pipeplan"]
    file.write_text(json.dumps(document))
    assert "run.json" in refused(pipeplan("show", path, "--measured", file))


def test_a_profile_has_no_trace(path: Path) -> None:
    assert "no schedule" in refused(pipeplan("show", path.parent / "profile.json", "--trace", "t.json"))


def test_a_recording_is_the_median_step_from_its_first_action_on() -> None:
    """Made-up steps: a slow first one, which does not count, then one timeline at several paces.

    Rank 1 counts from a second later than rank 0, as the machine's clock tells.
    """
    profile = chain_profile(4)
    plan = fresh_plan(profile, [["block.0", "block.1"], ["block.2", "block.3"]], ranks=2)
    timeline = overview_of(plan, profile).timeline
    random.seed(0)
    begins = [0.0, 50.0, *(100.0 + 10 * step + random.random() for step in range(4))]
    steps = list(zip(begins, [9.0, 1.0, 0.5, 1.0, 2.0, 1.0], strict=True))
    told = [
        {
            "rank": rank,
            "starts": [[begin - rank + pace * start for start in timeline.starts_s[rank]] for begin, pace in steps],
            "stops": [[begin - rank + pace * end for end in timeline.ends_s[rank]] for begin, pace in steps],
            "ends": [begin - rank + pace * timeline.iteration_s for begin, pace in steps],
            "peak_memory_bytes": 100 + rank + replica,
            "clock_s": 1000.0 + rank,
        }
        for rank in range(2)
        for replica in range(2)
    ]
    made = recording_of(plan, timeline.schedule, told, iteration_s=7.0, bubble_fraction=0.5)
    assert (made.steps, made.iteration_s, made.bubble_fraction) == (5, 7.0, 0.5)
    for rank in made.ranks:
        assert rank.starts_s == pytest.approx(timeline.starts_s[rank.rank])
        assert rank.ends_s == pytest.approx(timeline.ends_s[rank.rank])
        assert rank.ended_s == pytest.approx(timeline.iteration_s)
        assert rank.peak_memory_bytes == 101 + rank.rank
