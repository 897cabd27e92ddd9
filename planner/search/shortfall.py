"""Where nothing fits: the plan that comes closest, what it lacks and where, and the smallest changes that would do.

Every change named has been tried: with it there is a plan that fits, found as ``leanest`` finds the closest one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator

from planner.cluster import memory_limit
from planner.errors import InputError, NothingFitsError
from planner.graph import LayerGraph
from planner.record import record
from planner.schedules import Placement, shape_fault
from planner.search.clock import never
from planner.search.lean import KnownFigures, fewest_ranks, leanest
from planner.search.result import Candidate
from planner.search.space import EVERY, Asked
from planner.units import format_bytes


@record
class Missing:
    """What a rank of the closest plan lacks; ``stage`` is its stage with the most in it."""

    rank: int
    stage: int
    bytes: int


class NoPlanFitsError(NothingFitsError):
    """No plan fits; with what the closest lacks, and the smallest change that would fit."""

    def __init__(
        self, message: str, *, hint: str, missing: tuple[Missing, ...], smallest_change: str, ended_early: bool
    ) -> None:
        super().__init__(message, hint=hint)
        self.missing = missing
        self.smallest_change = smallest_change
        self.ended_early = ended_early
        """Time ran out: a plan that was not looked at may fit."""


def no_plan_fits(
    graph: LayerGraph, asked: Asked, closest: Candidate, is_over: Callable[[], bool] = never
) -> NoPlanFitsError:
    """The error that says by how much the closest plan does not fit, and what would help.

    Where ``is_over`` says that time has run out it does not claim that none fits, and tries no more changes.
    """
    ended_early = is_over()
    limit = memory_limit(asked.cluster) or 0
    missing = tuple(
        Missing(rank=use.rank, stage=_fullest_stage(closest, use.rank), bytes=use.peak_memory_bytes - limit)
        for use in closest.timeline.ranks
        if use.peak_memory_bytes > limit
    )
    worst = max(missing, key=lambda entry: entry.bytes)
    change = f"it would fit with {' or '.join(_changes(graph, asked, closest, is_over))}"
    shape = closest.configuration
    stages = len(closest.stages)
    profile = graph.profile
    told = f" (all ESTIMATED for {profile.device.name}, nothing was measured there)"
    none = "no plan fits"
    if ended_early:
        none = f"no plan was found to fit within {asked.max_seconds:g} s, and not all were looked at"
    return NoPlanFitsError(
        f"{none}{told if profile.provenance == 'estimated' else ''}: at its closest "
        f"({stages} stage{'s' * (stages > 1)}, micro-batches of {shape.microbatch_size}) "
        f"rank {worst.rank}, stage {worst.stage}, needs {format_bytes(worst.bytes + limit)}, "
        f"{format_bytes(worst.bytes)} ({worst.bytes} bytes) more than the {format_bytes(limit)} that a rank may use",
        hint=f"a longer --max-seconds looks at more; {change}" if ended_early else change,
        missing=missing,
        smallest_change=change,
        ended_early=ended_early,
    )


def no_schedule_suits(asked: Asked) -> InputError:
    """The error where no schedule asked for can be made with any shape asked for."""
    names = " or ".join(asked.schedules)
    in_a_v = all(shape_fault(name, virtual=1, placement=Placement.LOOP) for name in asked.schedules)
    needs = "it needs two stages a rank on two ranks or more" if in_a_v else "ask for --virtual 1"
    return InputError(f"no shape asked for suits schedule {names}", hint=f"{needs}: leave out what narrows the shapes")


def _fullest_stage(closest: Candidate, rank: int) -> int:
    """The stage of a rank that holds the most: parameters with all that goes with them, and what it saves."""
    job = closest.job
    factor = 1 + job.gradient_bytes_per_trainable_byte + job.state_bytes_per_trainable_byte
    own = [stage for stage in closest.stages if stage.rank == rank]
    return max(own, key=lambda stage: factor * stage.parameter_bytes + stage.buffer_bytes + stage.saved_bytes).stage


def _changes(graph: LayerGraph, asked: Asked, closest: Candidate, is_over: Callable[[], bool]) -> Iterator[str]:
    """One option each that makes it fit: those that cost nothing first, then more GPUs, then more memory.

    Once time is over, memory alone, which is known.
    """
    limit = memory_limit(asked.cluster) or 0
    known: KnownFigures = {}
    for option, wider in _wider(asked):
        found = None if is_over() else _fitting(graph, wider, limit, known, is_over)
        if found is not None:
            yield f"{option} {_value(option, found)}"
    sharded = _sharded(graph, asked, limit, is_over)
    if sharded is not None:
        yield f"--zero1 --data {sharded}"
    more = None if is_over() else _more_gpus(graph, asked, limit, known, is_over)
    if more is not None:
        yield f"--gpus {more}"
    reserve = asked.cluster.memory_reserve_fraction or 0.0
    yield f"--memory {memory_for(closest.peak_memory_bytes, reserve)}"


def _wider(asked: Asked) -> Iterator[tuple[str, Asked]]:
    """What is asked for with one narrowing taken back."""
    if asked.recompute == "none":
        yield "--recompute", dataclasses.replace(asked, recompute="auto")
    if set(asked.schedules) != set(EVERY):
        yield "--schedule", dataclasses.replace(asked, schedules=EVERY)
    if asked.microbatch is not None:
        yield "--microbatch", dataclasses.replace(asked, microbatch=None)
    if asked.virtual is not None:
        yield "--virtual", dataclasses.replace(asked, virtual=None)
    if asked.pipeline is not None:
        yield "--pipeline", dataclasses.replace(asked, pipeline=None)
    if asked.data is not None and not asked.zero1:
        yield "--data", dataclasses.replace(asked, data=None)


def _sharded(graph: LayerGraph, asked: Asked, limit: int, is_over: Callable[[], bool]) -> int | None:
    """The fewest replicas over which the optimizer's state, sharded, makes a plan fit; None: none do."""
    optimizer = graph.profile.optimizer
    if asked.zero1 or not optimizer.state_bytes_per_trainable_byte:
        return None
    most = min(asked.gpus, asked.global_batch)
    for copies in asked.data or (copies for copies in range(2, most + 1) if asked.gpus % copies == 0):
        if copies > 1 and not is_over():
            profile = dataclasses.replace(graph.profile, optimizer=optimizer.sharded(copies))
            wider = dataclasses.replace(asked, zero1=True, data=(copies,))
            if _fitting(LayerGraph.of(profile), wider, limit, {}, is_over) is not None:
                return copies
    return None


def _value(option: str, found: Candidate) -> str:
    """What the option has to say for the plan that was found."""
    shape = found.configuration
    values = {
        "--recompute": "auto",
        "--schedule": found.schedule.value,
        "--microbatch": str(shape.microbatch_size),
        "--virtual": str(shape.virtual),
        "--pipeline": str(shape.pipeline),
        "--data": str(shape.data),
    }
    return values[option]


def _fitting(
    graph: LayerGraph, asked: Asked, limit: int, known: KnownFigures, is_over: Callable[[], bool]
) -> Candidate | None:
    """The leanest plan of what is asked for, if it fits."""
    try:
        found = leanest(graph, asked, enough_bytes=limit, known=known, whole=False, is_over=is_over)
    except InputError:  # no shape at all
        return None
    return found if found is not None and found.peak_memory_bytes <= limit else None


def _more_gpus(
    graph: LayerGraph, asked: Asked, limit: int, known: KnownFigures, is_over: Callable[[], bool]
) -> int | None:
    """The fewest GPUs found that fit; None: not even one for each layer does, or the sizes asked for leave no room.

    From an estimate on, up until a plan does fit.
    """
    copies = min(asked.data or (1,))
    most = max(asked.gpus, len(graph)) * copies * min(asked.tensor or (1,))

    def asked_with(gpus: int) -> Asked:
        return dataclasses.replace(asked, gpus=gpus)

    ranks = fewest_ranks(graph, asked_with(most), limit, known)
    if not math.isfinite(ranks) or (asked.pipeline is not None and ranks > max(asked.pipeline)):
        return None
    gpus, step = max(asked.gpus + 1, int(ranks) * copies), 1
    while gpus <= most:
        if _fitting(graph, asked_with(gpus), limit, known, is_over) is not None:
            return gpus
        if gpus == most or is_over():
            return None
        gpus, step = min(gpus + step, most), 2 * step
    return None


def memory_for(peak_bytes: int, reserve: float) -> str:
    """An amount of memory of which, less the reserve, so much is left, as --memory takes it."""
    size = math.ceil(peak_bytes / (1 - reserve))
    while int(size * (1 - reserve)) < peak_bytes:
        size += 1
    mebi = 1024**2
    return f"{math.ceil(size / mebi)}MiB" if size >= mebi else str(size)
