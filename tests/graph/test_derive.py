"""The stage figures of a cut, against the rule stated tensor by tensor and against a naive reading of it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cluster import Cluster, ClusterLinks, Link
from planner.errors import InputError
from planner.graph import LayerGraph, Stage, Transfer, derive_stages, ties
from planner.profile import (
    Collective,
    Collectives,
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


def cost(microbatch_size: int = 1, *, scale: int = 1) -> Cost:
    return Cost(
        microbatch_size=microbatch_size,
        forward_s=1.0 * scale,
        backward_input_s=2.0 * scale,
        backward_weight_s=3.0 * scale,
        saved_bytes=10 * scale,
        saved_for_weight_bytes=7 * scale,
        workspace_bytes=5 * scale,
    )


def layer(name: str, *, scale: int = 1, shared: dict[str, SharedParameter] | None = None) -> Layer:
    return Layer(
        name=name,
        kind="test",
        modules=(),
        parameter_bytes=100 * scale,
        trainable_bytes=80 * scale,
        buffer_bytes=3 * scale,
        costs=(cost(1, scale=scale), cost(4, scale=3 * scale)),
        shared=shared,
    )


def profile_of(layers: list[Layer], edges: list[Edge]) -> Profile:
    return Profile(
        model=ProfiledModel(name="m", source="m.py", fingerprint="0"),
        device=Device(kind="cpu", name="cpu", memory_bytes=10**9, software={}),
        provenance="measured",
        dtype="float32",
        gradient_bytes_per_trainable_byte=1.0,
        optimizer=OptimizerCost(name="sgd", state_bytes_per_trainable_byte=0.0, step_s_per_trainable_byte=0.0),
        layers=tuple(layers),
        edges=tuple(edges),
    )


def edge(source: str, target: str, name: str, size: float, *, grad: bool = True, saved: bool = False) -> Edge:
    tensor = EdgeTensor(name=name, bytes_per_sample=size, fixed_bytes=1, grad=grad, saved=saved)
    return Edge(source=source, target=target, tensors=(tensor,))


def to(stage: int, size: int) -> Transfer:
    return Transfer(to_stage=stage, bytes=size)


def skip_profile() -> Profile:
    """Layer a's x is read by b, c, d and e, with a gradient by b, d and e; every other layer feeds the next."""
    layers = [layer(name, scale=scale) for scale, name in enumerate("abcde", start=1)]
    edges = [
        edge("a", "b", "x", 50, saved=True),
        edge("a", "c", "x", 50, grad=False, saved=True),
        edge("a", "d", "x", 50),
        edge("a", "e", "x", 50),
        edge("b", "c", "y", 20),
        edge("c", "d", "z", 30),
        edge("d", "e", "w", 40),
    ]
    return profile_of(layers, edges)


def test_a_skip_goes_once_to_each_rank_and_its_gradient_comes_back_reader_by_reader() -> None:
    stages = derive_stages(
        LayerGraph.of(skip_profile()), [["a"], ["b"], ["c"], ["d"], ["e"]], ranks=[0, 1, 2, 1, 0], microbatch_size=4
    )
    assert stages[0].sends == (to(1, 201), to(2, 201), to(3, 0), to(4, 0))
    assert stages[4].returns == (to(3, 201 + 161),)  # w, and x's gradient on its way
    assert stages[3].returns == (to(2, 121), to(1, 0))  # stage 2 reads x without gradient: the relay passes it by
    assert stages[1].returns == (to(0, 201),)
    assert stages[0].returns == ()
    assert [stage.input_bytes for stage in stages] == [0, 201, 201 + 81, 201 + 121, 201 + 161]
    assert [stage.saved_bytes for stage in stages] == [30, 60 + 201, 90 + 201, 120, 150]
    assert [stage.workspace_bytes for stage in stages] == [15, 30, 45, 60, 75]


def test_a_stage_sums_its_layers_rows_of_exactly_this_size() -> None:
    graph = LayerGraph.of(skip_profile())
    first, second = derive_stages(graph, [["a", "b"], ["c", "e", "d"]], ranks=[0, 1], microbatch_size=1)
    assert (first.forward_s, first.backward_input_s, first.backward_weight_s) == (3.0, 6.0, 9.0)
    assert (first.parameter_bytes, first.trainable_bytes, first.buffer_bytes) == (300, 240, 9)
    assert (second.saved_bytes, second.saved_for_weight_bytes, second.workspace_bytes) == (120 + 51, 84, 25)
    assert second.layers == ("c", "d", "e")
    with pytest.raises(InputError, match="no costs at micro-batch size 2"):
        derive_stages(graph, [["a", "b"], ["c", "d", "e"]], ranks=[0, 1], microbatch_size=2)


def test_a_tied_parameter_counts_once_a_stage_and_ties_the_stages_that_use_it() -> None:
    tied = {"wte": SharedParameter(bytes=60)}
    layers = [layer("a", shared=tied), layer("b", shared=tied), layer("c"), layer("d", shared=tied)]
    graph = LayerGraph.of(profile_of(layers, [edge(s, t, "x", 1) for s, t in ("ab", "bc", "cd")]))
    cut = [["a", "b"], ["c"], ["d"]]
    stages = derive_stages(graph, cut, ranks=[0, 1, 2], microbatch_size=1)
    assert [stage.parameter_bytes for stage in stages] == [140, 100, 100]
    assert [stage.trainable_bytes for stage in stages] == [100, 80, 80]
    (tie,) = ties(graph, cut)
    assert (tie.name, tie.bytes, tie.trainable, tie.stages) == ("wte", 60, True, (0, 2))
    assert ties(graph, [["a", "b", "c", "d"]]) == ()


def test_tensor_parallel_rows_bring_their_sizes_and_their_collectives() -> None:
    halved = Cost(
        microbatch_size=1,
        tensor=2,
        forward_s=0.5,
        backward_input_s=1.0,
        backward_weight_s=1.5,
        saved_bytes=6,
        saved_for_weight_bytes=4,
        workspace_bytes=3,
        parameter_bytes=50,
        trainable_bytes=40,
        buffer_bytes=3,
        collectives=Collectives(forward=Collective(count=2, bytes=100), backward_input=Collective(count=1, bytes=60)),
    )
    one = layer("a", shared={"w": SharedParameter(bytes=60)})
    one = Layer(
        name=one.name,
        kind=one.kind,
        modules=(),
        parameter_bytes=100,
        trainable_bytes=80,
        buffer_bytes=3,
        costs=(*one.costs, halved),
        shared=one.shared,
    )
    graph = LayerGraph.of(profile_of([one], []))
    assert graph.rows() == ((1, 1), (1, 2), (4, 1))
    cluster = Cluster(links=ClusterLinks(intra_node=Link(latency_s=0.25, bandwidth_bytes_per_s=100.0)))
    (stage,) = derive_stages(graph, [["a"]], ranks=[0], microbatch_size=1, tensor=2, cluster=cluster)
    assert stage.forward_s == 0.5 + 2 * 2 * 0.25 + 1 * 100 / 100
    assert stage.backward_input_s == 1.0 + 1 * 2 * 0.25 + 1 * 60 / 100
    assert (stage.backward_weight_s, stage.parameter_bytes, stage.trainable_bytes) == (1.5, 50, 40)
    assert cluster.links is not None
    slower = ClusterLinks(intra_node=cluster.links.intra_node, sums=Link(latency_s=1.0, bandwidth_bytes_per_s=50.0))
    (stage,) = derive_stages(graph, [["a"]], ranks=[0], microbatch_size=1, tensor=2, cluster=Cluster(links=slower))
    assert stage.forward_s == 0.5 + 2 * 2 * 1.0 + 1 * 100 / 50


@pytest.mark.parametrize(
    ("cut", "fault"),
    [
        ([["a", "b", "c"], ["d"]], "'e' is in no stage"),
        ([["a", "b", "c"], ["c", "d", "e"]], "'c' is in stages 0 and 1"),
        ([["a", "b", "c", "d", "e"], []], "stage 1 has no layers"),
        ([["a", "c"], ["b", "d", "e"]], "'c' in stage 0 reads from 'b' in stage 1"),
        ([["a", "b", "c", "d", "q"]], "no layer 'q'"),
    ],
)
def test_what_is_no_cut_is_refused(cut: list[list[str]], fault: str) -> None:
    with pytest.raises(InputError, match=fault):
        derive_stages(LayerGraph.of(skip_profile()), cut, ranks=[0] * len(cut), microbatch_size=1)


@st.composite
def cut_graphs(draw: st.DrawFn) -> tuple[Profile, list[list[str]], list[int]]:
    names = [f"l{index}" for index in range(draw(st.integers(1, 7)))]
    carried: dict[tuple[str, str], list[EdgeTensor]] = {}
    for source in range(len(names)):
        for tensor in range(draw(st.integers(0, 2))):
            size = draw(st.integers(0, 9))
            for target in range(source + 1, len(names)):
                if draw(st.booleans()):
                    made = EdgeTensor(
                        name=f"t{tensor}",
                        bytes_per_sample=size,
                        fixed_bytes=0,
                        grad=draw(st.booleans()),
                        saved=draw(st.booleans()),
                    )
                    carried.setdefault((names[source], names[target]), []).append(made)
    edges = [Edge(source=s, target=t, tensors=tuple(tensors)) for (s, t), tensors in carried.items()]
    stages = sorted(draw(st.lists(st.integers(0, 3), min_size=len(names), max_size=len(names))))
    used = sorted(set(stages))
    cut = [[name for name, stage in zip(names, stages, strict=True) if stage == number] for number in used]
    ranks = draw(st.lists(st.integers(0, 2), min_size=len(cut), max_size=len(cut)))
    return profile_of([layer(name) for name in names], edges), cut, ranks


def _received(profile: Profile, cut: list[list[str]], stage: int) -> set[tuple[str, str, float]]:
    inside = set(cut[stage])
    return {
        (e.source, t.name, t.bytes_per_sample)
        for e in profile.edges
        for t in e.tensors
        if e.target in inside and e.source not in inside
    }


@given(cut_graphs())
@settings(max_examples=200, deadline=None)
def test_bytes_are_conserved(case: tuple[Profile, list[list[str]], list[int]]) -> None:
    """Each rank receives each foreign tensor once; a gradient hop for each reading stage; nothing flows backwards."""
    profile, cut, ranks = case
    stages: tuple[Stage, ...] = derive_stages(LayerGraph.of(profile), cut, ranks=ranks, microbatch_size=1)
    for stage in stages:
        assert stage.input_bytes == sum(size for *_, size in _received(profile, cut, stage.stage))
        assert all(entry.to_stage > stage.stage for entry in stage.sends)
        assert all(entry.to_stage < stage.stage for entry in stage.returns)
        assert [entry.to_stage for entry in stage.sends] == sorted(entry.to_stage for entry in stage.sends)
        assert [-entry.to_stage for entry in stage.returns] == sorted(-entry.to_stage for entry in stage.returns)
    for rank in set(ranks):
        mine = [stage for stage in stages if stage.rank == rank]
        own = {name for stage in mine for name in stage.layers}
        arrives = sum(e.bytes for s in stages for e in s.sends if ranks[e.to_stage] == rank)
        wanted = set().union(*(_received(profile, cut, stage.stage) for stage in mine))
        assert arrives == sum(size for source, _, size in wanted if source not in own)
    if len(set(ranks)) == len(ranks):  # every hop is between ranks: as many gradient bytes come back as readers ask for
        asked = {
            (e.source, t.name, next(k for k, names in enumerate(cut) if e.target in names), t.bytes_per_sample)
            for e in profile.edges
            for t in e.tensors
            if t.grad and not any(e.source in names and e.target in names for names in cut)
        }
        assert sum(e.bytes for s in stages for e in s.returns) == sum(size for *_, size in asked)
