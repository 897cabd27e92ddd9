"""Figures of a run, put together from what its processes told."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.plans import chain_profile, fresh_plan

from planner.plan import Plan
from planner.runtime.reference import Reference, compare
from planner.runtime.result import Outcome, outcome_of

PLAN = fresh_plan(chain_profile(4), [["block.0", "block.1"], ["block.2", "block.3"]], ranks=2)


def told(rank: int, *, ends: list[float], busy: list[float], begins: dict[int, float] | None = None) -> dict[str, Any]:
    return {
        "rank": rank,
        "ends": ends,
        "last_actions": ends,
        "busy": busy,
        "begins": sorted((begins or {0: 0.0}).items()),
        "losses": [float(step) for step in range(len(ends))],
        "has_loss": rank == 1,
        "peak_memory_bytes": 1000 + rank,
        "weights_sha256": "0" * 64 if rank == 0 else None,
        "verify": None,
        "actions": {},
        "optimizer_s": 0.0,
        "trainable_bytes": 0,
    }


@given(st.lists(st.tuples(st.floats(0.5, 2), st.floats(0.5, 2)), min_size=2, max_size=6))
def test_an_iteration_ends_when_the_last_rank_ends(steps: list[tuple[float, float]]) -> None:
    clocks = [0.0, 0.0]
    ends: list[list[float]] = [[], []]
    for durations in steps:
        start = max(clocks)
        clocks = [start + duration for duration in durations]
        for rank in (0, 1):
            ends[rank].append(clocks[rank])
    busy = [0.25] * len(steps)
    outcome = outcome_of(PLAN, [told(rank, ends=ends[rank], busy=busy) for rank in (0, 1)], crowded=False)
    iterations = [step.iteration_s for step in outcome.result.steps]
    assert iterations == pytest.approx([max(durations) for durations in steps])
    assert outcome.result.losses == tuple(map(float, range(len(steps))))


def test_a_pause_between_steps_counts_to_none() -> None:
    begins = {0: 0.0, 2: 100.0}
    processes = [told(rank, ends=[1.0, 2.0, 101.5], busy=[0.5] * 3, begins=begins) for rank in (0, 1)]
    outcome = outcome_of(PLAN, processes, crowded=False)
    assert [step.iteration_s for step in outcome.result.steps] == pytest.approx([1.0, 1.0, 1.5])


def test_the_bubble_is_what_no_rank_computes_in() -> None:
    processes = [told(0, ends=[2.0, 4.0], busy=[1.0, 1.0]), told(1, ends=[2.0, 4.0], busy=[2.0, 2.0])]
    assert outcome_of(PLAN, processes, crowded=False).measured.bubble_fraction == pytest.approx(0.25)


def measured(plan: Plan, *, slower: float = 1.0, busier: float = 1.0, crowded: bool = False) -> Outcome:
    assert plan.predicted is not None
    iteration_s = plan.predicted.iteration_s * slower
    processes = [
        told(rank.rank, ends=[iteration_s * n for n in (1, 2, 3)], busy=[rank.busy_s * busier] * 3)
        | {"peak_memory_bytes": rank.peak_memory_bytes}
        for rank in plan.predicted.ranks
    ]
    return outcome_of(plan, processes, crowded=crowded)


def test_what_to_do_about_it() -> None:
    assert measured(PLAN).advice == "as predicted, nothing to do"
    assert "computes 30 % longer than predicted" in measured(PLAN, slower=1.3, busier=1.3).advice
    assert "links or the optimizer are slower" in measured(PLAN, slower=1.2).advice
    assert "outnumber cores" in measured(PLAN, slower=1.2, crowded=True).advice
    assert "no prediction" in measured_without(PLAN).advice


def measured_without(plan: Plan) -> Outcome:
    processes = [told(rank, ends=[1.0, 2.0], busy=[0.5, 0.5]) for rank in (0, 1)]
    return outcome_of(dataclasses.replace(plan, predicted=None), processes, crowded=False)


# --- beside one process -----------------------------------------------------------------------------------------------


def weights() -> dict[str, torch.Tensor]:
    return {"a": torch.arange(6.0).view(2, 3), "b": torch.zeros(0), "c": torch.tensor(1.5, dtype=torch.bfloat16)}


@pytest.mark.parametrize("exact", [True, False])
def test_the_same_is_equal(exact: bool) -> None:
    reference = Reference(losses=(1.0, 2.0), weights=weights(), eager_difference=0.5)
    assert compare(reference, weights().items(), [1.0, 2.0], exact=exact) == {
        "equal": True,
        "loss_difference": 0.0,
        "largest_weight_difference": 0.0,
        "eager_difference": 0.5,
    }


def test_the_last_bit_counts() -> None:
    reference = Reference(losses=(1.0,), weights=weights(), eager_difference=None)
    other = weights()
    other["a"][0, 1] = torch.nextafter(other["a"][0, 1], torch.tensor(9.0))
    found = compare(reference, other.items(), [1.0], exact=True)
    assert not found["equal"]
    assert found["largest_weight_difference"] > 0
    assert not compare(reference, weights().items(), [1.0 + 1e-15], exact=True)["equal"]
    negative = weights() | {"a": weights()["a"] * torch.tensor([[-1.0, 1, 1], [1, 1, 1]])}
    assert not compare(reference, negative.items(), [1.0], exact=True)["equal"], "-0 is not 0"


def test_over_many_replicas_losses_are_equal_to_rounding() -> None:
    reference = Reference(losses=(1.0,), weights=weights(), eager_difference=None)
    assert compare(reference, weights().items(), [1.0 + 1e-6], exact=False)["equal"]
    assert not compare(reference, weights().items(), [1.01], exact=False)["equal"]


def test_nan_is_equal_to_nan_at_the_same_place_alone() -> None:
    nan = math.nan
    reference = Reference(losses=(1.0, nan), weights={"w": torch.tensor([1.0, nan])}, eager_difference=None)
    for exact in (True, False):
        found = compare(reference, [("w", torch.tensor([1.0, -nan]))], [1.0, nan], exact=exact)
        assert (found["equal"], found["loss_difference"], found["largest_weight_difference"]) == (True, 0.0, 0.0)
        assert not compare(reference, [("w", torch.tensor([1.0, nan]))], [1.0, 2.0], exact=exact)["equal"]
        assert not compare(reference, [("w", torch.tensor([1.0, nan]))], [nan, nan], exact=exact)["equal"]
    assert not compare(reference, [("w", torch.tensor([nan, 1.0]))], [1.0, nan], exact=True)["equal"]
