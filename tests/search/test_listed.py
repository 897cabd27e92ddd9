"""Every cut of a short chain with its bound, against orders at random of the same cut."""

from __future__ import annotations

import math
import random
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st
from support.random_profiles import random_cluster, random_profile

from planner.cluster import resolve
from planner.graph import LayerGraph
from planner.schedules import Placement
from planner.search import Asked, Configuration
from planner.search.figures import LayerFigures
from planner.search.job import job_of_cut
from planner.search.listed import listed
from tests.search.test_bound import fits, random_order


@given(seed=st.integers(0, 10**9))
@settings(max_examples=25, deadline=None)
def test_no_order_that_fits_is_faster_than_the_bound_of_its_cut(seed: int) -> None:
    """Loop and V, one rank too; replicas, links, overlap or not, recompute, memory."""
    rng = random.Random(seed)
    profile = random_profile(rng, chain=True, most_layers=7)
    graph = LayerGraph.of(profile)
    cluster = resolve(random_cluster(rng, memory=rng.choice((None, None, 500, 900))), profile)
    virtual, placement = rng.choice(((2, Placement.LOOP), (2, Placement.V), (3, Placement.LOOP)))
    ranks = rng.randint(1, 3)
    if ranks * virtual > len(graph):
        return
    configuration = Configuration(
        pipeline=ranks,
        data=rng.choice((1, 2)),
        tensor=1,
        virtual=virtual,
        placement=placement if ranks > 1 else Placement.LOOP,
        microbatch_size=1,
        num_microbatches=rng.randint(1, 5),
    )
    layers = LayerFigures(graph, microbatch_size=1, tensor=1, cluster=cluster)
    made = listed(layers, configuration)
    assert made is not None
    assert len(made.marks) == math.comb(len(graph) - 1, ranks * virtual - 1)
    asked = Asked(gpus=8, global_batch=8, cluster=cluster)
    for place in rng.sample(range(len(made.marks)), min(4, len(made.marks))):
        marks = made.marks[place].tolist()
        cut = [list(graph.names[low:high]) for low, high in pairwise(marks)]
        again = [rng.random() < 0.3 for _ in cut]
        job = job_of_cut(graph, asked, configuration, cut, again)
        for split in (True, False):
            assert fits(job, random_order(rng, job, split=split)) >= made.bounds_s[place] * (1 - 1e-6)
