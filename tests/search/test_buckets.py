"""One rank's stages as buckets of the all-reduce: their best order reaches the bound of their cut."""

from __future__ import annotations

import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.random_orders import random_order
from support.random_profiles import all_cuts, job_for, random_cluster, random_profile

from planner.graph import LayerGraph
from planner.search.bound import cut_bound
from planner.search.buckets import in_buckets
from planner.simulate import Walk, simulate


@given(seed=st.integers(0, 10**9))
@settings(max_examples=60, deadline=None)
def test_buckets_reach_the_bound_of_their_cut(seed: int) -> None:
    """Chains and graphs, with and without gradients that come back, sharded optimizers too."""
    rng = random.Random(seed)
    graph = LayerGraph.of(random_profile(rng, chain=rng.random() < 0.5, most_layers=6))
    stages = rng.randint(1, min(4, len(graph)))
    job = job_for(
        graph,
        rng.choice(list(all_cuts(graph, stages))),
        ranks=[0] * stages,
        microbatch_size=1,
        num_microbatches=rng.randint(1, 5),
        cluster=random_cluster(rng, memory=None),
        data=rng.choice((1, 2, 4)),
    )
    walk = Walk(dataclasses.replace(job, zero1=job.data > 1 and rng.random() < 0.3))
    bound = cut_bound(walk, fused=False)
    best = min(simulate(walk, order, memory=False).iteration_s for order in in_buckets(walk))
    assert best >= bound * (1 - 1e-9)
    if not walk.job.zero1:  # with it the step and the gathering of all stages follow in one piece
        assert best == pytest.approx(bound, rel=1e-9)
    for split in (True, False):
        assert simulate(walk, random_order(rng, walk.job, split=split)).iteration_s >= bound * (1 - 1e-9)
