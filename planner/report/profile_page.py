"""A profile as a page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from planner.graph import LayerGraph
from planner.profile import Profile
from planner.report.html import figure, profile_facts, provenance_notices, render, share_of
from planner.report.layers import LayerRow, distinct_parameters, shape_of
from planner.report.page_data import layers_data
from planner.report.summary import (
    accuracy_words,
    counted,
    dearest_words,
    link_words,
    percent,
    provenance_words,
)
from planner.units import format_bytes, format_rate, format_seconds

_PROFILE_PARTS: Final = (("cut", "Layers"), ("table", "Costs"), ("facts", "Facts"))


def profile_page(profile: Profile, rows: Sequence[LayerRow], *, microbatch_size: int) -> str:
    """The page of a profile at one micro-batch size."""
    graph = LayerGraph.of(profile)
    widest = max(rows, key=lambda row: row.cut_bytes)
    sizes = sorted({size for size, _ in graph.rows()})
    return render(
        "profile.html",
        {"layers": layers_data(graph, rows, microbatch_size=microbatch_size, starts=[])},
        parts=_PROFILE_PARTS,
        title=profile.model.name,
        subtitle=f"{counted(len(rows), 'layer')}, {provenance_words(profile)}, shown at micro-batch size "
        f"{microbatch_size} (it has {', '.join(map(str, sizes))})",
        notices=[*provenance_notices(profile)],
        figures=[*_profile_figures(rows, graph, microbatch_size)],
        cut_words=f"The {dearest_words(rows)}; no cut divides it. The widest cut lies behind "
        f"{widest.name}, {format_bytes(widest.cut_bytes)}.",
        cut_label="The layers in order: what each costs, and what a cut behind it would send",
        rows=[_layer(row, sum(row.load_s for row in rows)) for row in rows],
        facts=[
            *profile_facts(profile),
            *(("Link", words) for words in link_words(profile)),
            *(("Accuracy", words) for words in accuracy_words(profile, microbatch_size)),
        ],
    )


def _profile_figures(rows: Sequence[LayerRow], graph: LayerGraph, microbatch_size: int) -> Iterator[dict[str, Any]]:
    load = sum(row.load_s for row in rows)
    yield figure("Layers", str(len(rows)), shape_of(graph))
    yield figure("Parameters", format_bytes(distinct_parameters(graph)), "tied ones counted once")
    yield figure("F", format_seconds(sum(row.forward_s for row in rows)), "forward, all layers")
    yield figure("I", format_seconds(sum(row.backward_input_s for row in rows)), "backward for the input")
    yield figure("W", format_seconds(sum(row.backward_weight_s for row in rows)), "backward for the weights")
    yield figure("Samples", f"{format_rate(share_of(microbatch_size, load))}/s", "on one device, one after another")
    yield figure("Saved", format_bytes(sum(row.saved_bytes for row in rows)), "from F to B, all layers")


def _layer(row: LayerRow, whole_s: float) -> dict[str, Any]:
    return {
        "share": percent(share_of(row.load_s, whole_s)),
        "spread": "" if row.spread is None else f"±{percent(row.spread / 2)}",
        "shared": ", ".join(row.shared),
        "readers": ", ".join(f"{format_bytes(size)} → {name}" for name, size in row.readers),
        "name": row.name,
        "kind": row.kind,
        "whole_backward": row.whole_backward,
        "splits": ", ".join(str(size) for size in row.tensor if size > 1),
        "forward": format_seconds(row.forward_s),
        "backward_input": format_seconds(row.backward_input_s),
        "backward_weight": format_seconds(row.backward_weight_s),
        "parameters": format_bytes(row.parameter_bytes),
        "saved": format_bytes(row.saved_bytes),
        "saved_for_weight": format_bytes(row.saved_for_weight_bytes),
        "workspace": format_bytes(row.workspace_bytes),
        "cut": format_bytes(row.cut_bytes),
    }
