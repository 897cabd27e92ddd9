"""What a page's pictures are drawn from: plain data, times as whole ticks, long columns packed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from planner.errors import InputError
from planner.graph import LayerGraph
from planner.report.layers import LayerRow
from planner.report.overview import Overview
from planner.report.packed import packed
from planner.report.summary import named
from planner.runtime.recording import Recording

MOST_ACTIONS: Final = 1_000_000
"""Of a page; browsers draw so many in a second or two."""
MOST_ARCS: Final = 400
_TICKS: Final = 2**28
_LETTERS: Final = {letter: place for place, letter in enumerate("FBIW")}


def as_json(data: object) -> str:
    """JSON that can stand within a script of a page: no name in it ends the script, or starts another."""
    text = json.dumps(data, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    for letter in "<>&\u2028\u2029":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text


def plan_data(shown: Overview, recording: Recording | None = None) -> dict[str, Any]:
    """A plan's schedule and memory. Raises InputError where it has more actions than a page can hold."""
    timeline, plan = shown.timeline, shown.plan
    count = sum(map(len, timeline.schedule))
    if count > MOST_ACTIONS:
        raise InputError(
            f"the plan has {count} actions, and a page holds at most {MOST_ACTIONS}",
            hint="show it with --trace, or with fewer micro-batches",
        )
    peaks = [use.peak_memory_bytes for use in timeline.ranks]
    ends = [end for row in timeline.ends_s for end in row]
    starts = [start for row in timeline.starts_s for start in row]
    horizon = max(
        [timeline.iteration_s, *(rank.ended_s for rank in recording.ranks)] if recording else [timeline.iteration_s]
    )
    tick = horizon / _TICKS or 1.0
    unit = -(-max(peaks) // 2**30) or 1
    columns = _columns(shown, tick, unit)
    said: dict[str, Any] = {
        "num_ranks": shown.job.num_ranks,
        "num_microbatches": shown.job.num_microbatches,
        "virtual": plan.parallel.virtual,
        "iteration_s": timeline.iteration_s,
        "horizon_s": horizon or 1.0,
        "tick_s": tick,
        "memory_unit": unit,
        "limit_bytes": shown.limit_bytes,
        "peaks": peaks,
        "shortest_s": min((end - start for start, end in zip(starts, ends, strict=True) if end > start), default=0.0),
        "stages": [
            {
                "rank": stage.rank,
                "name": named(stage.layers, joint=" … "),
                "sends": [[entry.to_stage, entry.bytes] for entry in stage.sends],
                "returns": [[entry.to_stage, entry.bytes] for entry in stage.returns],
            }
            for stage in plan.stages
        ],
        "closings": [[rank, kind.value, what, start, end] for rank, kind, what, start, end in timeline.closings],
        "measured": None,
    }
    if recording is not None:
        columns["measured_start"] = [round(start / tick) for rank in recording.ranks for start in rank.starts_s]
        columns["measured_duration"] = [
            round(end / tick) - round(start / tick)
            for rank in recording.ranks
            for start, end in zip(rank.starts_s, rank.ends_s, strict=True)
        ]
        said["measured"] = {
            "iteration_s": recording.iteration_s,
            "peaks": [rank.peak_memory_bytes for rank in recording.ranks],
            "closings": [
                [rank.rank, "gradients and optimizer", "", rank.ends_s[-1], rank.ended_s]
                for rank in recording.ranks
                if rank.ends_s and rank.ended_s > rank.ends_s[-1]
            ],
        }
    return said | {"packed": packed(columns)}


def _columns(shown: Overview, tick: float, unit: int) -> dict[str, list[int]]:
    """Actions rank by rank; messages action by action; what each rank holds, rank by rank."""
    timeline = shown.timeline
    actions = [action for order in timeline.schedule for action in order]
    starts = [round(start / tick) for row in timeline.starts_s for start in row]
    ends = [round(end / tick) for row in timeline.ends_s for end in row]
    return {
        "actions": [len(order) for order in timeline.schedule],
        "stage": [action.stage for action in actions],
        "letter": [_LETTERS[action.letter] for action in actions],
        "microbatch": [action.microbatch for action in actions],
        "start": starts,
        "duration": [end - start for start, end in zip(starts, ends, strict=True)],
        "left": [round((message.left_s - message.handed_s) / tick) for message in timeline.messages],
        "travel": [round((message.arrived_s - message.left_s) / tick) for message in timeline.messages],
        "levels": [len(levels) for levels in timeline.memory],
        "level_time": [round(level.time_s / tick) for levels in timeline.memory for level in levels],
        "level_size": [level.bytes // unit for levels in timeline.memory for level in levels],
    }


def layers_data(
    graph: LayerGraph, rows: Sequence[LayerRow], *, microbatch_size: int, starts: Sequence[int]
) -> dict[str, Any]:
    """The layers in the order of ``rows``; ``starts``: where each stage begins; arcs: what is read beyond the next."""
    place = {row.name: position for position, row in enumerate(rows)}
    arcs: dict[tuple[int, int], int] = {}
    for made in graph.tensors:
        source = place[graph.names[made.source]]
        for reader in made.readers:
            target = place[graph.names[reader.layer]]
            if target > source + 1:
                arcs[source, target] = arcs.get((source, target), 0) + made.bytes(microbatch_size)
    largest = sorted(arcs.items(), key=lambda arc: -arc[1])[:MOST_ARCS]
    return {
        "names": [row.name for row in rows],
        "kinds": [row.kind for row in rows],
        "times": [
            [getattr(row, part) for row in rows] for part in ("forward_s", "backward_input_s", "backward_weight_s")
        ],
        "parameter_bytes": [row.parameter_bytes for row in rows],
        "saved_bytes": [row.saved_bytes for row in rows],
        "cut_bytes": [row.cut_bytes for row in rows],
        "starts": list(starts),
        "arcs": [[source, target, size] for (source, target), size in largest if size],
    }
