"""Random jobs: stages over a chain or a DAG, with exact times (multiples of 1/8), links, memory, replicas, ties."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import strategies as st

from planner.cluster import Cluster, ClusterLinks, Link
from planner.graph.stage import Stage, Transfer
from planner.schedules import Placement, ranks_of
from planner.simulate import Job, Tie

Shape = tuple[int, int, Placement]
"""P, v, placement."""

eighths = st.integers(0, 24).map(lambda count: count / 8)
sizes = st.sampled_from((0, 0, 8, 64, 100, 1000))


def chain_job(
    num_ranks: int,
    num_microbatches: int,
    *,
    virtual: int = 1,
    placement: Placement = Placement.LOOP,
    forward_s: float = 1.0,
    backward_input_s: float = 1.0,
    backward_weight_s: float = 1.0,
    link: Link | None = None,
    message_bytes: int = 8,
) -> Job:
    """Equal stages in a row, a rank's times spread over its v stages."""
    ranks = ranks_of(num_ranks, virtual, placement)
    last = len(ranks) - 1
    stages = tuple(
        Stage(
            stage=stage,
            rank=rank,
            layers=(f"layer{stage}",),
            forward_s=forward_s / virtual,
            backward_input_s=backward_input_s / virtual,
            backward_weight_s=backward_weight_s / virtual,
            parameter_bytes=0,
            trainable_bytes=0,
            buffer_bytes=0,
            input_bytes=0,
            saved_bytes=1,
            saved_for_weight_bytes=0,
            workspace_bytes=0,
            sends=(Transfer(to_stage=stage + 1, bytes=message_bytes),) if stage < last else (),
            returns=(Transfer(to_stage=stage - 1, bytes=message_bytes),) if stage else (),
        )
        for stage, rank in enumerate(ranks)
    )
    return Job(
        stages=stages,
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        cluster=Cluster(links=ClusterLinks(intra_node=link, inter_node=link), overlap=True),
        gradient_bytes_per_trainable_byte=0.0,
        state_bytes_per_trainable_byte=0.0,
        step_s_per_trainable_byte=0.0,
    )


@st.composite
def jobs(
    draw: st.DrawFn,
    *,
    shapes: st.SearchStrategy[Shape],
    max_microbatches: int = 8,
    closing: bool = True,
    chain: bool | None = None,
) -> Job:
    """A job of a given shape; ``closing``: with replicas, ties and an optimizer; ``chain`` None: either."""
    num_ranks, virtual, placement = draw(shapes)
    ranks = ranks_of(num_ranks, virtual, placement)
    if chain is None:
        chain = draw(st.integers(0, 3)) == 0
    sends, returns = _transfers(draw, ranks, chain)
    stages = tuple(
        Stage(
            stage=stage,
            rank=rank,
            layers=(f"layer{stage}",),
            recompute=draw(st.booleans()),
            forward_s=draw(eighths),
            backward_input_s=draw(eighths),
            backward_weight_s=draw(eighths),
            split_s=draw(st.sampled_from((None, None, 0.125, 1.0))),
            parameter_bytes=1000 + draw(sizes),
            trainable_bytes=1000,
            buffer_bytes=draw(sizes),
            input_bytes=draw(sizes),
            saved_bytes=draw(sizes),
            saved_for_weight_bytes=draw(sizes),
            workspace_bytes=draw(sizes),
            sends=sends[stage],
            returns=returns[stage],
        )
        for stage, rank in enumerate(ranks)
    )
    return Job(
        stages=stages,
        num_ranks=num_ranks,
        num_microbatches=draw(st.integers(1, max_microbatches)),
        data=draw(st.sampled_from((1, 1, 2, 4))) if closing else 1,
        tensor=draw(st.sampled_from((1, 2))),
        cluster=draw(_clusters()),
        gradient_bytes_per_trainable_byte=draw(st.sampled_from((0.5, 1.0))),
        state_bytes_per_trainable_byte=2.0,
        step_s_per_trainable_byte=draw(st.sampled_from((0.0, 2.0**-10))) if closing else 0.0,
        ties=_ties(draw, len(ranks)) if closing else (),
    )


def _transfers(
    draw: st.DrawFn, ranks: tuple[int, ...], chain: bool
) -> tuple[list[tuple[Transfer, ...]], list[tuple[Transfer, ...]]]:
    """Sends and returns of random tensors, each with one source and some later readers."""
    ahead: list[dict[int, int]] = [{} for _ in ranks]
    back: list[dict[int, int]] = [{} for _ in ranks]
    last = len(ranks) - 1
    tensors = [(stage, {stage + 1}) for stage in range(last) if chain or draw(st.integers(0, 3))]
    for _ in range(0 if chain or not last else draw(st.integers(1, 5))):
        source = draw(st.integers(0, last - 1))
        tensors.append((source, draw(st.sets(st.integers(source + 1, last), min_size=1, max_size=4))))
    for source, readers in tensors:
        size = draw(sizes)
        served = {ranks[source]}
        for reader in sorted(readers):
            ahead[source][reader] = ahead[source].get(reader, 0) + (0 if ranks[reader] in served else size)
            served.add(ranks[reader])
        if draw(st.integers(0, 4)):
            hops = [source, *sorted(readers)]
            for low, high in pairwise(hops):
                back[high][low] = back[high].get(low, 0) + (0 if ranks[high] == ranks[low] else size)
    return (
        [tuple(Transfer(to_stage=goal, bytes=row[goal]) for goal in sorted(row)) for row in ahead],
        [tuple(Transfer(to_stage=goal, bytes=row[goal]) for goal in sorted(row, reverse=True)) for row in back],
    )


@st.composite
def _links(draw: st.DrawFn) -> Link:
    return Link(latency_s=draw(eighths), bandwidth_bytes_per_s=2.0 ** draw(st.integers(3, 8)))


@st.composite
def _clusters(draw: st.DrawFn) -> Cluster:
    free = draw(st.integers(0, 4)) == 0
    return Cluster(
        gpus_per_node=draw(st.sampled_from((None, 2, 4))),
        links=ClusterLinks(intra_node=None if free else draw(_links()), inter_node=None if free else draw(_links())),
        overlap=draw(st.sampled_from((True, True, True, False))),
        memory_reserve_fraction=0.1,
    )


def _ties(draw: st.DrawFn, num_stages: int) -> tuple[Tie, ...]:
    return tuple(
        Tie(
            name=name,
            bytes=256,
            trainable=draw(st.booleans()),
            stages=tuple(sorted(draw(st.sets(st.integers(0, num_stages - 1), min_size=2, max_size=3)))),
        )
        for name in draw(st.sets(st.sampled_from("abc")))
        if num_stages > 1
    )
