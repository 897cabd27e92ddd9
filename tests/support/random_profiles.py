"""Random small profiles, and every cut and order of them, for brute force."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator

from planner.cluster import Cluster, ClusterLinks, Link, resolve
from planner.graph import LayerGraph, derive_stages, ties
from planner.profile import (
    Cost,
    Device,
    Edge,
    EdgeTensor,
    Layer,
    OptimizerCost,
    Profile,
    ProfiledModel,
    SharedParameter,
)
from planner.simulate import Job


def random_profile(
    rng: random.Random, *, chain: bool, most_layers: int = 8, sizes: tuple[int, ...] = (1, 2)
) -> Profile:
    """A profile with a few layers of uneven cost; a chain may have skips over it, and a DAG any edges at all."""
    count = rng.randint(1, most_layers)
    tied = {"tied": SharedParameter(bytes=rng.randint(1, 20), trainable=rng.random() < 0.8)}
    layers = []
    for index in range(count):
        parameter_bytes = rng.choice((0, 30, 60, 90))
        shared = tied if rng.random() < 0.15 and parameter_bytes >= 30 else None
        layers.append(
            Layer(
                name=f"l{index}",
                kind="random",
                modules=(),
                parameter_bytes=parameter_bytes,
                trainable_bytes=parameter_bytes,
                buffer_bytes=rng.randint(0, 3),
                costs=tuple(_cost(rng, size) for size in sizes),
                shared=shared,
            )
        )
    return Profile(
        model=ProfiledModel(name="random", source="random.py", fingerprint="0"),
        device=Device(kind="estimate", name="none", memory_bytes=0, software={}),
        provenance="estimated",
        dtype="float32",
        gradient_bytes_per_trainable_byte=1.0,
        optimizer=OptimizerCost(
            name="adam", state_bytes_per_trainable_byte=2.0, step_s_per_trainable_byte=rng.choice((0.0, 0.01))
        ),
        layers=tuple(layers),
        edges=tuple(_edges(rng, count, chain=chain)),
    )


def with_split_costs(profile: Profile, rng: random.Random) -> Profile:
    """The same where splitting a backward costs something, in most layers."""

    def dearer(cost: Cost) -> Cost:
        return dataclasses.replace(cost, split_s=rng.choice((None, 0.1, 0.5 * rng.random())))

    layers = (dataclasses.replace(one, costs=tuple(map(dearer, one.costs))) for one in profile.layers)
    return dataclasses.replace(profile, layers=tuple(layers))


def _cost(rng: random.Random, size: int) -> Cost:
    scale = size**0.8
    saved = rng.randint(0, 40) * size
    return Cost(
        microbatch_size=size,
        forward_s=rng.choice((0.0, 0.5, 1.0, 1.5, 3.0, rng.random())) * scale,
        backward_input_s=rng.choice((0.0, 0.5, 1.0, 2.0, rng.random())) * scale,
        backward_weight_s=rng.choice((0.0, 0.5, 1.0, 2.0, rng.random())) * scale,
        saved_bytes=saved,
        saved_for_weight_bytes=saved // 2,
        workspace_bytes=rng.randint(0, 10),
    )


def _edges(rng: random.Random, count: int, *, chain: bool) -> Iterator[Edge]:
    density = rng.choice((0.1, 0.3, 0.6))
    sizes = {index: rng.choice((0, 4, 10)) for index in range(count)}
    for source, target in itertools.combinations(range(count), 2):
        neighbours = target == source + 1
        if (chain and neighbours) or rng.random() < (0.1 if chain else density):
            tensor = EdgeTensor(
                name="x",
                bytes_per_sample=sizes[source],
                fixed_bytes=0,
                grad=rng.random() < 0.85,
                saved=rng.random() < 0.3,
            )
            yield Edge(source=f"l{source}", target=f"l{target}", tensors=(tensor,))


def random_cluster(rng: random.Random, *, memory: int | None) -> Cluster:
    """Free links or slow ones, one node or several, overlapping or not; ``memory`` without a reserve."""
    link = Link(latency_s=rng.choice((0.0, 0.1, 0.5)), bandwidth_bytes_per_s=rng.choice((10.0, 50.0)))
    slow = Link(latency_s=link.latency_s * 2, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s / 2)
    return Cluster(
        gpus_per_node=rng.choice((None, None, 2)),
        memory_bytes=memory,
        links=rng.choice((None, ClusterLinks(intra_node=link, inter_node=slow))),
        overlap=rng.random() < 0.75,
        memory_reserve_fraction=0.0,
    )


def all_cuts(graph: LayerGraph, num_stages: int) -> Iterator[list[list[str]]]:
    """Every cut of a graph into so many stages, none empty."""
    feeding: list[list[int]] = [[] for _ in graph.names]
    for source, target in graph.edges:
        feeding[target].append(source)

    def placed(stage_of: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        layer = len(stage_of)
        if num_stages - len(set(stage_of)) > len(graph) - layer:
            return
        if layer == len(graph):
            yield stage_of
            return
        for stage in range(max((stage_of[source] for source in feeding[layer]), default=0), num_stages):
            yield from placed((*stage_of, stage))

    for stage_of in placed(()):
        yield [[graph.names[i] for i in range(len(graph)) if stage_of[i] == k] for k in range(num_stages)]


def job_for(
    graph: LayerGraph,
    cut: list[list[str]],
    *,
    ranks: list[int],
    microbatch_size: int,
    num_microbatches: int,
    cluster: Cluster,
    data: int = 1,
    recompute: list[bool] | None = None,
) -> Job:
    """The job of a cut, as a plan of it would be simulated."""
    profile = graph.profile
    return Job(
        stages=derive_stages(graph, cut, ranks=ranks, microbatch_size=microbatch_size, recompute=recompute),
        num_ranks=max(ranks) + 1,
        num_microbatches=num_microbatches,
        data=data,
        cluster=resolve(cluster, profile),
        gradient_bytes_per_trainable_byte=profile.gradient_bytes_per_trainable_byte,
        state_bytes_per_trainable_byte=profile.optimizer.state_bytes_per_trainable_byte,
        step_s_per_trainable_byte=profile.optimizer.step_s_per_trainable_byte,
        ties=ties(graph, cut),
    )
