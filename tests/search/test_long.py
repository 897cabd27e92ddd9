"""Large questions with too little memory for 1F1B: pipelines so long that list scheduling would take minutes, too."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest
from support.chains import chain

from planner.cluster import Cluster, ClusterLinks, Link, memory_limit, resolve
from planner.errors import NothingFitsError
from planner.search import Asked, solve

LINK = Link(latency_s=5e-6, bandwidth_bytes_per_s=50e9)


@pytest.mark.slow
@pytest.mark.parametrize("gibi", [5, 8])
def test_with_more_micro_batches_a_plan_is_nearer_to_its_bound(gibi: int) -> None:
    """Filling and draining weigh less then: 64 ranks of two stages, and up to 384,000 actions."""
    profile = chain(256, sizes=(1,))
    cluster = resolve(Cluster(links=ClusterLinks(intra_node=LINK, inter_node=LINK)), profile, gibi * 2**30)
    limit = memory_limit(cluster)
    assert limit is not None
    gaps = []
    for count in (250, 1000):
        asked = Asked(gpus=64, global_batch=count, cluster=cluster, pipeline=(64,), data=(1,), virtual=(2,))
        found = solve(profile, asked)
        assert found.best.peak_memory_bytes <= limit
        gaps.append(found.gap)
    assert gaps[1] <= gaps[0]


@pytest.mark.slow
@pytest.mark.parametrize("gibi", [16, 24, 32])
def test_a_question_asked_whole_is_answered_as_well_as_in_parts(gibi: int) -> None:
    """Larger micro-batches and shorter pipelines have lower bounds, and no room to fill: they must not take it all."""
    profile = chain(200)
    links = ClusterLinks(intra_node=LINK, inter_node=LINK)
    cluster = resolve(Cluster(gpus_per_node=8, links=links), profile, gibi * 2**30)
    asked = Asked(gpus=64, global_batch=1024, cluster=cluster)
    whole = solve(profile, asked).best
    for ranks, size in ((8, 4), (16, 2), (16, 4), (32, 2)):
        part = dataclasses.replace(asked, pipeline=(ranks,), microbatch=(size,))
        with contextlib.suppress(NothingFitsError):
            assert whole.iteration_s <= 1.03 * solve(profile, part).best.iteration_s, (ranks, size)
