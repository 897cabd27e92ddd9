"""Random profiles, and random plans over them, each well formed and with every figure fresh."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from pathlib import Path

from hypothesis import strategies as st

from planner.cluster import Cluster, ClusterLinks, Link, resolve
from planner.files import sha256_of
from planner.graph import LayerGraph, derive_stages
from planner.plan import (
    Batch,
    Parallel,
    Plan,
    PlannedModel,
    PlannedProfile,
    PlannedSchedule,
    Search,
    asked_of,
    job_of,
    predicted_of,
    schedule_of,
    write_plan,
)
from planner.profile import (
    Cost,
    Device,
    Edge,
    EdgeTensor,
    Layer,
    OptimizerCost,
    Profile,
    ProfiledLinks,
    ProfiledModel,
    ProfiledSums,
    SharedParameter,
    write_profile,
)
from planner.schedules import Placement, ScheduleName, ranks_of
from planner.simulate import simulate

_bytes = st.integers(0, 1 << 30)
_seconds = st.floats(0, 1, allow_subnormal=False)
MICROBATCH_SIZES = (1, 2)


@st.composite
def _costs(draw: st.DrawFn, size: int) -> Cost:
    return Cost(
        microbatch_size=size,
        forward_s=draw(_seconds),
        backward_input_s=draw(_seconds),
        backward_weight_s=draw(_seconds),
        split_s=draw(st.none() | _seconds),
        saved_bytes=draw(_bytes),
        saved_for_weight_bytes=draw(_bytes),
        workspace_bytes=draw(_bytes),
    )


LINK = {"latency_s": st.just(1e-5), "bandwidth_bytes_per_s": st.just(1e9)}
SUMS = st.just(ProfiledSums(latency_s=3e-4, bandwidth_bytes_per_s=5e8))


@st.composite
def profiles(draw: st.DrawFn, *, min_layers: int = 1, max_layers: int = 6) -> Profile:
    """A profile of a random acyclic model; some layers may share one parameter."""
    names = [f"block.{index}" for index in range(draw(st.integers(min_layers, max_layers)))]
    tied = draw(st.sets(st.sampled_from(names)))
    shared = {"tied.weight": SharedParameter(bytes=64, trainable=draw(st.booleans()))}
    layers = []
    for name in names:
        trainable = draw(_bytes) + 64
        layers.append(
            Layer(
                name=name,
                kind="block",
                modules=(name,),
                parameter_bytes=trainable + draw(_bytes),
                trainable_bytes=trainable,
                buffer_bytes=draw(_bytes),
                costs=tuple(draw(_costs(size)) for size in MICROBATCH_SIZES),
                shared=shared if name in tied else None,
            )
        )
    return Profile(
        model=ProfiledModel(name="random", source="../random.py", fingerprint="f" * 64),
        device=Device(
            kind="cpu", name="a cpu", memory_bytes=draw(st.sampled_from([0, 1 << 40])), software={"torch": "2"}
        ),
        provenance=draw(st.sampled_from(["measured", "estimated"])),
        dtype="float32",
        global_batch=draw(st.none() | st.integers(1, 64)),
        gradient_bytes_per_trainable_byte=1.0,
        optimizer=OptimizerCost(name="adamw", state_bytes_per_trainable_byte=2.0, step_s_per_trainable_byte=1e-10),
        links=draw(st.none() | st.builds(ProfiledLinks, **LINK, overlap=st.just(True), sums=st.none() | SUMS)),
        layers=tuple(layers),
        edges=tuple(_edges(draw, names)),
    )


def _edges(draw: st.DrawFn, names: list[str]) -> list[Edge]:
    made = []
    for target, name in enumerate(names):
        for source in draw(st.sets(st.integers(0, target - 1), max_size=2)) if target else ():
            tensor = EdgeTensor(
                name=f"{names[source]}.out",
                bytes_per_sample=1000.0 + source,
                fixed_bytes=source,
                grad=draw(st.booleans()),
                saved=draw(st.booleans()),
            )
            made.append(Edge(source=names[source], target=name, tensors=(tensor,)))
    return made


@st.composite
def plans(draw: st.DrawFn, profile: Profile) -> Plan:
    """A fresh plan for a profile, in a random shape under a random schedule. Its profile path is ``profile.json``."""
    names = [layer.name for layer in profile.layers]
    shapes = [(p, v) for p in (1, 2, 3) for v in (1, 2) if p * v <= len(names)]
    ranks, virtual = draw(st.sampled_from(shapes))
    one = [ScheduleName.GPIPE, ScheduleName.ONE_F_ONE_B, ScheduleName.ZB_H1]
    name = draw(st.sampled_from(one if virtual == 1 else [ScheduleName.INTERLEAVED, ScheduleName.ZB_V]))
    cuts = sorted(draw(st.permutations(range(1, len(names))))[: ranks * virtual - 1])
    cut = [names[start:end] for start, end in zip([0, *cuts], [*cuts, len(names)], strict=True)]
    size, microbatches, data = draw(st.sampled_from(MICROBATCH_SIZES)), draw(st.integers(1, 4)), draw(st.integers(1, 2))
    link = Link(latency_s=2e-5, bandwidth_bytes_per_s=1e8)
    cluster = resolve(
        draw(st.sampled_from([None, Cluster(gpus_per_node=2, links=ClusterLinks(inter_node=link))])), profile
    )
    return fresh_plan(
        profile,
        cut,
        name=name,
        ranks=ranks,
        size=size,
        microbatches=microbatches,
        data=data,
        cluster=cluster,
        recompute=[draw(st.booleans()) for _ in cut],
    )


def fresh_plan(
    profile: Profile,
    cut: list[list[str]],
    *,
    name: ScheduleName = ScheduleName.ONE_F_ONE_B,
    ranks: int,
    size: int = 1,
    microbatches: int = 4,
    data: int = 1,
    tensor: int = 1,
    cluster: Cluster | None = None,
    recompute: list[bool] | None = None,
) -> Plan:
    """A plan with all that follows from the profile. Its profile path is ``profile.json``."""
    placement = Placement.V if name is ScheduleName.ZB_V else Placement.LOOP
    virtual = len(cut) // ranks
    cluster = cluster or resolve(None, profile)
    plan = Plan(
        model=PlannedModel(name=profile.model.name, source="model.py", fingerprint=profile.model.fingerprint),
        profile=PlannedProfile(
            path="profile.json", sha256="0" * 64, provenance=profile.provenance, device=profile.device.name
        ),
        cluster=cluster,
        batch=Batch(global_batch=size * microbatches * data, microbatch=size, microbatches=microbatches),
        parallel=Parallel(
            gpus=ranks * data * tensor,
            pipeline=ranks,
            virtual=virtual,
            data=data,
            tensor=tensor,
            sequence=True if profile.sequence_parallel and tensor > 1 else None,
        ),
        schedule=PlannedSchedule(name=name, placement=placement),
        stages=derive_stages(
            LayerGraph.of(profile),
            cut,
            ranks=ranks_of(ranks, virtual, placement),
            recompute=recompute,
            microbatch_size=size,
            tensor=tensor,
            cluster=cluster,
        ),
    )
    predicted = predicted_of(
        simulate(job_of(plan, profile), schedule_of(plan)), global_batch=plan.batch.global_batch, bound_s=None
    )
    return dataclasses.replace(plan, predicted=predicted)


def chain_profile(num_layers: int) -> Profile:
    """Layers in a row, each a little costlier than the one before, at micro-batch sizes 1 and 2."""
    layers = tuple(
        Layer(
            name=f"block.{index}",
            kind="block",
            modules=(f"block.{index}",),
            parameter_bytes=4000,
            trainable_bytes=4000,
            buffer_bytes=16,
            costs=tuple(
                Cost(
                    microbatch_size=size,
                    forward_s=(0.01 + index / 1000) * size,
                    backward_input_s=(0.01 + index / 1000) * size,
                    backward_weight_s=0.01 * size,
                    saved_bytes=2000 * size,
                    saved_for_weight_bytes=1000 * size,
                    workspace_bytes=500,
                )
                for size in MICROBATCH_SIZES
            ),
        )
        for index in range(num_layers)
    )
    edges = []
    for before, after in pairwise(layers):
        tensor = EdgeTensor(name="x", bytes_per_sample=1000.0, fixed_bytes=0, grad=True, saved=True)
        edges.append(Edge(source=before.name, target=after.name, tensors=(tensor,)))
    return Profile(
        model=ProfiledModel(name="chain", source="model.py", fingerprint="c" * 64),
        device=Device(kind="cpu", name="a cpu", memory_bytes=1 << 40, software={}),
        provenance="measured",
        dtype="float32",
        global_batch=8,
        gradient_bytes_per_trainable_byte=1.0,
        optimizer=OptimizerCost(name="adamw", state_bytes_per_trainable_byte=2.0, step_s_per_trainable_byte=1e-10),
        links=ProfiledLinks(latency_s=1e-5, bandwidth_bytes_per_s=1e9, overlap=True),
        layers=layers,
        edges=tuple(edges),
    )


def save(plan: Plan, profile: Profile, folder: Path, *, bound_s: float | None = None) -> Path:
    """Write profile and plan into a folder, the plan with the profile's hash and, if given, a proven bound."""
    write_profile(profile, folder / "profile.json")
    sha256 = sha256_of(folder / "profile.json")
    plan = dataclasses.replace(plan, profile=dataclasses.replace(plan.profile, sha256=sha256))
    if bound_s is not None and plan.predicted is not None:
        asked = asked_of(global_batch=plan.batch.global_batch, cluster=plan.cluster, profile_sha256=sha256)
        gap = plan.predicted.iteration_s / bound_s - 1
        plan = dataclasses.replace(
            plan,
            predicted=dataclasses.replace(plan.predicted, bound_s=bound_s, gap=gap),
            search=Search(gpus=plan.parallel.gpus, asked=asked, proven=True),
        )
    write_plan(plan, folder / "plan.yaml")
    return folder / "plan.yaml"
