"""The smaller graph against the one it stands for: the same stages from the same cut, and no better cut is lost."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.brute_force import NAMES, fitting_s, schedules, shapes
from support.cases import case
from support.random_profiles import all_cuts, job_for, random_cluster, random_profile

from planner.cluster import resolve
from planner.exchange.pipedream import import_pipedream
from planner.graph import LayerGraph, Stage, derive_stages
from planner.graph.contract import Contraction, contract
from planner.profile import Layer
from planner.schedules import ranks_of
from planner.simulate import Walk

SEEDS = st.integers(0, 10**9)


def random_graph(rng: random.Random) -> LayerGraph:
    """Half of the layers take no time and train nothing; some of them hold no bytes either."""
    profile = random_profile(rng, chain=rng.random() < 0.5, most_layers=7, sizes=(1,))
    return LayerGraph.of(
        dataclasses.replace(
            profile, layers=tuple(freed(layer, rng) if rng.random() < 0.5 else layer for layer in profile.layers)
        )
    )


def freed(layer: Layer, rng: random.Random) -> Layer:
    holds = rng.random() < 0.3
    row = dataclasses.replace(layer.costs[0], forward_s=0.0, backward_input_s=0.0, backward_weight_s=0.0)
    if not holds:
        row = dataclasses.replace(row, saved_bytes=0, saved_for_weight_bytes=0, workspace_bytes=0)
    return dataclasses.replace(
        layer,
        costs=(row,),
        parameter_bytes=layer.parameter_bytes if holds else 0,
        trainable_bytes=0,
        buffer_bytes=layer.buffer_bytes if holds else 0,
        shared=None,
    )


def is_free(layer: Layer) -> bool:
    row = layer.costs[0]
    return row.forward_s + row.backward_input_s + row.backward_weight_s + layer.trainable_bytes == 0


def anonymous(stages: tuple[Stage, ...]) -> list[Stage]:
    return [dataclasses.replace(stage, layers=()) for stage in stages]


@given(seed=SEEDS, links=st.booleans(), memory=st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_cut_has_the_same_stages_in_both_graphs(seed: int, links: bool, memory: bool) -> None:
    rng = random.Random(seed)
    graph = random_graph(rng)
    made = contract(graph, links=links, memory=memory)
    assert sorted(name for names in made.members.values() for name in names) == sorted(graph.names)
    for cut in itertools.islice(all_cuts(made.graph, rng.randint(1, len(made.graph))), 20):
        recompute = [rng.random() < 0.3 for _ in cut]
        arguments = {"ranks": list(range(len(cut))), "microbatch_size": 1, "recompute": recompute}
        small = derive_stages(made.graph, cut, **arguments)
        whole = derive_stages(graph, made.expand(cut), **arguments)
        assert [stage.layers for stage in whole] == [tuple(names) for names in made.expand(cut)]
        for one, other in zip(anonymous(small), anonymous(whole), strict=True):
            for name in ("forward_s", "backward_input_s", "backward_weight_s"):
                assert getattr(one, name) == pytest.approx(getattr(other, name), rel=1e-12)
                one = dataclasses.replace(one, **{name: 0.0})
                other = dataclasses.replace(other, **{name: 0.0})
            assert one == other


def check_no_cut_is_lost(seed: int, most_cuts: int) -> int:
    """Every cut becomes one of the small graph's by moving free layers, and no schedule gets slower or stops to fit.

    Cuts with a stage of free layers alone are left out, as the smaller graph may. Returns how many layers joined.
    """
    rng = random.Random(seed)
    graph = random_graph(rng)
    plain = rng.random() < 0.6
    cluster = random_cluster(rng, memory=None if plain else rng.choice((None, 200, 400)))
    if plain:
        cluster = dataclasses.replace(cluster, links=None)
    cluster = resolve(cluster, graph.profile)
    made = contract(graph, links=cluster.links is not None, memory=cluster.memory_bytes is not None)
    joined = len(graph) - len(made.graph)
    if not joined:
        return 0
    working = {layer.name for layer in graph.layers if not is_free(layer)}
    shape = rng.choice(list(shapes(graph, gpus=4, global_batch=rng.randint(1, 4))))
    homes = list(ranks_of(shape.pipeline, shape.virtual, shape.placement))
    recompute = [rng.random() < 0.3 for _ in homes]

    def walk_of(cut: list[list[str]]) -> Walk:
        return Walk(
            job_for(
                graph,
                cut,
                ranks=homes,
                microbatch_size=1,
                num_microbatches=shape.num_microbatches,
                cluster=cluster,
                data=shape.data,
                recompute=recompute,
            )
        )

    every = [cut for cut in all_cuts(graph, len(homes)) if all(working & set(names) for names in cut)]
    for cut in rng.sample(every, min(len(every), most_cuts)):
        before, after = walk_of(cut), [walk_of(other) for other in moved_together(cut, made, working)]
        for _, schedule in schedules(shape, NAMES, rng, 6):
            seconds = fitting_s(before, schedule, math.inf)
            assert min(fitting_s(walk, schedule, math.inf) for walk in after) <= seconds * (1 + 1e-9)
    return joined


def moved_together(cut: list[list[str]], made: Contraction, working: set[str]) -> Iterator[list[list[str]]]:
    """The cut with each group where its working layer lies; where it has none, where any of its layers lies."""
    stage_of = {name: stage for stage, names in enumerate(cut) for name in names}
    groups = list(made.members.values())
    anchors = [[name for name in group if name in working] or list(group) for group in groups]
    for chosen in itertools.product(*({stage_of[name] for name in group} for group in anchors)):
        home = {name: stage for group, stage in zip(groups, chosen, strict=True) for name in group}
        if all(home[made.original.names[u]] <= home[made.original.names[w]] for u, w in made.original.edges):
            yield [[name for name in made.original.names if home[name] == stage] for stage in range(len(cut))]


def test_no_cut_is_lost() -> None:
    assert sum(check_no_cut_is_lost(seed, 10) for seed in range(200)) > 100


@pytest.mark.slow
def test_no_cut_is_lost_at_length() -> None:
    assert sum(check_no_cut_is_lost(seed, 100) for seed in range(1000, 6000)) > 2000


def contracted(name: str, *, links: bool) -> Contraction:
    profile, _ = import_pipedream(case(f"pipedream/{name}.graph.txt"), microbatch_size=1)
    return contract(LayerGraph.of(profile), links=links, memory=False)


def test_a_translator_shrinks() -> None:
    """Of 45 nodes 28 only pick an item or add: most of them join a layer that works."""
    assert len(contracted("gnmt", links=False).graph) <= 31
