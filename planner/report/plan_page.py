"""A plan as a page; with a recording, as predicted and as measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from planner.cluster import Link
from planner.graph import Stage, Transfer
from planner.plan import Search
from planner.report.beside import Beside, Pair, beside
from planner.report.html import figure, profile_facts, provenance_notices, render, share_of, unbroken
from planner.report.layers import LayerRow, layer_rows, shape_of
from planner.report.overview import Overview
from planner.report.page_data import layers_data, plan_data
from planner.report.rivals import Rival, rivals_of
from planner.report.summary import bound_words, counted, memory_words, named, percent, shape_words
from planner.runtime.recording import Recording
from planner.schedules import Letter
from planner.units import format_bytes, format_rate, format_seconds

_LETTERS: Final = {
    Letter.FORWARD: "forward",
    Letter.BACKWARD: "backward (I and W in one)",
    Letter.BACKWARD_INPUT: "backward for the input's gradient",
    Letter.BACKWARD_WEIGHT: "backward for the weights' gradients",
}
_PLAN_PARTS: Final = (
    ("schedule", "Schedule"),
    ("memory-part", "Memory"),
    ("bubble", "Idle time"),
    ("cut", "Cuts"),
    ("stages", "Stages"),
    ("rivals", "Others"),
    ("facts", "Facts"),
)


def plan_page(shown: Overview, recording: Recording | None = None, notices: Sequence[str] = ()) -> str:
    """The page of a plan; with a recording, predicted and measured one above the other."""
    plan = shown.plan
    order = [name for stage in plan.stages for name in stage.layers]
    rows = layer_rows(
        shown.graph,
        microbatch_size=plan.batch.microbatch,
        tensor=plan.parallel.tensor,
        cluster=shown.job.cluster,
        order=order,
    )
    rivals = rivals_of(shown)
    run = None if recording is None else beside(shown, recording)
    starts = [sum(len(stage.layers) for stage in plan.stages[:number]) for number in range(len(plan.stages))]
    data = {
        "plan": plan_data(shown, recording),
        "layers": layers_data(shown.graph, rows, microbatch_size=plan.batch.microbatch, starts=starts),
    }
    return render(
        "plan.html",
        data,
        parts=_PLAN_PARTS,
        title=plan.model.name,
        subtitle=shape_words(shown),
        notices=[*_notices(shown, notices)],
        figures=[*_plan_figures(shown, run)],
        legend=_legend(shown),
        virtual=plan.parallel.virtual,
        sources=[*_sources(shown, recording)],
        measured=run is not None,
        messages=run is not None and run.message_s is not None,
        differences=[] if run is None else run.differences,
        fullest=shown.fullest,
        ranks=[*_ranks(shown, run)],
        memory_words=memory_words(shown),
        memory_label=f"What each rank holds over one iteration: at most {memory_words(shown)}",
        limit_heading="of the limit" if shown.limit_bytes is not None else "of the fullest",
        bubble=[*_bubble(shown)],
        bubble_words=_bubble_words(shown),
        bubble_label="; ".join(f"{part['name']} {part['percent']}" for part in _bubble(shown)),
        cut_words=_cut_words(shown, rows, starts),
        cut_label="The layers in the order of the stages, and what a cut behind each would send; with the cuts",
        stages=[*_stages(shown)],
        search_words=_search_words(shown),
        rivals_heading="Other plans" if _faster(shown, rivals) else "The plans that lost",
        faster=_faster(shown, rivals),
        rivals=[*_rivals(shown, rivals)],
        facts=[*_plan_facts(shown, recording), *profile_facts(shown.profile)],
    )


def _notices(shown: Overview, said: Sequence[str]) -> Iterator[dict[str, str]]:
    if not shown.fits:
        yield {"kind": "bad", "text": f"This plan does not fit: {memory_words(shown)}."}
    for text in said:
        yield {"kind": "bad", "text": text}
    yield from provenance_notices(shown.profile)


def _plan_figures(shown: Overview, run: Beside | None) -> Iterator[dict[str, Any]]:
    predicted, plan = shown.predicted, shown.plan
    seconds, bubble, peak, rate = "", "", "", ""
    if run is not None:
        seconds = _measured(run.iteration_s, format_seconds)
        rate = f"{format_rate(run.samples_per_s.measured)}/s"
        bubble = unbroken(percent(run.bubble_fraction.measured))
        peak = unbroken(format_bytes(max(rank.peak_memory_bytes.measured for rank in run.ranks)))
    yield figure("Iteration", format_seconds(predicted.iteration_s), bound_words(shown), measured=seconds)
    samples = f"{plan.batch.global_batch} an iteration"
    yield figure("Samples", f"{format_rate(predicted.samples_per_s)}/s", samples, measured=rate)
    idle = format_seconds(predicted.bubble_fraction * shown.timeline.makespan_s)
    yield figure("Idle", percent(predicted.bubble_fraction), f"{idle} a rank, on the mean", measured=bubble)
    use, limit = shown.timeline.ranks[shown.fullest], shown.limit_bytes
    note = f"on rank {use.rank}, " + (f"of {format_bytes(limit)}" if limit is not None else "no limit known")
    yield figure("Peak memory", format_bytes(use.peak_memory_bytes), note, measured=peak, bad=not shown.fits)
    depth = plan.schedule.warmup
    words = "its own order" if plan.actions else f"placement {plan.schedule.placement.value}"
    if depth:
        words = f"warm-up {' '.join(map(str, depth[:8]))}{' …' if len(depth) > 8 else ''}"
    yield figure("Schedule", plan.schedule.name.value, words)


def _measured(pair: Pair, show: Callable[[float], str]) -> str:
    """Figures and their units stay on one line."""
    off = "no prediction" if pair.off is None else percent(pair.off, signed=True)
    return " ".join(map(unbroken, (show(pair.measured), f"({off})")))


def _legend(shown: Overview) -> list[dict[str, str]]:
    used = {action.letter for order in shown.timeline.schedule for action in order}
    return [{"letter": letter.value, "words": words} for letter, words in _LETTERS.items() if letter in used]


def _sources(shown: Overview, recording: Recording | None) -> Iterator[dict[str, str]]:
    count = sum(map(len, shown.timeline.schedule))
    shape = f"{counted(shown.job.num_ranks, 'rank')}, {counted(count, 'action')}"
    seconds = format_seconds(shown.timeline.iteration_s)
    label = f"The schedule as predicted: {shape}, {seconds}"
    yield {"name": "predicted", "heading": f"Predicted, {seconds}", "label": label}
    if recording is not None:
        seconds, of = format_seconds(recording.iteration_s), counted(recording.steps, "step")
        label = f"The schedule as measured: {shape}, {seconds}"
        yield {"name": "measured", "heading": f"Measured, {seconds} (the median of {of})", "label": label}


def _ranks(shown: Overview, run: Beside | None) -> Iterator[dict[str, Any]]:
    limit, whole = shown.limit_bytes, shown.timeline.makespan_s
    most = limit if limit is not None else max(use.peak_memory_bytes for use in shown.timeline.ranks)
    for use in shown.timeline.ranks:
        busy, held = share_of(use.busy_s, whole), share_of(use.peak_memory_bytes, most)
        row = {
            "rank": use.rank,
            "stages": ", ".join(str(stage.stage) for stage in shown.plan.stages if stage.rank == use.rank),
            "busy": format_seconds(use.busy_s),
            "busy_share": busy,
            "busy_percent": percent(busy, 0),
            "peak": format_bytes(use.peak_memory_bytes),
            "peak_share": held,
            "peak_percent": percent(held, 0) if held >= 0.01 or not held else "< 1 %",
            "over": limit is not None and use.peak_memory_bytes > limit,
        }
        if run is not None:
            own = run.ranks[use.rank]
            row["measured_busy"] = _measured(own.busy_s, format_seconds)
            row["measured_peak"] = _measured(own.peak_memory_bytes, format_bytes)
            message = own.message_s
            row["message"] = "–" if message is None else format_seconds(message.predicted)
            row["measured_message"] = "–" if message is None else f"{format_seconds(message.measured)} ({own.waited})"
        yield row


def _bubble(shown: Overview) -> Iterator[dict[str, Any]]:
    bubble, whole = shown.bubble, shown.timeline.makespan_s
    busy = whole * (1 - shown.predicted.bubble_fraction)
    for kind, name, seconds, note in (
        ("busy", "Busy", busy, "the mean rank at work"),
        ("skew", "Ends", bubble.skew_s, "filling and draining: more micro-batches or more stages a rank shorten it"),
        ("imbalance", "Imbalance", bubble.imbalance_s, "ranks with less to do wait for the busiest: an evener cut"),
        ("links", "Links", bubble.links_s, "messages that are waited for: a deeper warm-up or faster links"),
        ("rest", "Order", bubble.rest_s, "what another order of actions could win at most"),
    ):
        share = share_of(seconds, whole)
        yield {
            "kind": kind,
            "name": name,
            "share": share,
            "percent": percent(share),
            "seconds": format_seconds(seconds),
            "note": note,
        }


def _bubble_words(shown: Overview) -> str:
    bubble = shown.bubble
    causes = {
        "filling and draining": bubble.skew_s,
        "ranks with less to do": bubble.imbalance_s,
        "messages that are waited for": bubble.links_s,
        "the order of actions": bubble.rest_s,
    }
    cause, seconds = max(causes.items(), key=lambda entry: entry[1])
    fraction = shown.predicted.bubble_fraction
    if not seconds:
        return "No rank is ever idle."
    share = percent(share_of(seconds, fraction * shown.timeline.makespan_s), 0)
    most = "all of it" if share == "100 %" else f"most of it, {share},"
    return f"A rank is idle {percent(fraction)} of the time until the last action ends; {most} comes from {cause}."


def _cut_words(shown: Overview, rows: Sequence[LayerRow], starts: Sequence[int]) -> str:
    if len(starts) == 1:
        return "There is one stage, so nothing is cut."
    sizes = [rows[start - 1].cut_bytes for start in starts[1:]]
    skips = shape_of(shown.graph) != "a chain"
    shape = " The layers stand in the order of the stages; arcs are tensors read further on." if skips else ""
    if len(sizes) == 1:
        return f"The cut sends {format_bytes(sizes[0])} a micro-batch.{shape}"
    least, most = format_bytes(min(sizes)), format_bytes(max(sizes))
    span = least if least == most else f"{least} to {most}"
    return f"{counted(len(sizes), 'cut')} send {span} a micro-batch each.{shape}"


def _stages(shown: Overview) -> Iterator[dict[str, Any]]:
    stages = shown.plan.stages
    loads = [stage.forward_s + stage.backward_input_s + stage.backward_weight_s for stage in stages]
    mean, most = sum(loads) / len(loads), max(loads)
    for stage, load in zip(stages, loads, strict=True):
        yield {
            "stage": stage.stage,
            "rank": stage.rank,
            "name": named(stage.layers, joint=" … "),
            "layers": stage.layers,
            "recompute": stage.recompute,
            "forward": format_seconds(stage.forward_s),
            "backward_input": format_seconds(stage.backward_input_s),
            "backward_weight": format_seconds(stage.backward_weight_s),
            "load_share": share_of(load, most),
            "load_percent": percent(share_of(load, mean), 0),
            "parameters": format_bytes(stage.parameter_bytes),
            "saved": format_bytes(stage.saved_bytes),
            "sends": _transfers(stage.sends, stage.rank, stages),
            "returns": _transfers(stage.returns, stage.rank, stages),
        }


def _transfers(entries: Sequence[Transfer], rank: int, stages: Sequence[Stage]) -> str:
    """What goes where. No bytes: to a stage of the same rank, or the rank that takes it has it already."""
    if not entries:
        return "–"
    if len(entries) <= 2:
        own, there = "same rank", "already there"
        words = [
            format_bytes(entry.bytes) if entry.bytes else own if stages[entry.to_stage].rank == rank else there
            for entry in entries
        ]
        return ", ".join(unbroken(f"{word} → {entry.to_stage}") for word, entry in zip(words, entries, strict=True))
    return f"{format_bytes(sum(entry.bytes for entry in entries))} → {len(entries)} stages"


def _search_words(shown: Overview) -> str:
    search = shown.plan.search
    counts = _counts(search) if search is not None else ""
    predicted = shown.predicted
    if predicted.bound_s is not None and predicted.gap is not None:
        counts += (
            f"No plan of what was asked for can take less than {format_seconds(predicted.bound_s)}: this one is "
            f"{percent(max(0.0, predicted.gap), 2)} over that. "
        )
    lost = search.lost if search is not None and predicted.bound_s is not None else None
    runners = "the search's runners-up (P pipeline ranks, D replicas, T tensor ranks, v stages a rank, b samples), "
    if lost is None:
        counts += "The file keeps no runners-up of its search, or they are of another batch, cluster or profile. "
    elif search is not None and not lost:
        counts += _why_none_lost(search)
    return (
        f"{counts}Below: {runners if lost else ''}the same cut under other schedules, and what is done by hand, under "
        "the same time model."
    )


def _counts(search: Search) -> str:
    """How many configurations there were, and what became of them."""
    if search.configurations is None:
        return ""
    words = f"The search looked at {counted(search.configurations, 'configuration')}"
    if search.solved is not None and search.pruned is not None:
        left = search.configurations - search.solved - search.pruned
        words += f", {search.solved} solved and {search.pruned} ruled out by their bound"
        words += f", {left} left" if left > 0 else ""
    return f"{words}, in {format_seconds(search.seconds)}. " if search.seconds is not None else f"{words}. "


def _why_none_lost(search: Search) -> str:
    if search.configurations == 1:
        return "There was no other. "
    if search.pruned is not None and search.pruned + 1 == search.configurations:
        return "All others were ruled out by their bound alone: none can be faster. "
    return "No other came as far as a plan that fits. "


def _faster(shown: Overview, rivals: Sequence[Rival]) -> str:
    """What is said where a plan that fits is faster than this one, as after an edit, or a narrower search."""
    better = [rival for rival in rivals if rival.fits and rival.iteration_s < shown.predicted.iteration_s * (1 - 1e-9)]
    if not better:
        return ""
    best = min(better, key=lambda rival: rival.iteration_s)
    won = 1 - best.iteration_s / shown.predicted.iteration_s
    solve = "solve again, without the options that left it out"
    kind, _, name = best.name.partition(": ")
    words = {"by hand": f"{name.capitalize()}, done by hand,", "search": f"A runner-up of the search, {name},"}.get(
        kind, f"The {best.name}"
    )
    return f"{words} would be {percent(won)} faster than this plan: {solve}, to get the best there is."


def _rivals(shown: Overview, rivals: Sequence[Rival]) -> Iterator[dict[str, Any]]:
    plan, predicted = shown.plan, shown.predicted
    own = Rival(
        name=f"this plan, {plan.schedule.name.value}",
        gpus=plan.parallel.gpus,
        microbatch_size=plan.batch.microbatch,
        num_microbatches=plan.batch.microbatches,
        iteration_s=predicted.iteration_s,
        bubble_fraction=predicted.bubble_fraction,
        peak_memory_bytes=shown.timeline.ranks[shown.fullest].peak_memory_bytes,
        fits=shown.fits,
    )
    longest = min(max(rival.iteration_s for rival in (own, *rivals)), 2 * own.iteration_s)  # of a bar
    for rival in (own, *rivals):
        ratio = share_of(rival.iteration_s, predicted.iteration_s)
        yield {
            "own": rival is own,
            "name": rival.name,
            "gpus": rival.gpus,
            "batch": f"{rival.microbatch_size} · {rival.num_microbatches}",
            "iteration": format_seconds(rival.iteration_s),
            "share": share_of(rival.iteration_s, longest),
            "ratio": f"{ratio:.3f}",
            "idle": percent(rival.bubble_fraction),
            "peak": format_bytes(rival.peak_memory_bytes),
            "fits": rival.fits,
        }


def _plan_facts(shown: Overview, recording: Recording | None) -> Iterator[tuple[str, str]]:
    plan, cluster = shown.plan, shown.job.cluster
    sizes, batch = plan.parallel, plan.batch
    yield "GPUs", f"{sizes.gpus} = {sizes.pipeline} pipeline · {sizes.data} data · {sizes.tensor} tensor"
    yield "Batch", f"{batch.global_batch} samples = {batch.microbatch} · {batch.microbatches} · {sizes.data}"
    limit = shown.limit_bytes
    if limit is not None:
        reserve = cluster.memory_reserve_fraction or 0.0
        yield "Memory limit", f"{format_bytes(limit)} a GPU, after {percent(reserve, 0)} kept back for the allocator"
    links = cluster.links
    within = _link(links.intra_node if links else None)
    between = _link(links.inter_node if links else None)
    if within == between:
        yield "Links", within
    else:
        yield "Links within a node", within
        yield "Links between nodes", between
    yield "Messages", "beside compute" if cluster.overlap is not False else "in place of compute"
    if cluster.gpus_per_node is not None:
        yield "Nodes", f"{cluster.gpus_per_node} GPUs each"
    if recording is not None:
        yield "Measured", f"medians of {counted(recording.steps, 'step')}"


def _link(link: Link | None) -> str:
    if link is None:
        return "not known, taken as free"
    return f"{format_seconds(link.latency_s)}, {format_bytes(link.bandwidth_bytes_per_s)}/s"
