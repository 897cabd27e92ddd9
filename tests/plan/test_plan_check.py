"""The check of a plan: fresh figures pass, edits are judged by the rules, stale figures are derived anew."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.plans import plans, profiles, save

from planner.cluster import Cluster
from planner.errors import InputError
from planner.plan import Plan, read_plan
from planner.plan.check import PlanCheck, check_plan, profile_of
from planner.profile import Profile
from planner.schedules import Placement, ScheduleName


def _saved(plan: Plan, profile: Profile, bound_s: float | None = None) -> Plan:
    """The plan as its file says it, with the profile's hash."""
    with tempfile.TemporaryDirectory() as folder:
        path = save(plan, profile, Path(folder), bound_s=bound_s)
        again = read_plan(path)
        assert profile_of(again, path) == profile
        return again


def _stale(found: PlanCheck) -> set[str]:
    """The stale figures as ``stages[0].forward_s``."""
    return {
        f"{place}.{name}" for entry in found.stale for place, names in [entry.split(": ")] for name in names.split(", ")
    }


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_a_fresh_plan_is_fresh(data: st.DataObject) -> None:
    profile = data.draw(profiles())
    plan = _saved(data.draw(plans(profile)), profile, bound_s=data.draw(st.sampled_from([None, 1e-6])))
    found = check_plan(plan, profile)
    assert (found.errors, found.stale, found.overflows) == ((), (), ())
    assert found.fresh == plan


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_a_changed_figure_is_stale_and_written_anew(data: st.DataObject) -> None:
    profile = data.draw(profiles())
    plan = _saved(data.draw(plans(profile)), profile, bound_s=1e-6)
    index = data.draw(st.integers(0, len(plan.stages) - 1))
    name = data.draw(st.sampled_from(["forward_s", "saved_bytes", "input_bytes", "parameter_bytes"]))
    stages = list(plan.stages)
    stages[index] = dataclasses.replace(stages[index], **{name: getattr(stages[index], name) + 1})
    found = check_plan(dataclasses.replace(plan, stages=tuple(stages)), profile)
    assert f"stages[{index}]: {name}" in found.stale
    assert found.fresh.stages == plan.stages
    assert found.fresh.search is not None
    assert found.fresh.search.proven is False
    assert found.fresh.predicted == plan.predicted
    again = check_plan(found.fresh, profile)
    assert (again.stale, again.fresh) == ((), found.fresh)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_an_edit_keeps_the_bound_and_clears_proven(data: st.DataObject) -> None:
    profile = data.draw(profiles())
    plan = _saved(data.draw(plans(profile)), profile, bound_s=1e-6)
    before = plan.stages[0]
    assume(before.forward_s > 1e-6)
    edited = dataclasses.replace(
        plan, stages=(dataclasses.replace(before, recompute=not before.recompute), *plan.stages[1:])
    )
    found = check_plan(edited, profile)
    fresh = found.fresh
    assert fresh.predicted is not None
    assert fresh.search is not None
    assert plan.predicted is not None
    assert fresh.predicted.bound_s == 1e-6
    assert fresh.predicted.gap == pytest.approx(fresh.predicted.iteration_s / 1e-6 - 1)
    assert fresh.search.proven is False
    assert {"predicted.ranks", "search.proven (it was another plan that was proven)"} <= _stale(found)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_another_cluster_or_batch_has_no_bound(data: st.DataObject) -> None:
    profile = data.draw(profiles())
    plan = _saved(data.draw(plans(profile)), profile, bound_s=1e-6)
    batch = dataclasses.replace(
        plan.batch,
        microbatches=plan.batch.microbatches + 1,
        global_batch=plan.batch.global_batch + plan.batch.microbatch * plan.parallel.data,
    )
    edited = data.draw(
        st.sampled_from(
            [
                dataclasses.replace(plan, batch=batch),
                dataclasses.replace(plan, cluster=dataclasses.replace(plan.cluster, memory_bytes=1 << 50)),
                dataclasses.replace(plan, cluster=dataclasses.replace(plan.cluster, gpus_per_node=64)),
            ]
        )
    )
    found = check_plan(edited, profile)
    assert found.fresh.predicted is not None
    assert found.fresh.search is not None
    assert (found.fresh.predicted.bound_s, found.fresh.predicted.gap) == (None, None)
    assert found.fresh.search.proven is False
    assert {"predicted.bound_s", "predicted.gap"} <= _stale(found)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_memory_overflows_name_rank_and_bytes(data: st.DataObject) -> None:
    profile = data.draw(profiles())
    plan = _saved(data.draw(plans(profile)), profile)
    assert plan.predicted is not None
    peaks = [entry.peak_memory_bytes for entry in plan.predicted.ranks]
    tight = Cluster(memory_bytes=max(peaks) - 1, memory_reserve_fraction=0.0)
    found = check_plan(dataclasses.replace(plan, cluster=tight), profile)
    assert found.fresh.predicted is not None
    again = [entry.peak_memory_bytes for entry in found.fresh.predicted.ranks]
    said = {int(text.split()[1]): int(text.split("(")[1].split()[0]) for text in found.overflows}
    limit = max(peaks) - 1
    assert said == {rank: peak - limit for rank, peak in enumerate(again) if peak > limit}
    roomy = dataclasses.replace(tight, memory_bytes=max(again))
    assert not check_plan(dataclasses.replace(plan, cluster=roomy), profile).overflows


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_a_cut_must_hold_every_layer_once_along_the_data(data: st.DataObject) -> None:
    profile = data.draw(profiles(min_layers=2))
    plan = data.draw(plans(profile).filter(lambda plan: len(plan.stages) > 1))
    first, second, *rest = plan.stages

    def said(*stages: object) -> str:
        with pytest.raises(InputError) as raised:
            check_plan(dataclasses.replace(plan, stages=(*stages, *rest)), profile)
        return str(raised.value)

    stranger = dataclasses.replace(first, layers=(*first.layers, "stranger"))
    assert "no layer 'stranger'" in said(stranger, second)
    if len(first.layers) > 1:
        fewer = dataclasses.replace(first, layers=first.layers[1:])
        assert f"layer '{first.layers[0]}' is in no stage" in said(fewer, second)
    if any(edge.source in first.layers and edge.target in second.layers for edge in profile.edges):
        swapped = [dataclasses.replace(a, layers=b.layers) for a, b in ((first, second), (second, first))]
        assert "reads from" in said(*swapped)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_actions_must_be_complete_and_free_of_deadlock(data: st.DataObject) -> None:
    profile = data.draw(profiles(min_layers=2))
    chosen = data.draw(plans(profile).filter(lambda plan: plan.parallel.pipeline > 1))
    orders = data.draw(st.just([["0F0", "0B0"], ["1F0", "1B0"]]))
    plan = _two_ranks(chosen, profile, orders)
    assert check_plan(plan, profile).errors == ()
    missing = check_plan(_two_ranks(chosen, profile, [["0F0"], ["1F0", "1B0"]]), profile)
    assert missing.errors == ("rank 0: 0B0 is missing (or 0I0 and 0W0)",)
    turned = check_plan(_two_ranks(chosen, profile, [["0B0", "0F0"], ["1F0", "1B0"]]), profile)
    assert "0B0: must come after 0F0" in turned.errors[0]


def _two_ranks(plan: Plan, profile: Profile, orders: list[list[str]]) -> Plan:
    """The plan as two stages on two ranks, one micro-batch, with actions of its own."""
    names = [layer.name for layer in profile.layers]
    stages = tuple(
        dataclasses.replace(plan.stages[index], stage=index, rank=index, layers=tuple(layers))
        for index, layers in enumerate((names[:1], names[1:]))
    )
    return dataclasses.replace(
        plan,
        stages=stages,
        parallel=dataclasses.replace(plan.parallel, gpus=2, pipeline=2, virtual=1, data=1),
        batch=dataclasses.replace(plan.batch, microbatches=1, global_batch=plan.batch.microbatch),
        schedule=dataclasses.replace(plan.schedule, name=ScheduleName.SYNTHESISED, placement=Placement.FREE),
        actions=tuple(map(" ".join, orders)),
    )


def test_a_deadlock_is_shown_as_a_ring(tmp_path: Path) -> None:
    @settings(max_examples=5, deadline=None)
    @given(profiles(min_layers=2).filter(lambda profile: bool(profile.edges)), st.data())
    def ring(profile: Profile, data: st.DataObject) -> None:
        edge = profile.edges[0]
        assume(edge.tensors[0].grad)
        plan = data.draw(plans(profile).filter(lambda plan: plan.parallel.pipeline > 1))
        plan = _two_ranks(plan, profile, [["0F0", "0F1", "0B1", "0B0"], ["1F0", "1B0", "1F1", "1B1"]])
        names = [layer.name for layer in profile.layers]
        split = names.index(edge.target)
        stages = [
            dataclasses.replace(stage, layers=tuple(layers))
            for stage, layers in zip(plan.stages, (names[:split], names[split:]), strict=True)
        ]
        batch = dataclasses.replace(plan.batch, microbatches=2, global_batch=2 * plan.batch.microbatch)
        plan = dataclasses.replace(plan, stages=tuple(stages), batch=batch)
        assert check_plan(plan, profile).errors == ()
        stuck = ("0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0")
        errors = check_plan(dataclasses.replace(plan, actions=stuck), profile).errors
        assert errors[0].startswith("deadlock: ")
        assert {"0B0 waits", "1F1 waits"} <= {" ".join(part.split()[4:6]) for part in errors[0][10:].split(", ")}

    ring()


@settings(max_examples=10, deadline=None)
@given(st.data())
def test_another_profile_is_refused(data: st.DataObject) -> None:
    profile = data.draw(profiles())
    plan = data.draw(plans(profile))
    with tempfile.TemporaryDirectory() as folder:
        path = save(plan, profile, Path(folder))
        saved = read_plan(path)
        file = path.parent / "profile.json"
        file.write_text(file.read_text() + "\n")
        with pytest.raises(InputError, match="is not the profile"):
            profile_of(saved, path)
        file.unlink()
        with pytest.raises(InputError, match="its profile is not there"):
            profile_of(saved, path)
        file.mkdir()
        with pytest.raises(InputError, match="its profile is not there"):
            profile_of(saved, path)
        file.rmdir()
        other = dataclasses.replace(profile, model=dataclasses.replace(profile.model, fingerprint="other"))
        with pytest.raises(InputError, match="fingerprint"):
            profile_of(read_plan(save(plan, other, Path(folder))), path)
