"""The cluster: devices, nodes, links; what a cluster file may say, and what holds where it is silent.

    global rank of (pipeline rank r, replica d, tensor rank t) = (r·D + d)·T + t;  node = global rank // gpus_per_node

so tensor ranks sit together on one node, and consecutive pipeline ranks as near as that leaves.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Final

from annotated_types import Ge, Lt

from planner.errors import InputError
from planner.files import as_record, read_yaml
from planner.profile import Profile
from planner.record import Bandwidth, Bytes, Count, Seconds, record
from planner.units import parse_bytes

_GIB = 1024**3
DEVICE_MEMORY_BYTES: Final = {
    "v100-16gb": int(15.7 * _GIB),
    "v100-32gb": int(31.7 * _GIB),
    "t4": int(14.5 * _GIB),
    "a10g": int(22.0 * _GIB),
    "l4": int(22.0 * _GIB),
    "l40s": int(44.3 * _GIB),
    "rtx-4090": int(23.5 * _GIB),
    "a100-40gb": int(39.3 * _GIB),
    "a100-80gb": int(79.1 * _GIB),
    "h100-pcie": int(79.1 * _GIB),
    "h100-sxm": int(79.1 * _GIB),
    "h200": int(139.8 * _GIB),
    "b200": int(178.3 * _GIB),
    "mi250x-gcd": int(63.9 * _GIB),
    "mi300x": int(191.9 * _GIB),
}
"""Memory that a process finds on known devices: what drivers report, a little under the name's figure."""

DEFAULT_RESERVE_FRACTION: Final = 0.1


@record
class Link:
    """One link: a message of n bytes keeps it busy n / bandwidth, and arrives ``latency_s`` after that."""

    latency_s: Seconds
    bandwidth_bytes_per_s: Bandwidth


@record
class ClusterLinks:
    """Links within a node and between nodes.

    ``sums``: what the sums over a stage's tensor ranks run at, by the formula of a ring, where that is not
    ``intra_node``: messages and sums may go different ways.
    """

    intra_node: Link | None = None
    inter_node: Link | None = None
    sums: Link | None = None


@record
class Cluster:
    """What a cluster file says; every key is optional, and ``memory_bytes`` may be a known device's name.

    ``memory_reserve_fraction``: what allocators keep beyond what they hand out; a rank fits when its peak is at most
    memory_bytes · (1 - memory_reserve_fraction).
    """

    gpus_per_node: Count | None = None
    memory_bytes: Bytes | str | None = None
    links: ClusterLinks | None = None
    overlap: bool | None = None
    memory_reserve_fraction: Annotated[float, Ge(0), Lt(1)] | None = None


def read_cluster(path: Path) -> Cluster:
    """The cluster in a YAML file. Raises InputError with file, place and mend where anything in it is wrong."""
    cluster = as_record(Cluster, read_yaml(path), path=path)
    if isinstance(cluster.memory_bytes, str):
        try:
            device_memory(cluster.memory_bytes)
        except InputError as error:
            raise InputError(f"{path}: memory_bytes: {error.message}", hint=error.hint) from None
    return cluster


def device_memory(name: str) -> int:
    """Bytes of memory of a known device. Raises InputError on an unknown name."""
    known = DEVICE_MEMORY_BYTES.get(name.strip().lower().replace(" ", "-").replace("_", "-"))
    if known is None:
        try:
            mend = f"write it in bytes, {parse_bytes(name)}"
        except InputError:
            mend = f"write bytes, or one of {', '.join(DEVICE_MEMORY_BYTES)}"
        raise InputError(f"{name!r} is no known device", hint=mend)
    return known


def parse_memory(text: str) -> int:
    """Bytes of a device's memory: an amount, as ``80GiB``, or a known device's name. Raises InputError on neither."""
    try:
        return parse_bytes(text)
    except InputError as error:
        try:
            return device_memory(text)
        except InputError:
            known = ", ".join(DEVICE_MEMORY_BYTES)
            raise InputError(error.message, hint=f"{error.hint}, or a known device: {known}") from None


def resolve(cluster: Cluster | None, profile: Profile, memory: int | None = None) -> Cluster:
    """The cluster with every default filled.

    Memory (bytes a device): ``memory``, else the cluster's, else the profile's (0 there: not known), else None,
    unlimited. Links of each level: the cluster's, else the profile's, else None, free. Sums: the cluster's, else those
    profiled where the links within a node are. gpus_per_node None: one node.
    """
    given = cluster or Cluster()
    named = device_memory(given.memory_bytes) if isinstance(given.memory_bytes, str) else given.memory_bytes
    known = (memory, named, profile.device.memory_bytes or None)
    limit = next((found for found in known if found is not None), None)
    links, measured = given.links or ClusterLinks(), profile.links
    default = sums = None
    if measured is not None:
        default = Link(latency_s=measured.latency_s, bandwidth_bytes_per_s=measured.bandwidth_bytes_per_s)
        if measured.sums is not None and links.intra_node is None:
            sums = Link(latency_s=measured.sums.latency_s, bandwidth_bytes_per_s=measured.sums.bandwidth_bytes_per_s)
    overlap = measured.overlap if given.overlap is None and measured else given.overlap
    reserve = given.memory_reserve_fraction
    return Cluster(
        gpus_per_node=given.gpus_per_node,
        memory_bytes=limit,
        links=ClusterLinks(
            intra_node=links.intra_node or default, inter_node=links.inter_node or default, sums=links.sums or sums
        ),
        overlap=True if overlap is None else overlap,
        memory_reserve_fraction=DEFAULT_RESERVE_FRACTION if reserve is None else reserve,
    )


def memory_limit(cluster: Cluster) -> int | None:
    """The peak in bytes that a rank of a resolved cluster may reach, memory · (1 - reserve); None: unlimited."""
    if cluster.memory_bytes is None:
        return None
    assert isinstance(cluster.memory_bytes, int), "a resolved cluster names bytes"
    return int(cluster.memory_bytes * (1 - (cluster.memory_reserve_fraction or 0.0)))


def check_tensor(cluster: Cluster, tensor: int) -> None:
    """Raises InputError where the T ranks of one stage would not lie within a node."""
    if cluster.gpus_per_node is not None and cluster.gpus_per_node % tensor:
        raise InputError(
            f"{cluster.gpus_per_node} GPUs per node cannot hold groups of {tensor} tensor ranks",
            hint="the tensor-parallel size must divide gpus_per_node",
        )


def sum_link(cluster: Cluster | None) -> Link | None:
    """The link over which the tensor ranks of one stage, which lie on one node, add up. None: free."""
    links = (cluster.links if cluster is not None else None) or ClusterLinks()
    return links.sums or links.intra_node


def link_between(a: int, b: int, *, data: int, tensor: int, cluster: Cluster) -> Link | None:
    """The link that counts between pipeline ranks a and b: the slowest over replicas and tensor ranks. None: free."""
    low, high = sorted((a, b))
    first = range(low * data, low * data + data)
    return _slowest(zip(first, (rank + (high - low) * data for rank in first), strict=True), tensor, cluster)


def ring_link(rank: int, *, data: int, tensor: int, cluster: Cluster) -> Link | None:
    """The slowest link on the ring of a pipeline rank's D replicas, over which they all-reduce. None: free."""
    first = rank * data
    return _slowest(((first + d, first + (d + 1) % data) for d in range(data)), tensor, cluster)


def _slowest(pairs: Iterable[tuple[int, int]], tensor: int, cluster: Cluster) -> Link | None:
    """The slowest link over pairs of groups of T tensor ranks, which lie whole on a node: highest latency, lowest
    bandwidth."""
    links = cluster.links or ClusterLinks()
    if cluster.gpus_per_node is None or links.intra_node == links.inter_node:
        return links.intra_node
    per_node = max(1, cluster.gpus_per_node // tensor)
    levels = set()
    for one, other in pairs:
        levels.add(one // per_node == other // per_node)
        if len(levels) == 2:
            break
    used = [link for level in levels if (link := links.intra_node if level else links.inter_node) is not None]
    if not used:
        return None
    return Link(
        latency_s=max(link.latency_s for link in used),
        bandwidth_bytes_per_s=min(link.bandwidth_bytes_per_s for link in used),
    )
