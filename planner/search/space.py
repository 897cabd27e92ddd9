"""What is searched: every configuration that was asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final

from planner.cluster import Cluster, check_tensor
from planner.errors import InputError
from planner.graph import LayerGraph
from planner.profile import tensor_sizes
from planner.record import record
from planner.schedules import MOST_FORWARDS, Placement, Schedule, ScheduleName, build

EVERY: Final = tuple(ScheduleName)
"""All schedules, synthesised orders among them."""
VIRTUAL: Final = (1, 2, 3, 4)
"""Stages a rank, where none are named."""


@record
class Asked:
    """What to search: None in a list of sizes means all that there are (virtual: up to VIRTUAL; tensor: all rows).

    ``gpus`` is the most; plans with fewer are searched too. ``schedules`` narrow what is named in the plan, never the
    bound. ``recompute``: auto (per stage, where it helps), none or all. ``zero1``: the optimizer is sharded over the
    replicas, of whose numbers there is then only one. ``effort``: how many times the usual number of
    cuts and orders may be looked at.
    """

    gpus: int
    global_batch: int
    cluster: Cluster
    schedules: tuple[ScheduleName, ...] = EVERY
    pipeline: tuple[int, ...] | None = None
    virtual: tuple[int, ...] | None = None
    data: tuple[int, ...] | None = None
    tensor: tuple[int, ...] | None = None
    microbatch: tuple[int, ...] | None = None
    recompute: str = "auto"
    zero1: bool = False
    effort: int = 1
    max_seconds: float | None = None


@record
class Configuration:
    """P ranks, D replicas, T tensor ranks, v stages a rank, micro-batches of b samples, M of them a replica."""

    pipeline: int
    data: int
    tensor: int
    virtual: int
    placement: Placement
    microbatch_size: int
    num_microbatches: int

    @property
    def gpus(self) -> int:
        """N = P · D · T."""
        return self.pipeline * self.data * self.tensor

    def with_ranks(self, ranks: int) -> Configuration:
        """The same with so many ranks of one stage each."""
        return dataclasses.replace(self, pipeline=ranks, virtual=1, placement=Placement.LOOP)

    def schedule(self, name: ScheduleName, warmup: tuple[int, ...] | None) -> Schedule:
        """The named schedule of this size, at these warm-ups (None: its own)."""
        return build(
            name,
            num_ranks=self.pipeline,
            virtual=self.virtual,
            num_microbatches=self.num_microbatches,
            placement=self.placement,
            warmup=warmup,
        )


def configurations(graph: LayerGraph, asked: Asked) -> tuple[Configuration, ...]:
    """Every configuration asked for that a plan may have, fewest GPUs and micro-batches first.

    Raises InputError where no measured micro-batch size divides the global batch, none was measured that is asked, or
    all would have more than MOST_FORWARDS.
    """
    rows = [(size, tensor) for size, tensor in graph.rows() if _tensor_asked(asked, tensor)]
    sizes = sorted({size for size, _ in rows})
    if not rows and asked.tensor is not None:
        fault, mend = tensor_left_out(graph, asked)[asked.tensor[0]]
        raise InputError(fault, hint=mend)
    if asked.microbatch is not None:
        missing = [size for size in asked.microbatch if size not in sizes]
        if missing:
            raise InputError(
                f"the profile has no costs at micro-batch size {missing[0]} for all layers (it has {_words(sizes)})",
                hint="profile the model at that size too, or ask for another one",
            )
        sizes = [size for size in sizes if size in asked.microbatch]
    made = tuple(
        Configuration(
            pipeline=ranks,
            data=data,
            tensor=tensor,
            virtual=virtual,
            placement=placement,
            microbatch_size=size,
            num_microbatches=asked.global_batch // (size * data),
        )
        for size, tensor in rows
        if size in sizes
        for data in copies_for(asked, size, tensor)
        for ranks in range(1, min(asked.gpus // (data * tensor), len(graph)) + 1)
        if asked.pipeline is None or ranks in asked.pipeline
        for virtual in asked.virtual or VIRTUAL
        if ranks * virtual <= len(graph)
        for placement in ((Placement.LOOP, Placement.V) if virtual == 2 and ranks > 1 else (Placement.LOOP,))
    )
    short = tuple(one for one in made if _forwards(one) <= MOST_FORWARDS)
    if made and not short:
        forwards, least = min(((_forwards(one), one) for one in made), key=lambda pair: pair[0])
        raise InputError(
            f"a global batch of {asked.global_batch} makes at least {forwards} forwards a step (data {least.data}, "
            f"micro-batch {least.microbatch_size}); at most {MOST_FORWARDS} are planned for",
            hint="choose a smaller --batch, or profile larger micro-batches",
        )
    if not short:
        fault, mend = _nothing(graph, asked, sizes, sorted({tensor for _, tensor in rows}))
        raise InputError(fault, hint=mend)
    return tuple(sorted(short, key=lambda c: (c.gpus, c.num_microbatches, c.pipeline, c.virtual, c.placement)))


def _forwards(configuration: Configuration) -> int:
    """Of all stages of a replica's pipeline in a step."""
    return configuration.pipeline * configuration.virtual * configuration.num_microbatches


def tensor_left_out(graph: LayerGraph, asked: Asked) -> dict[int, tuple[str, str]]:
    """The tensor sizes asked for, or profiled where none are, that no plan can have: why, and the mend."""
    sizes = asked.tensor or {*tensor_sizes.sizes_of(graph.profile), *tensor_sizes.left_out(graph.profile)}
    found = {}
    for size in sorted(sizes):
        reason = tensor_sizes.why_missing(graph.profile, size) or _no_room(asked, size)
        if reason is not None:
            found[size] = reason
    return found


def _no_room(asked: Asked, tensor: int) -> tuple[str, str] | None:
    """Why tensor groups of this size have no place on the GPUs asked for; they lie within a node."""
    if tensor > asked.gpus:
        return f"{tensor} tensor ranks are more than the {asked.gpus} GPUs asked for", "ask for fewer, or for more GPUs"
    try:
        check_tensor(asked.cluster, tensor)
    except InputError as error:
        return error.message, error.hint
    return None


def _tensor_asked(asked: Asked, tensor: int) -> bool:
    """Whether tensor groups of this size are to be searched."""
    return (asked.tensor is None or tensor in asked.tensor) and _no_room(asked, tensor) is None


def copies_for(asked: Asked, size: int, tensor: int) -> list[int]:
    """The numbers of replicas that part the global batch into whole micro-batches."""
    microbatches, rest = divmod(asked.global_batch, size)
    if rest:
        return []
    # Each replica has a micro-batch at least: many more GPUs than samples ask for no more numbers.
    most = min(asked.gpus // tensor, microbatches)
    numbers = range(1, most + 1) if asked.data is None else sorted({*asked.data})
    return [data for data in numbers if data <= most and microbatches % data == 0]


def _nothing(graph: LayerGraph, asked: Asked, sizes: Sequence[int], tensors: Sequence[int]) -> tuple[str, str]:
    """Why there is no configuration, and the mend."""
    copies = asked.data or (1,)
    if not any(asked.global_batch % (size * data) == 0 for size in sizes for data in copies):
        return (
            f"a global batch of {asked.global_batch} is no multiple of a micro-batch size that was measured "
            f"({_words(sizes)}) times the replicas ({_words(copies)})"
        ), "choose --batch so that it is"
    data = min(one for one in copies if any(asked.global_batch % (size * one) == 0 for size in sizes))
    ranks, virtual, tensor = min(asked.pipeline or (1,)), min(asked.virtual or (1,)), min(tensors)
    if (gpus := ranks * data * tensor) > asked.gpus:
        return (
            f"pipeline {ranks} · data {data} · tensor {tensor} is {gpus} GPUs, more than the {asked.gpus} of --gpus"
        ), "ask for less with --pipeline, --data or --tensor, or for more with --gpus"
    if ranks * virtual > len(graph):
        return (
            f"pipeline {ranks} · virtual {virtual} is {ranks * virtual} stages, more than the {len(graph)} layers"
        ), "no stage is empty: ask for less with --pipeline or --virtual"
    most = min(asked.gpus, len(graph))
    return (
        f"no pipeline size asked for ({_words(asked.pipeline or ())}) fits {asked.gpus} GPUs and {len(graph)} layers"
    ), f"ask for sizes from 1 to {most}"


def _words(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers)) or "none"


def largest_batch(graph: LayerGraph, gpus: int) -> int:
    """The default global batch where none is given: 8 · N · the largest measured micro-batch size."""
    return 8 * gpus * max(size for size, tensor in graph.rows() if tensor == 1)
