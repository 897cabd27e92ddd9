"""Plans for other systems' profiles, against what people and those systems would have done, under our time model."""

from __future__ import annotations

import dataclasses
import random
from functools import cache

import pytest
from support.cases import case
from support.pipedream_cut import BANDWIDTH, pipedream_cut
from support.random_profiles import random_profile

from planner.cluster import Cluster, ClusterLinks, Link, memory_limit, resolve
from planner.errors import NothingFitsError
from planner.exchange.pipedream import import_pipedream
from planner.exchange.piper import import_piper
from planner.graph import LayerGraph
from planner.profile import Cost, Edge, EdgeTensor, Layer, OptimizerCost, Profile
from planner.schedules import ScheduleName
from planner.search import Asked, Found, solve
from planner.search.baselines import by_hand, even_by_count, even_by_parameters, one_stage_a_rank
from planner.search.job import job_of_cut
from planner.search.smaller import smaller
from planner.simulate import simulate

LINKS = ClusterLinks(intra_node=Link(latency_s=0.0, bandwidth_bytes_per_s=BANDWIDTH))
SAMPLES = 128


@cache
def solved(name: str, gpus: int) -> Found:
    profile, _ = import_pipedream(case(f"pipedream/{name}.graph.txt"), microbatch_size=SAMPLES)
    cluster = resolve(Cluster(links=LINKS), profile)
    return solve(profile, Asked(gpus=gpus, global_batch=4 * gpus * SAMPLES, cluster=cluster))


def check_no_cut_of_theirs_is_faster(name: str, gpus: int) -> None:
    found = solved(name, gpus)
    graph = found.graph
    assert found.bound_s <= found.best.iteration_s * (1 + 1e-9)
    for data in (data for data in range(1, gpus + 1) if gpus % data == 0):
        ranks = min(gpus // data, len(graph))
        cuts = {
            "even by layers": even_by_count(graph, ranks),
            "even by parameters": even_by_parameters(graph, ranks),
            "PipeDream": pipedream_cut(graph, num_stages=ranks, data=data, microbatch_size=SAMPLES),
        }
        for whose, cut in cuts.items():
            theirs_s = by_hand_s(graph, found.asked, cut, data)
            assert found.best.iteration_s <= theirs_s * (1 + 1e-9), (whose, ranks, data)


def by_hand_s(graph: LayerGraph, asked: Asked, cut: list[list[str]], data: int) -> float:
    shape = one_stage_a_rank(asked, len(cut), SAMPLES, data)
    return by_hand(shape, job_of_cut(graph, asked, shape, cut)).iteration_s


NAMES = ("vgg16", "resnet50", "gnmt", "alexnet", "densenet121")


@pytest.mark.parametrize("name", ["vgg16", "alexnet"])
def test_no_cut_of_theirs_is_faster_on_4(name: str) -> None:
    check_no_cut_of_theirs_is_faster(name, 4)


@pytest.mark.slow
@pytest.mark.parametrize("gpus", [4, 8, 16])
@pytest.mark.parametrize("name", NAMES)
def test_no_cut_of_theirs_is_faster(name: str, gpus: int) -> None:
    check_no_cut_of_theirs_is_faster(name, gpus)


def test_a_contracted_graph_gives_a_plan_of_the_whole_one() -> None:
    """Free links, so that most nodes that only pick or add are joined before the search: layers stay the profile's."""
    profile, _ = import_pipedream(case("pipedream/gnmt.graph.txt"), microbatch_size=SAMPLES)
    cluster = resolve(Cluster(), profile)
    asked = Asked(gpus=4, global_batch=4 * SAMPLES, cluster=cluster, data=(1,), virtual=(1,))
    found = solve(profile, asked)
    assert len(smaller(found.graph, asked).graph) < len(profile.layers)  # type: ignore[union-attr]
    placed = [name for stage in found.best.stages for name in stage.layers]
    assert sorted(placed) == sorted(layer.name for layer in profile.layers)
    again = simulate(found.best.job, found.best.timeline.schedule)
    assert again.iteration_s == found.best.iteration_s
    theirs = pipedream_cut(found.graph, num_stages=4, data=1, microbatch_size=SAMPLES)
    assert found.best.iteration_s <= by_hand_s(found.graph, asked, theirs, 1)
    assert found.bound_s <= found.best.iteration_s


@pytest.mark.slow
def test_bert_fits_8_gigabytes_where_stages_recompute() -> None:
    """Whole layers, 8 GPUs with 8 GB each: nothing fits as fast without recomputing."""
    profile, _ = import_piper(case("piper/bert32a100.json"))
    asked = Asked(gpus=8, global_batch=64, cluster=resolve(Cluster(), profile, 8 * 10**9), tensor=(1,))
    found = solve(profile, asked)
    limit = memory_limit(asked.cluster)
    assert limit is not None
    assert found.best.peak_memory_bytes <= limit
    assert any(stage.recompute for stage in found.best.stages)


def eight_layers(heavy: tuple[int, ...]) -> Profile:
    """Eight equal layers in a row, of which some save much."""

    def layer(index: int) -> Layer:
        row = Cost(
            microbatch_size=1,
            forward_s=1.0,
            backward_input_s=1.0,
            backward_weight_s=1.0,
            saved_bytes=100 if index in heavy else 10,
            saved_for_weight_bytes=5,
            workspace_bytes=0,
        )
        return Layer(
            name=f"l{index}",
            kind="test",
            modules=(),
            parameter_bytes=100,
            trainable_bytes=100,
            buffer_bytes=0,
            costs=(row,),
        )

    hidden = EdgeTensor(name="x", bytes_per_sample=1, fixed_bytes=0, grad=True)
    return dataclasses.replace(
        random_profile(random.Random(0), chain=True),
        optimizer=OptimizerCost(name="sgd", state_bytes_per_trainable_byte=0.0, step_s_per_trainable_byte=0.0),
        layers=tuple(map(layer, range(8))),
        edges=tuple(Edge(source=f"l{index}", target=f"l{index + 1}", tensors=(hidden,)) for index in range(7)),
    )


@pytest.mark.parametrize("heavy", [(2, 5), (0, 7), (3, 4)])
def test_two_of_eight_stages_recompute_where_only_that_fits(heavy: tuple[int, ...]) -> None:
    """All micro-batches are in flight at once: without recomputing the heavy stages hold too much."""
    profile = eight_layers(heavy)
    asked = Asked(
        gpus=8,
        global_batch=8,
        cluster=resolve(Cluster(memory_reserve_fraction=0.0), profile, 400),
        schedules=(ScheduleName.GPIPE,),
        data=(1,),
    )
    with pytest.raises(NothingFitsError):
        solve(profile, dataclasses.replace(asked, recompute="none"))
    found = solve(profile, asked)
    assert tuple(stage.stage for stage in found.best.stages if stage.recompute) == heavy
    assert found.proven
