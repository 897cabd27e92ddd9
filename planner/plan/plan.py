"""The plan: cut, micro-batches, schedule, and what they are predicted to cost; a person may read and edit it."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from annotated_types import MinLen
from pydantic import Field

from planner.cluster import Cluster
from planner.graph.stage import Stage
from planner.profile import Provenance
from planner.record import Bytes, Count, Fraction, Index, Seconds, record
from planner.schedules.names import Placement, ScheduleName

FORMAT: Final = "pipeplan-plan/1"


@record
class PlannedModel:
    """The model that the plan is for; ``source`` is relative to the plan's folder."""

    name: str
    source: str
    fingerprint: str


@record
class PlannedProfile:
    """The profile that the plan was made from; ``path`` is relative to the plan's folder."""

    path: str
    sha256: str
    provenance: Provenance
    device: str


@record
class Batch:
    """Samples per optimizer step (G), per micro-batch (b), and micro-batches per replica (M): G = b · M · D."""

    global_batch: Annotated[Count, Field(alias="global")]
    microbatch: Count
    microbatches: Count


@record
class Parallel:
    """gpus = pipeline · data · tensor; ``virtual`` stages per pipeline rank.

    ``sequence``: between split ops each tensor rank holds a part of the tokens (sequence parallel).
    ``zero1``: each replica holds and steps 1/D of the optimizer's state (ZeRO-1); left out where it does not.
    """

    gpus: Count
    pipeline: Count
    virtual: Count
    data: Count
    tensor: Count
    sequence: bool | None = None
    zero1: bool | None = None


@record
class PlannedSchedule:
    """The schedule by name; ``warmup[r]``: forwards before rank r's first B or I, where the schedule has it."""

    name: ScheduleName
    placement: Placement
    warmup: tuple[Index, ...] | None = None


@record
class PredictedRank:
    """What the time model says of one pipeline rank."""

    rank: Index
    busy_s: Seconds
    peak_memory_bytes: Bytes


@record
class Predicted:
    """What the time model says of one iteration; gap = iteration_s / bound_s - 1."""

    iteration_s: Seconds
    samples_per_s: Fraction
    bubble_fraction: float
    bound_s: Seconds | None = None
    gap: float | None = None
    ranks: tuple[PredictedRank, ...]


@record
class LostPlan:
    """The best plan of another configuration that the search solved; its figures to six digits."""

    name: str
    gpus: Count
    microbatch: Count
    microbatches: Count
    iteration_s: Seconds
    bubble_fraction: float
    peak_memory_bytes: Bytes


@record
class Search:
    """How the plan was found. ``asked``: hash of global batch, cluster and profile that ``bound_s`` is proven for.

    ``lost``: plans of other configurations, which fit too, fastest first; true only of what ``asked`` names.
    """

    gpus: Count | None = None
    asked: str | None = None
    configurations: Index | None = None
    solved: Index | None = None
    pruned: Index | None = None
    proven: bool | None = None
    seconds: Seconds | None = None
    lost: tuple[LostPlan, ...] | None = None


@record
class Plan:
    """A whole plan file."""

    format: Literal["pipeplan-plan/1"] = FORMAT
    model: PlannedModel
    profile: PlannedProfile
    cluster: Cluster
    batch: Batch
    parallel: Parallel
    schedule: PlannedSchedule
    stages: Annotated[tuple[Stage, ...], MinLen(1)]
    actions: tuple[str, ...] | None = None
    predicted: Predicted | None = None
    search: Search | None = None
