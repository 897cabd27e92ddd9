"""Measurements as a run would leave them, made of a prediction."""

from __future__ import annotations

from planner.report.overview import Overview
from planner.runtime.recording import RecordedRank, Recording
from planner.schedules import format_order


def recorded(
    shown: Overview, *, slower: float = 1.25, steps: int = 3, memory: float = 1.0, more_bytes: int = 0
) -> Recording:
    """Everything as predicted, ``slower`` times as long, with ``memory`` times the peak and some bytes more."""
    timeline = shown.timeline
    return Recording(
        fingerprint=shown.plan.model.fingerprint,
        steps=steps,
        iteration_s=timeline.iteration_s * slower,
        bubble_fraction=timeline.bubble_fraction,
        ranks=tuple(
            RecordedRank(
                rank=rank,
                actions=format_order(order),
                starts_s=tuple(start * slower for start in timeline.starts_s[rank]),
                ends_s=tuple(end * slower for end in timeline.ends_s[rank]),
                ended_s=timeline.iteration_s * slower,
                peak_memory_bytes=int(timeline.ranks[rank].peak_memory_bytes * memory) + more_bytes,
            )
            for rank, order in enumerate(timeline.schedule)
        ),
    )
