"""Clusters: what files say, which default holds where, which link counts."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.plans import profiles

from planner.cluster import (
    DEVICE_MEMORY_BYTES,
    Cluster,
    ClusterLinks,
    Link,
    check_tensor,
    device_memory,
    link_between,
    memory_limit,
    read_cluster,
    resolve,
    ring_link,
    sum_link,
)
from planner.errors import InputError
from planner.profile import Profile

NEAR = Link(latency_s=1e-6, bandwidth_bytes_per_s=4e11)
FAR = Link(latency_s=1e-5, bandwidth_bytes_per_s=2e10)


@given(profiles(), st.sampled_from([None, 5, 1 << 40]), st.sampled_from([None, 7, "h200"]), st.booleans())
def test_memory_is_the_options_else_the_clusters_else_the_profiles(
    profile: Profile, option: int | None, said: int | str | None, given_cluster: bool
) -> None:
    cluster = Cluster(memory_bytes=said) if given_cluster else None
    of_cluster = None if not given_cluster else DEVICE_MEMORY_BYTES["h200"] if said == "h200" else said
    wanted = option or of_cluster or profile.device.memory_bytes or None
    resolved = resolve(cluster, profile, option)
    assert resolved.memory_bytes == wanted
    assert memory_limit(resolved) == (None if wanted is None else int(wanted * 0.9))


@given(profiles(), st.sampled_from([None, NEAR]), st.sampled_from([None, FAR]), st.sampled_from([None, False]))
def test_links_and_overlap_are_the_clusters_else_the_profiles(
    profile: Profile, near: Link | None, far: Link | None, overlap: bool | None
) -> None:
    resolved = resolve(Cluster(links=ClusterLinks(intra_node=near, inter_node=far), overlap=overlap), profile)
    measured = profile.links and Link(
        latency_s=profile.links.latency_s, bandwidth_bytes_per_s=profile.links.bandwidth_bytes_per_s
    )
    known = profile.links.sums if profile.links and near is None else None
    sums = known and Link(latency_s=known.latency_s, bandwidth_bytes_per_s=known.bandwidth_bytes_per_s)
    assert resolved.links == ClusterLinks(intra_node=near or measured, inter_node=far or measured, sums=sums)
    assert sum_link(resolved) == (sums or near or measured)
    assert resolved.overlap is (overlap if overlap is not None else True)
    assert resolve(resolved, profile) == resolved


def test_memory_may_be_a_known_device() -> None:
    assert device_memory("H100_SXM") == device_memory("h100-sxm") > 79 * 2**30
    with pytest.raises(InputError, match="write it in bytes, 85899345920"):
        device_memory("80GiB")
    with pytest.raises(InputError, match=r"one of .*a100-40gb"):
        device_memory("gameboy")


@given(
    st.integers(1, 5), st.integers(1, 4), st.sampled_from([1, 2, 4]), st.sampled_from([None, 4, 8, 12]), st.booleans()
)
def test_the_slowest_link_counts(ranks: int, data: int, tensor: int, per_node: int | None, free: bool) -> None:
    """Against every replica and tensor rank, one by one, in the rank layout (r·D + d)·T + t."""
    links = ClusterLinks(intra_node=None if free else NEAR, inter_node=FAR)
    cluster = Cluster(gpus_per_node=per_node, links=links)

    def slowest(pairs: set[tuple[int, int]]) -> Link | None:
        far = any(per_node and one // per_node != other // per_node for one, other in pairs)
        return FAR if far else links.intra_node

    def place(rank: int, replica: int, slot: int) -> int:
        return (rank * data + replica) * tensor + slot

    for a, b in product(range(ranks), repeat=2):
        if a != b:
            pairs = {(place(a, d, t), place(b, d, t)) for d in range(data) for t in range(tensor)}
            assert link_between(a, b, data=data, tensor=tensor, cluster=cluster) == slowest(pairs)
    for rank in range(ranks):
        ring = {
            (place(rank, d, t), place(rank, (d + 1) % data, t)) for d in range(data) for t in range(tensor) if data > 1
        }
        assert ring_link(rank, data=data, tensor=tensor, cluster=cluster) == slowest(ring)


def test_tensor_ranks_lie_within_a_node() -> None:
    check_tensor(Cluster(gpus_per_node=8), 4)
    check_tensor(Cluster(), 3)
    with pytest.raises(InputError, match="8 GPUs per node cannot hold groups of 3"):
        check_tensor(Cluster(gpus_per_node=8), 3)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "must be a mapping of keys to values, not null"),
        ("memory_bytes: [1]", "memory_bytes: must be a whole number, not [1]"),
        ("memory_bytes: -1", "memory_bytes: must be at least 0, not -1"),
        ("memory_bytes: 80GiB", "memory_bytes: '80GiB' is no known device; write it in bytes"),
        ("gpus_per_node: 0", "gpus_per_node: must be at least 1, not 0"),
        ("gpus_per_node: '8'", 'gpus_per_node: must be a whole number, not "8"'),
        ("memory_reserve_fraction: 1", "memory_reserve_fraction: must be under 1, not 1"),
        ("memory_reserve_fraction: .nan", "memory_reserve_fraction: must be a finite number"),
        ("links: {intra: {}}", "links.intra: is no key of this format"),
        ("links: {intra_node: {latency_s: 0}}", "links.intra_node.bandwidth_bytes_per_s: is missing"),
        ("overlap: on", 'overlap: must be true or false, not "on"'),
        ("overlap: true\noverlap: true", "line 2 column 1: key 'overlap' stands twice"),
        ("gpus_per_node: 1e400", "gpus_per_node: must be a whole number, not Infinity"),
        ("&a [*a]", "its aliases spell out too many entries"),
        ("!!python/object:os.system {}", "line 1 column 1: could not determine a constructor"),
        ("1: 2", "1: is no key of this format"),
        ("[" * 3000, "is nested too deep"),
        ("gpus_per_node: " + "9" * 5000, "line 1 column 16: a whole number of 5000 characters"),
    ],
)
def test_what_is_wrong_in_a_cluster_file_is_named(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    with pytest.raises(InputError) as raised:
        read_cluster(path)
    assert str(raised.value).startswith(f"{path}: {said}")
    assert "\n" not in str(raised.value)


def test_a_cluster_file_is_read_as_people_write_it(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(
        "gpus_per_node: 8\nmemory_bytes: h100-sxm\nlinks:\n"
        "  intra_node: &link {latency_s: 2e-6, bandwidth_bytes_per_s: 4e11}\n  inter_node: *link\noverlap: false\n"
    )
    link = Link(latency_s=2e-6, bandwidth_bytes_per_s=4e11)
    assert read_cluster(path) == Cluster(
        gpus_per_node=8,
        memory_bytes="h100-sxm",
        links=ClusterLinks(intra_node=link, inter_node=link),
        overlap=False,
    )
