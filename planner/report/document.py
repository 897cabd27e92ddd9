"""What ``pipeplan show --json`` prints: every figure that the terminal and the page show, as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from planner.files import plain
from planner.profile import Profile
from planner.report.beside import beside
from planner.report.layers import LayerRow, layer_rows
from planner.report.overview import Overview
from planner.runtime.recording import Recording


def plan_document(shown: Overview, recording: Recording | None = None) -> dict[str, Any]:
    """A plan: its file's parts, with ``predicted`` as it follows now, and where the idle time comes from.

    With a recording also ``measured``: each figure as {predicted, measured}.
    """
    plan = shown.plan
    rows = layer_rows(
        shown.graph,
        microbatch_size=plan.batch.microbatch,
        tensor=plan.parallel.tensor,
        cluster=shown.job.cluster,
        order=[name for stage in plan.stages for name in stage.layers],
    )
    said = plain(plan)
    measured = {} if recording is None else {"measured": plain(beside(shown, recording))}
    return {
        "kind": "plan",
        **{key: said[key] for key in ("model", "profile", "cluster", "batch", "parallel", "schedule", "stages")},
        "predicted": {"bound_s": None, "gap": None, **plain(shown.predicted)},
        "bubble": plain(shown.bubble),
        "memory_limit_bytes": shown.limit_bytes,
        "fits": shown.fits,
        "proven": shown.proven,
        "search": said.get("search"),
        "layers": [_layer(row) for row in rows],
        **measured,
    }


def profile_document(profile: Profile, rows: Sequence[LayerRow], *, microbatch_size: int) -> dict[str, Any]:
    """A profile at one micro-batch size."""
    said = plain(profile)
    kept = ("model", "device", "provenance", "dtype", "global_batch", "optimizer", "links", "accuracy")
    return {
        "kind": "profile",
        **{key: said.get(key) for key in kept},
        "microbatch_size": microbatch_size,
        "microbatch_sizes": sorted({cost.microbatch_size for layer in profile.layers for cost in layer.costs}),
        "layers": [_layer(row) for row in rows],
    }


def _layer(row: LayerRow) -> dict[str, Any]:
    made: dict[str, Any] = plain(row)
    return made | {"readers": [{"layer": name, "bytes": size} for name, size in row.readers]}
