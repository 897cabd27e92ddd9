"""An iteration in Chrome's trace event format, for ui.perfetto.dev or chrome://tracing: predicted, measured or both.

    process  rank (pid = pipeline rank)
      thread   compute, predicted        the actions, named as in a plan: 3F0
      thread   compute, measured         the same names, beside them
      thread   send to rank 1            a message from when the link takes it until it has left
      thread   receive from rank 1       the same, latency later
      thread   after the backwards       all-reduces, tied parameters, the optimizer
      counter  memory

An arrow (flow) leads from the action that makes a message to the one that takes it in. The two sources have the same
pid, names and flow ids, in categories ``predicted`` and ``measured``. Times are microseconds, to the nanosecond. A file
whose name ends in .gz is packed, to about a ninth; viewers open it as it is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from planner.errors import InputError
from planner.files import as_record, plain, read_json, write_atomically
from planner.graph import Stage
from planner.plan import Plan
from planner.report.overview import Overview
from planner.runtime.recording import Recording
from planner.schedules import Action, Letter, parse_action
from planner.simulate import Passage, Timeline

FORMAT: Final = "pipeplan-trace/1"
PREDICTED: Final = "predicted"
MEASURED: Final = "measured"

_COMPUTE: Final = {PREDICTED: 0, MEASURED: 1}
_AFTER: Final = {PREDICTED: 2, MEASURED: 3}
_SEND: Final = 10_000
_RECEIVE: Final = 20_000

_WORDS: Final = {
    Letter.FORWARD: "forward",
    Letter.BACKWARD: "backward",
    Letter.BACKWARD_INPUT: "backward for the input",
    Letter.BACKWARD_WEIGHT: "backward for the weights",
}
_PHASES: Final = {"M": 0, "C": 1, "X": 2, "s": 3, "t": 4, "f": 5}
"""At one moment: names first, then levels, then what runs, then the arrows that bind to it."""

_Event = dict[str, Any]


def write_trace(path: Path, shown: Overview, recording: Recording | None = None) -> None:
    """Write what is predicted of a plan, and beside it what was measured."""
    events = [*_predicted(shown.timeline, shown.plan)]
    if recording is not None:
        events += _measured(recording, shown.plan)
    limit = shown.limit_bytes
    if limit is not None:
        last = shown.timeline.iteration_s
        for rank in range(shown.job.num_ranks):
            events += (_counter(rank, "memory limit", time_s, limit) for time_s in (0.0, last))
    _write(path, events, shown.plan, recording)


def write_recording(path: Path, recording: Recording, plan: Plan) -> None:
    """Write what a run measured as a trace of its own, which ``read_recording`` reads again."""
    _write(path, [*_measured(recording, plan)], plan, recording)


def read_recording(path: Path) -> Recording:
    """What a run measured, from the trace that it wrote. Raises InputError where the file holds none."""
    data = read_json(path)
    held = data.get("pipeplan") if isinstance(data, dict) else None
    if held is None:
        raise InputError(
            f"{path}: holds no measurement of pipeplan", hint="pipeplan run plan.yaml --trace FILE makes one"
        )
    return as_record(Recording, held, path=f"{path}: pipeplan")


def flow_id(action: Action, to_stage: int, *, num_stages: int, num_microbatches: int) -> int:
    """The number of a message: the same whoever draws it, and no other message's."""
    backwards = action.letter is not Letter.FORWARD
    place = (action.stage * num_stages + to_stage) * num_microbatches + action.microbatch
    return 2 * place + backwards + 1


# --- what is predicted ------------------------------------------------------------------------------------------------


def _predicted(timeline: Timeline, plan: Plan) -> Iterator[_Event]:
    stages = plan.stages
    for rank in range(len(timeline.schedule)):
        yield from _process(rank)
        yield _thread(rank, _COMPUTE[PREDICTED], "compute, predicted")
    span_of: dict[Action, tuple[float, float]] = {}
    for rank, action, start, end in timeline.spans():
        span_of[action] = start, end
        yield _compute(PREDICTED, rank, action, start, end, stages)
    yield from _messages(timeline, plan, span_of)
    for rank in sorted({closing.rank for closing in timeline.closings}):
        yield _thread(rank, _AFTER[PREDICTED], "after the backwards, predicted")
    for rank, kind, what, start, end in timeline.closings:
        name = f"{kind.value} {what}".strip()
        yield _slice(PREDICTED, rank, _AFTER[PREDICTED], name, start, end, {})
    for rank, levels in enumerate(timeline.memory):
        for level in levels:
            yield _counter(rank, "memory", level.time_s, level.bytes)


def _messages(timeline: Timeline, plan: Plan, span_of: Mapping[Action, tuple[float, float]]) -> Iterator[_Event]:
    """Each message on its link's two ends, and its arrow."""
    for low, high in sorted({(message.from_rank, message.to_rank) for message in timeline.messages}):
        yield _thread(low, _SEND + high, f"send to rank {high}")
        yield _thread(high, _RECEIVE + low, f"receive from rank {low}")
    free: dict[tuple[int, int], float] = {}
    for message in timeline.messages:
        pair = message.from_rank, message.to_rank
        begin = max(message.handed_s, free.get(pair, 0.0))
        free[pair] = message.left_s
        latency = message.arrived_s - message.left_s
        name = f"{message.action} to {message.to_stage}"
        told = {"bytes": message.bytes}
        yield _slice(PREDICTED, pair[0], _SEND + pair[1], name, begin, message.left_s, told)
        yield _slice(PREDICTED, pair[1], _RECEIVE + pair[0], name, begin + latency, message.arrived_s, told)
        yield from _arrow(PREDICTED, plan, message, sum(span_of[message.action]) / 2, message.taken_s)


# --- what was measured ------------------------------------------------------------------------------------------------


def _measured(recording: Recording, plan: Plan) -> Iterator[_Event]:
    span_of: dict[Action, tuple[int, float, float]] = {}
    for rank in recording.ranks:
        yield from _process(rank.rank)
        yield _thread(rank.rank, _COMPUTE[MEASURED], "compute, measured")
        yield _thread(rank.rank, _AFTER[MEASURED], "after the backwards, measured")
        for word, start, end in zip(rank.actions.split(), rank.starts_s, rank.ends_s, strict=True):
            action = parse_action(word)
            span_of[action] = rank.rank, start, end
            yield _compute(MEASURED, rank.rank, action, start, end, plan.stages)
        last = rank.ends_s[-1] if rank.ends_s else 0.0
        name = "gradients and optimizer"
        ended = max(last, rank.ended_s)
        yield _slice(MEASURED, rank.rank, _AFTER[MEASURED], name, last, ended, {})
        for time_s in (0.0, ended):
            yield _counter(rank.rank, "memory peak, measured", time_s, rank.peak_memory_bytes)
    yield from _measured_arrows(plan, span_of)


def _measured_arrows(plan: Plan, span_of: Mapping[Action, tuple[int, float, float]]) -> Iterator[_Event]:
    """From each action to those that read what it made, on other ranks; when it was on its way is not measured."""
    for action, (rank, start, end) in span_of.items():
        if action.letter is Letter.BACKWARD_WEIGHT:
            continue
        forward = action.letter is Letter.FORWARD
        stage = plan.stages[action.stage]
        for entry in stage.sends if forward else stage.returns:
            taker = _taker(entry.to_stage, action.microbatch, span_of, forward=forward)
            if not entry.bytes or taker is None or taker[0] == rank:
                continue
            passage = Passage(action, entry.to_stage, rank, taker[0], entry.bytes, end, end, taker[1], taker[1])
            yield from _arrow(MEASURED, plan, passage, (start + end) / 2, taker[1])


def _taker(
    stage: int, microbatch: int, span_of: Mapping[Action, tuple[int, float, float]], *, forward: bool
) -> tuple[int, float, float] | None:
    letters = (Letter.FORWARD,) if forward else (Letter.BACKWARD, Letter.BACKWARD_INPUT)
    found = (span_of.get(Action(stage, letter, microbatch)) for letter in letters)
    return next((span for span in found if span is not None), None)


# --- events -----------------------------------------------------------------------------------------------------------


def _compute(source: str, rank: int, action: Action, start: float, end: float, stages: tuple[Stage, ...]) -> _Event:
    names = stages[action.stage].layers
    told = {
        "what": _WORDS[action.letter],
        "stage": action.stage,
        "microbatch": action.microbatch,
        "layers": names[0] if len(names) == 1 else f"{names[0]} to {names[-1]} ({len(names)})",
    }
    return _slice(source, rank, _COMPUTE[source], str(action), start, end, told)


def _arrow(source: str, plan: Plan, message: Passage, made_s: float, taken_s: float) -> Iterator[_Event]:
    """From within the slice that makes a message to the start of the one that takes it in."""
    number = flow_id(
        message.action, message.to_stage, num_stages=len(plan.stages), num_microbatches=plan.batch.microbatches
    )
    name = "activations" if message.action.letter is Letter.FORWARD else "gradients"
    shared = {"name": name, "cat": source, "id": number, "tid": _COMPUTE[source]}
    yield {"ph": "s", **shared, "pid": message.from_rank, "ts": _microseconds(made_s)}
    yield {"ph": "f", "bp": "e", **shared, "pid": message.to_rank, "ts": _microseconds(taken_s)}


def _slice(source: str, rank: int, thread: int, name: str, start: float, end: float, told: dict[str, Any]) -> _Event:
    begun, ended = _microseconds(start), _microseconds(end)
    made = {
        "ph": "X", "name": name, "cat": source, "pid": rank, "tid": thread, "ts": begun,
        "dur": _short(max(0.0, round(ended - begun, 3))),
    }  # fmt: skip
    return made | {"args": told} if told else made


def _counter(rank: int, name: str, time_s: float, level: int) -> _Event:
    return {"ph": "C", "name": name, "pid": rank, "tid": 0, "ts": _microseconds(time_s), "args": {"bytes": level}}


def _process(rank: int) -> Iterator[_Event]:
    yield {"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "ts": 0, "args": {"name": f"rank {rank}"}}
    yield {"ph": "M", "name": "process_sort_index", "pid": rank, "tid": 0, "ts": 0, "args": {"sort_index": rank}}


def _thread(rank: int, thread: int, name: str) -> _Event:
    return {"ph": "M", "name": "thread_name", "pid": rank, "tid": thread, "ts": 0, "args": {"name": name}}


def _microseconds(seconds: float) -> float:
    return _short(round(seconds * 1e6, 3))


def _short(number: float) -> float:
    """A whole number without its point: large traces hold many."""
    return int(number) if number == int(number) else number


def _write(path: Path, events: list[_Event], plan: Plan, recording: Recording | None) -> None:
    named = {json.dumps(event): event for event in events if event["ph"] == "M"}
    timed = [event for event in events if event["ph"] != "M"]
    timed.sort(key=lambda event: (event["ts"], _PHASES[event["ph"]], -event.get("dur", 0.0)))
    document: dict[str, Any] = {
        "displayTimeUnit": "ms",
        "otherData": {
            "format": FORMAT,
            "costs": plan.profile.provenance,
            "model": plan.model.name,
            "schedule": plan.schedule.name.value,
        },
        "traceEvents": [*named.values(), *timed],
    }
    if recording is not None:
        document["pipeplan"] = plain(recording)
    head, _, tail = json.dumps(document | {"traceEvents": ["events"]}, allow_nan=False).partition('["events"]')
    lines = ",\n".join(json.dumps(event, allow_nan=False, separators=(",", ":")) for event in document["traceEvents"])
    write_atomically(path, f"{head}[\n{lines}\n]{tail}\n")
