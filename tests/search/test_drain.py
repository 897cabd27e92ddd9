"""What memory lets a rank have left, against every state it may be in; and bounds against orders that just fit."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.random_orders import random_order
from support.random_profiles import all_cuts, job_for, random_cluster, random_profile

from planner.cluster import resolve
from planner.graph import LayerGraph, Stage
from planner.schedules import Letter
from planner.search.bound import cut_bound
from planner.search.drain import most_s, pieces
from planner.simulate import Job, Walk, simulate
from planner.simulate.memory import held_by
from planner.simulate.synthesise import synthesise


def random_job(rng: random.Random) -> Job:
    """Any small cut, ranks of several stages too, with memory for everything."""
    graph = LayerGraph.of(random_profile(rng, chain=rng.random() < 0.5, most_layers=6))
    ranks = rng.randint(1, min(3, len(graph)))
    stages = rng.randint(ranks, min(len(graph), 2 * ranks))
    cut = rng.choice(list(itertools.islice(all_cuts(graph, stages), 50)))
    homes = [*range(ranks), *(rng.randrange(ranks) for _ in range(stages - ranks))]
    rng.shuffle(homes)
    return job_for(
        graph,
        cut,
        ranks=homes,
        microbatch_size=1,
        num_microbatches=rng.randint(2, 8),
        cluster=resolve(random_cluster(rng, memory=10**8), graph.profile),
        data=rng.choice((1, 1, 2)),
        recompute=[rng.random() < 0.3 for _ in cut],
    )


def check_that_what_fits_is_no_faster(seed: int) -> None:
    rng = random.Random(seed)
    job = random_job(rng)
    walk = Walk(job)
    orders = [random_order(rng, job, split=split) for split in (True, False) for _ in range(4)]
    made = [synthesise(walk, split=split, steps=3) for split in (True, False)]
    orders += [order for order in made if order is not None]
    timelines = [simulate(walk, order) for order in orders]
    peaks = [max(use.peak_memory_bytes for use in timeline.ranks) for timeline in timelines]
    for room in {min(peaks), *rng.sample(peaks, 2)}:
        cluster = dataclasses.replace(job.cluster, memory_bytes=room, memory_reserve_fraction=0.0)
        just = Walk(dataclasses.replace(job, cluster=cluster))
        bounds = {fused: cut_bound(just, fused=fused) for fused in (False, True)}
        for order, timeline, peak in zip(orders, timelines, peaks, strict=True):
            if peak <= room:
                whole = all(action.letter in (Letter.FORWARD, Letter.BACKWARD) for row in order for action in row)
                assert timeline.iteration_s >= bounds[whole] * (1 - 1e-9)


@given(seed=st.integers(0, 10**9))
@settings(max_examples=40, deadline=None)
def test_no_order_is_faster_that_just_fits(seed: int) -> None:
    """Memory is what one of the orders takes at its peak: rows for what memory holds are as near as they get."""
    check_that_what_fits_is_no_faster(seed)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(10))
def test_no_order_is_faster_that_just_fits_at_length(chunk: int) -> None:
    for seed in range(100 * chunk, 100 * chunk + 100):
        check_that_what_fits_is_no_faster(seed)


def left_s(stage: Stage, state: str) -> tuple[int, float]:
    """What a rank holds for a micro-batch of a stage whose F is done, and what is left of it, before I, before W."""
    kept = held_by(stage, Letter.FORWARD)[1]
    waiting = kept + held_by(stage, Letter.BACKWARD_INPUT)[1]
    backward, weight = stage.backward_input_s, stage.backward_weight_s
    return {"held": (kept, backward + weight), "waiting": (waiting, weight), "done": (0, 0.0)}[state]


@given(seed=st.integers(0, 10**9))
@settings(max_examples=40, deadline=None)
def test_a_rank_has_no_more_left_in_any_state(seed: int) -> None:
    """Every state of up to four micro-batches in two stages that a room holds."""
    rng = random.Random(seed)
    job = random_job(rng)
    own, count = job.stages[:2], rng.randint(1, 4)
    held = [
        piece
        for stage in own
        for piece in pieces(stage, backward_s=stage.backward_input_s, weight_s=stage.backward_weight_s)
    ]
    ways = [
        [left_s(stage, state) for state in states]
        for stage in own
        for states in itertools.combinations_with_replacement(("held", "waiting", "done"), count)
    ]
    per_stage = [ways[: len(ways) // len(own)], ways[len(ways) // len(own) :]] if len(own) == 2 else [ways]
    for chosen in itertools.product(*per_stage):
        states = [state for stage in chosen for state in stage]
        room = sum(size for size, _ in states)
        assert sum(seconds for _, seconds in states) <= most_s(held, room, count) * (1 + 1e-9)
