"""Tensor ranks in the search: the plan over every T is the best of a search for each T, on profiles made by hand.

A group of T GPUs that share their layers acts as one GPU with other costs: those of the rows of T, the sums over the
group added by their formula. So a search of that profile on N / T GPUs, and brute force over it, say what T gives.
"""

from __future__ import annotations

import dataclasses
import math
import random
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from support.brute_force import NAMES, fitting_s, jobs, schedules, shapes
from support.random_profiles import random_cluster, random_profile

from planner.cluster import Cluster, ClusterLinks, Link, resolve
from planner.errors import InputError, NothingFitsError
from planner.graph import LayerGraph
from planner.profile import Collective, Collectives, Cost, Layer, Profile, read_profile
from planner.report.explain import told
from planner.search import Asked, Found, solve
from planner.search.each_tensor import with_each_tensor_size
from planner.simulate import Walk
from planner.units import format_seconds

TENSOR = (1, 2, 4)


def with_tensor_rows(rng: random.Random, profile: Profile) -> Profile:
    """Rows for every T: all of a layer a T-th, or nothing of it; sums over the ranks where it is split."""

    def row(layer: Layer, cost: Cost, size: int, share: float) -> Cost:
        def sums() -> Collective:
            return (
                Collective(count=rng.randint(0, 2), bytes=rng.randint(0, 30))
                if share < 1
                else Collective(count=0, bytes=0)
            )

        return dataclasses.replace(
            cost,
            tensor=size,
            forward_s=cost.forward_s * share,
            backward_input_s=cost.backward_input_s * share,
            backward_weight_s=cost.backward_weight_s * share,
            saved_bytes=int(cost.saved_bytes * share),
            saved_for_weight_bytes=int(cost.saved_for_weight_bytes * share),
            parameter_bytes=int(layer.parameter_bytes * share),
            trainable_bytes=int(layer.trainable_bytes * share),
            buffer_bytes=layer.buffer_bytes,
            shared_bytes={name: int(one.bytes * share) for name, one in (layer.shared or {}).items()} or None,
            collectives=Collectives(forward=sums(), backward_input=sums()),
        )

    layers = []
    for layer in profile.layers:
        parts = {size: 1 / size if layer.shared or rng.random() < 0.8 else 1.0 for size in TENSOR[1:]}
        rows = [row(layer, cost, size, share) for size, share in parts.items() for cost in layer.costs]
        layers.append(dataclasses.replace(layer, costs=(*layer.costs, *rows)))
    return dataclasses.replace(profile, layers=tuple(layers))


def as_one_gpu(profile: Profile, size: int, cluster: Cluster) -> Profile:
    """The profile of a group of ``size`` GPUs as if it were one."""
    link = cluster.links.intra_node if cluster.links is not None else None

    def summed_s(calls: Collective) -> float:
        if link is None:
            return 0.0
        return 2 * (size - 1) * (calls.count * link.latency_s + calls.bytes / size / link.bandwidth_bytes_per_s)

    layers = []
    for layer in profile.layers:
        rows = [cost for cost in layer.costs if cost.tensor == size]
        assert all(row.collectives is not None for row in rows)
        shared = {
            name: dataclasses.replace(one, bytes=(rows[0].shared_bytes or {})[name])
            for name, one in (layer.shared or {}).items()
        }
        layers.append(
            dataclasses.replace(
                layer,
                parameter_bytes=rows[0].parameter_bytes or 0,
                trainable_bytes=rows[0].trainable_bytes or 0,
                buffer_bytes=rows[0].buffer_bytes or 0,
                shared=shared or None,
                costs=tuple(
                    dataclasses.replace(
                        row,
                        tensor=1,
                        forward_s=row.forward_s + summed_s(row.collectives.forward),
                        backward_input_s=row.backward_input_s + summed_s(row.collectives.backward_input),
                        **dict.fromkeys(("parameter_bytes", "trainable_bytes", "buffer_bytes", "shared_bytes"), None),
                        collectives=None,
                    )
                    for row in rows
                    if row.collectives is not None
                ),
            )
        )
    return dataclasses.replace(profile, layers=tuple(layers))


def found_for(profile: Profile, asked: Asked) -> Found | None:
    try:
        return solve(profile, asked)
    except (NothingFitsError, InputError):
        return None


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 60))])
def test_the_best_over_every_tensor_size_is_the_best_of_each(seed: int) -> None:
    rng = random.Random(seed)
    plain = random_profile(rng, chain=rng.random() < 0.6, most_layers=4, sizes=(1, 2))
    profile = with_tensor_rows(rng, plain)
    memory = rng.choice((None, int(10 ** rng.uniform(2, 3))))
    cluster = dataclasses.replace(random_cluster(rng, memory=memory), gpus_per_node=None)
    asked = Asked(gpus=4, global_batch=4, cluster=resolve(cluster, profile), virtual=(1, 2), schedules=NAMES)
    found = found_for(profile, asked)
    each: dict[int, Found | None] = {1: found_for(plain, asked)}
    for size in TENSOR[1:]:
        alone = dataclasses.replace(asked, gpus=asked.gpus // size)
        each[size] = found_for(as_one_gpu(profile, size, asked.cluster), alone)
    times = {size: one.best.iteration_s for size, one in each.items() if one is not None}
    assert (found is None) == (not times)
    if found is None:
        return
    assert found.best.iteration_s == pytest.approx(min(times.values()), rel=1e-9)
    size = found.best.configuration.tensor
    assert times[size] == pytest.approx(found.best.iteration_s, rel=1e-9)
    assert found.bound_s <= found.best.iteration_s * (1 + 1e-9)
    _check_that_nothing_is_faster(
        rng, found, {s: plain if s == 1 else as_one_gpu(profile, s, asked.cluster) for s in TENSOR}
    )


def _check_that_nothing_is_faster(rng: random.Random, found: Found, profiles: dict[int, Profile]) -> None:
    """Brute force over each T's profile, all cuts and named schedules that were drawn."""
    best_s, asked = found.best.iteration_s, found.asked
    for size, profile in profiles.items():
        graph = LayerGraph.of(profile)
        every = list(shapes(graph, gpus=asked.gpus // size, global_batch=asked.global_batch, most_data=4))
        for shape, job in jobs(graph, every, rng, cluster=asked.cluster, recompute="auto", most=30):
            walk = Walk(job)
            for name, schedule in schedules(shape, NAMES, rng, 4):
                took = fitting_s(walk, schedule, math.inf)
                assert took >= best_s * (1 - 1e-9), (size, shape, name)
                assert took >= found.bound_s * (1 - 1e-9), (size, shape, name)


@pytest.mark.parametrize("seed", range(3))
def test_the_answer_sets_the_tensor_sizes_side_by_side(seed: int) -> None:
    rng = random.Random(seed)
    profile = with_tensor_rows(rng, random_profile(rng, chain=True, most_layers=5))
    cluster = resolve(dataclasses.replace(random_cluster(rng, memory=None), gpus_per_node=4), profile)
    asked = Asked(gpus=4, global_batch=8, cluster=cluster, virtual=(1,), data=(1,), schedules=NAMES)
    found = with_each_tensor_size(solve(profile, asked), profile)
    for size in TENSOR:
        alone = solve(profile, dataclasses.replace(asked, tensor=(size,)))
        own = [one for one in (found.best, *found.alternatives) if one.configuration.tensor == size]
        assert min(one.iteration_s for one in own) >= alone.best.iteration_s * (1 - 1e-9)
    console = Console(width=80, file=StringIO())
    for part in told(found, explain=True):
        console.print(part)
    assert isinstance(console.file, StringIO)
    _, _, text = console.file.getvalue().partition("The best found with each number of tensor ranks")
    assert text
    for size in TENSOR:
        every = [one for one in (found.best, *found.alternatives) if one.configuration.tensor == size]
        assert format_seconds(min(one.iteration_s for one in every)) in text


@pytest.mark.slow
def test_a_large_model_asked_for_whole_is_planned_as_well_as_in_parts() -> None:
    """70 billion parameters on 64 GPUs that hold few micro-batches: the search over all T, and over one shape alone."""
    recorded = Path(__file__).parents[2] / "profiles/recorded/h100-sxm-llama_2_70b.json"
    profile = read_profile(recorded)
    links = ClusterLinks(
        intra_node=Link(latency_s=5e-6, bandwidth_bytes_per_s=360e9),
        inter_node=Link(latency_s=1e-5, bandwidth_bytes_per_s=45e9),
    )
    cluster = resolve(Cluster(gpus_per_node=8, links=links), profile, 80 * 2**30)
    asked = Asked(gpus=64, global_batch=512, cluster=cluster)
    whole = solve(profile, asked).best
    assert whole.configuration.tensor > 1
    parts = [dataclasses.replace(asked, tensor=(size,)) for size in (4, 8)]
    parts.append(dataclasses.replace(asked, tensor=(2,), pipeline=(16,), data=(2,)))
    for part in (solve(profile, one).best for one in parts):
        assert whole.iteration_s <= 1.02 * part.iteration_s, part.configuration
