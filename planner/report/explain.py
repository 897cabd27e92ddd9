"""Why this plan: the best plans beside what people do by hand, and what decides the winner, in lines a person reads."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.text import Text

from planner.cluster import memory_limit
from planner.graph import Stage
from planner.report.boundaries import REACH, boundaries_of
from planner.report.bubble import bubble_of
from planner.report.contest import best_by_schedule, contenders, frontier, is_bucketed
from planner.report.plans import candidates_table, legend, others, plans_table, stages_table, table
from planner.report.summary import named, short_run
from planner.schedules import ScheduleName
from planner.search import Candidate, Found
from planner.search.shortfall import memory_for
from planner.units import format_bytes, format_rate, format_seconds

_MOST_BOUNDARIES = 10
_NAME = 44
"""Letters of a run of layers in a sentence."""
_FEW_ACTIONS = 100_000
"""Simulated actions that looking for a leaner plan may take."""
_HARDLY, _MUCH = 0.03, 2 / 3
"""A plan is leaner that takes no more than so much longer, and holds no more than that part."""


def told(found: Found, *, explain: bool) -> Iterator[RenderableType]:
    """What ``solve`` says: the plans side by side and why the best is the best; at length where asked to explain."""
    yield plans_table(found)
    yield Text(legend(found), style="dim")
    yield ""
    yield from map(Text, why(found))
    if explain:
        yield from explained(found)


def explained(found: Found) -> Iterator[RenderableType]:
    """The cut stage by stage, where its time goes, what else was near."""
    best = found.best
    yield _heading("The cut")
    yield stages_table(best)
    yield Text(
        "k: stage (R: recomputes); F, B: forward and backward of a micro-batch; share: its load over the mean; "
        "sends: activations, a micro-batch; memory: its rank's peak",
        style="dim",
    )
    yield _heading("Where the time goes")
    yield from map(Text, _time_lines(found))
    if len(best.stages) > 1:
        yield from _boundaries(found)
    every = contenders(found)
    yield _heading("The best found under each schedule")
    yield candidates_table(found, best_by_schedule(found, every), first="schedule")
    yield from _tensor_sizes(found)
    yield _heading("Time against memory, of the plans looked at")
    yield candidates_table(found, frontier(found, every), first="plan")


def why(found: Found) -> Iterator[str]:
    """A few lines: how good it is, what is proven, what it is held up by, what it wins over."""
    yield _headline(found)
    yield from _proof(found)
    yield from _advice(found)
    yield from _tensor(found)
    yield _bottleneck(found)
    yield from _against_baselines(found)
    yield from _leaner(found)


def _headline(found: Found) -> str:
    best, shape = found.best, found.best.configuration
    rate = found.asked.global_batch / best.iteration_s if best.iteration_s else 0.0
    depth = f", warm-up {_depths(best.warmup)}" if best.warmup else ""
    copies = f"{shape.data} replicas of " if shape.data > 1 else ""
    split = f" of {shape.tensor} tensor ranks" if shape.tensor > 1 else ""
    each = f", {shape.virtual} a rank ({shape.placement.value})" if shape.virtual > 1 else ""
    if is_bucketed(best):
        each = ", the buckets of its sums over replicas"
    again = sum(stage.recompute for stage in best.stages)
    recompute = f", {again} of them recompute" if again else ""
    return (
        f"{counted(shape.gpus, 'GPU')}: {copies}{counted(len(best.stages), 'stage')}{split}{each}{recompute}, "
        f"{counted(shape.num_microbatches, 'micro-batch', 'es')} of {shape.microbatch_size}, {best.schedule.value}"
        f"{depth}: {format_seconds(best.iteration_s)} an iteration, {format_rate(rate)} samples/s"
    )


def _depths(warmup: tuple[int, ...]) -> str:
    """Warm-up depths, in short where they are many."""
    if len(warmup) <= 16:
        return " ".join(map(str, warmup))
    return f"{' '.join(map(str, warmup[:4]))} … {' '.join(map(str, warmup[-4:]))}"


def _proof(found: Found) -> Iterator[str]:
    names = [name for name in found.asked.schedules if name is not ScheduleName.SYNTHESISED]
    left = f", {found.left} left" if found.left else ""
    counts = (
        f"{counted(found.configurations, 'configuration')}: {found.solved} solved, {found.pruned} ruled out by their "
        f"bound{left}"
    )
    if found.proven:
        which = "the schedules searched" if len(names) > 3 else " or ".join(names) or "any named schedule"
        yield f"proven the best: no cut is faster under {which} at any warm-up depth ({counts})"
    elif found.interrupted:
        longer = "without Ctrl-C it goes on" if found.asked.max_seconds is None else "a longer --max-seconds goes on"
        yield f"not proven the best: the search was ended early, so a faster plan may be left ({counts}); {longer}"
    else:
        yield (
            f"not proven the best: there are more cuts and orders than were looked at ({counts}); "
            f"--effort {10 * found.asked.effort} looks at more, --pipeline, --virtual and --schedule ask for less"
        )
    least = f"no order of actions at all, on any cut, takes less than {format_seconds(found.bound_s)} (the bound)"
    if found.gap <= 1e-9:
        yield f"{least}: this plan takes that, there is nothing to win (the gap is 0)"
    else:
        yield f"{least}: there is at most {_percent(found.gap)} to win (the gap)"


def _percent(gap: float) -> str:
    """To the hundredth; what is less, as less."""
    return f"{gap:.2%}" if gap >= 5e-5 else "0.01%"


def _advice(found: Found) -> Iterator[str]:
    """Where the answer is not a pipeline over all GPUs."""
    asked, shape = found.asked, found.best.configuration
    if shape.gpus < asked.gpus:
        wider = next((one for one in found.alternatives if one.configuration.gpus > shape.gpus), None)
        more = (
            f": the best plan found with {wider.configuration.gpus} takes {format_seconds(wider.iteration_s)}"
            if wider
            else ""
        )
        yield f"use {shape.gpus} of the {asked.gpus} GPUs; more would not be faster{more}"
    if shape.pipeline > 1 or asked.pipeline == (1,):
        return
    piped = next(iter(others(found)), None)
    than = ""
    if piped is not None:
        count = piped.configuration.pipeline
        than = f" than any pipeline: the best one found ({count} ranks) takes {format_seconds(piped.iteration_s)}"
    if is_bucketed(found.best):
        yield (
            f"data parallel alone is faster{than or ' than a pipeline'}; this plan is that, its gradients summed in "
            f"{shape.virtual} buckets beside the work that is left, and runs as it is"
        )
    elif shape.data > 1:
        yield f"plain data parallel is faster{than or ' than a pipeline'}; this plan is that, and runs as it is"
    elif shape.gpus == 1 < asked.gpus:
        yield f"one GPU alone is faster{than or ' than a pipeline'}; this plan is that, and runs as it is"


def _by_tensor(found: Found) -> dict[int, Candidate]:
    """The fastest plan found with each number of tensor ranks."""
    best: dict[int, Candidate] = {}
    for candidate in sorted((found.best, *found.alternatives), key=lambda one: one.iteration_s):
        best.setdefault(candidate.configuration.tensor, candidate)
    return best


def _tensor(found: Found) -> Iterator[str]:
    """What splitting layers over tensor ranks buys, or would cost."""
    best = _by_tensor(found)
    size, whole = found.best.configuration.tensor, best.get(1)
    other = whole if size > 1 else next((one for split, one in sorted(best.items()) if split > 1), None)
    if other is not None:
        much = other.iteration_s / found.best.iteration_s if found.best.iteration_s else 1.0
        held = f"{format_bytes(found.best.peak_memory_bytes)} on the fullest GPU against"
        than = f"the best found with T = {other.configuration.tensor}"
        yield f"T = {size}: {much:.3g} times as fast as {than}, {held} {format_bytes(other.peak_memory_bytes)}"
    elif size > 1 and (found.asked.tensor is None or 1 in found.asked.tensor):
        yield f"T = {size}: no plan that leaves layers whole (T = 1) was found that fits and comes near"


_UNTIMED = ": its bound lies past the best, none fits, or GPUs are too few"


def _tensor_sizes(found: Found) -> Iterator[RenderableType]:
    """The best plan for each number of tensor ranks, where there are several to choose from."""
    asked, best = found.asked.tensor, _by_tensor(found)
    sizes = sorted({size for _, size in found.graph.rows() if asked is None or size in asked})
    if len(sizes) < 2:
        return
    yield _heading("The best found with each number of tensor ranks")
    yield candidates_table(found, [best[size] for size in sizes if size in best], first="schedule")
    for size in sizes:
        if size not in best:
            yield Text(f"T = {size}: none was timed{_UNTIMED if not found.interrupted else ' before the search ended'}")


def _bottleneck(found: Found) -> str:
    best = found.best
    slowest = max(best.timeline.ranks, key=lambda use: use.busy_s)
    own = [stage for stage in best.stages if stage.rank == slowest.rank]
    share = slowest.busy_s / best.iteration_s if best.iteration_s else 0.0
    layer, part = _largest_layer(found, own)
    held = ", ".join(f"stage {stage.stage} ({short_run(named(stage.layers), _NAME)})" for stage in own[:2])
    more = f" and {len(own) - 2} more" if len(own) > 2 else ""
    uneven = f"; it has {best.unevenness - 1:.1%} more to do than the mean rank" if len(best.timeline.ranks) > 1 else ""
    return (
        f"bottleneck: rank {slowest.rank}, {held}{more}, busy {share:.1%} of the iteration; its largest layer is "
        f"{short_run(layer, _NAME)}, {part:.0%} of its work{uneven}"
    )


def _largest_layer(found: Found, own: list[Stage]) -> tuple[str, float]:
    """The layer with the most work on a rank, and its share."""
    shape, graph = found.best.configuration, found.graph
    costs = graph.costs(microbatch_size=shape.microbatch_size, tensor=shape.tensor, cluster=found.asked.cluster)
    loads = {}
    for stage in own:
        for name in stage.layers:
            cost = costs[graph.index[name]]
            again = cost.forward_s if stage.recompute else 0.0
            loads[name] = cost.forward_s + again + cost.backward_input_s + cost.backward_weight_s
    name = max(loads, key=loads.__getitem__)
    return name, loads[name] / sum(loads.values()) if sum(loads.values()) else 0.0


def _against_baselines(found: Found) -> Iterator[str]:
    limit = memory_limit(found.asked.cluster)
    for baseline in found.baselines:
        if baseline.candidate is None or not found.best.iteration_s:
            continue
        times = baseline.candidate.iteration_s / found.best.iteration_s
        if not baseline.fits and limit is not None:
            over = baseline.candidate.peak_memory_bytes - limit
            yield f"{baseline.name}: does not fit, {format_bytes(over)} too much on one GPU"
        elif times > 1 + 1e-9:
            yield f"{times:.3g} times as fast as {baseline.name}"
        elif times < 1 - 1e-9:
            yield f"slower than {baseline.name} ({times:.3g} of this time), which was not asked for"
        else:
            yield f"as fast as {baseline.name}"


def _leaner(found: Found) -> Iterator[str]:
    """A plan that takes hardly longer and holds much less, where there is one."""
    best = found.best
    by_hand = [
        one.candidate
        for one in found.baselines
        if one.candidate is not None and one.fits and _was_asked(found, one.candidate)
    ]
    near = [
        one
        for one in (*contenders(found, most_actions=_FEW_ACTIONS), *by_hand)
        if one.iteration_s <= (1 + _HARDLY) * best.iteration_s
        and one.peak_memory_bytes < _MUCH * best.peak_memory_bytes
    ]
    if not near:
        return
    leaner = min(near, key=lambda one: (one.iteration_s, one.peak_memory_bytes))
    shape, over = leaner.configuration, leaner.iteration_s / best.iteration_s - 1
    reserve = found.asked.cluster.memory_reserve_fraction or 0.0
    split = f" T={shape.tensor}" if shape.tensor > 1 else ""
    sizes = f"P={shape.pipeline} D={shape.data}{split} v={shape.virtual} b={shape.microbatch_size}"
    recompute = ", recomputing" if any(stage.recompute for stage in leaner.stages) else ""
    yield (
        f"with less memory: {leaner.schedule.value} at {sizes}{recompute} takes {over:.1%} longer, the fullest rank "
        f"holds {format_bytes(leaner.peak_memory_bytes)} in place of {format_bytes(best.peak_memory_bytes)}; "
        f"--memory {memory_for(leaner.peak_memory_bytes, reserve)} keeps to that"
    )


def _was_asked(found: Found, candidate: Candidate) -> bool:
    """Whether the sizes of a plan are among those asked for: a baseline's may not be."""
    asked, shape = found.asked, candidate.configuration
    sizes = (
        (asked.pipeline, shape.pipeline),
        (asked.virtual, shape.virtual),
        (asked.data, shape.data),
        (asked.tensor, shape.tensor),
        (asked.microbatch, shape.microbatch_size),
    )
    return candidate.schedule in asked.schedules and all(some is None or size in some for some, size in sizes)


def _time_lines(found: Found) -> Iterator[str]:
    """The iteration in parts: work, and idle time by its cause."""
    best = found.best
    timeline, iteration = best.timeline, best.iteration_s
    if not iteration:
        yield "nothing takes any time"
        return
    bubble = bubble_of(best.job, timeline)
    mean = sum(use.busy_s for use in timeline.ranks) / len(timeline.ranks)
    parts = [
        ("work", mean, "a rank's mean time in actions"),
        ("ends", bubble.skew_s, "to fill the pipeline and to drain it"),
        ("imbalance", bubble.imbalance_s, "ranks with less to do wait for the busiest"),
        ("links", bubble.links_s, "waiting for messages: none were links free"),
        ("order", bubble.rest_s, "what is left to this order of actions"),
        ("after", iteration - timeline.makespan_s, "sums over replicas and ties, optimizer step"),
    ]
    for name, seconds, what in parts:
        if seconds > 1e-9 * iteration:
            yield f"{name:<10}{format_seconds(seconds):>9}{seconds / iteration:>8.1%}  {what}"


def _boundaries(found: Found) -> Iterator[RenderableType]:
    """What crosses at and near each boundary; where they are many, those that carry the most."""
    best = found.best
    size, homes = best.configuration.microbatch_size, [stage.rank for stage in best.stages]
    every = boundaries_of(found.graph, best.stages, microbatch_size=size, tensor=best.configuration.tensor)
    made = [one for one in every if homes[one.before_stage - 1] != homes[one.before_stage]]
    if not made:  # all on one rank: nothing crosses
        return
    shown = sorted(made, key=lambda one: -(one.bytes[REACH] or 0))[:_MOST_BOUNDARIES]
    shown.sort(key=lambda one: one.before_stage)
    rows = [
        (
            f"{one.before_stage - 1}|{one.before_stage}",
            one.after_layer,
            *("" if crossing is None else format_bytes(crossing) for crossing in one.bytes),
        )
        for one in shown
    ]
    steps = [f"{step:+}" if step else "here" for step in range(-REACH, REACH + 1)]
    left = f"; the {len(shown)} that carry most of {len(made)}" if len(shown) < len(made) else ""
    yield _heading("What crosses the boundaries")
    yield table(("cut", "after layer", *steps), [rows], layers="after layer")
    yield Text(
        f"bytes ahead, a micro-batch of {size}: here, and were the cut one or two layers earlier or later{left}",
        style="dim",
    )


def _heading(words: str) -> Text:
    return Text(f"\n{words}", style="bold")


def counted(count: int, word: str, plural: str = "s") -> str:
    """E.g. ``1 stage``, ``4 stages``."""
    return f"{count} {word}{'' if count == 1 else plural}"
