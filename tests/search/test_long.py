"""Pipelines so long that list scheduling would take minutes, with too little memory for 1F1B."""

from __future__ import annotations

import pytest
from support.chains import chain

from planner.cluster import Cluster, ClusterLinks, Link, memory_limit, resolve
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
