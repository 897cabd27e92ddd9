"""The cluster: devices, nodes, links; what a cluster file may say."""

from __future__ import annotations

from planner.record import Bytes, Count, Fraction, Positive, Seconds, record


@record
class Link:
    """One link: a message of n bytes keeps it busy n / bandwidth, and arrives ``latency_s`` after that."""

    latency_s: Seconds
    bandwidth_bytes_per_s: Positive


@record
class ClusterLinks:
    """Links within a node and between nodes."""

    intra_node: Link | None = None
    inter_node: Link | None = None


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
    memory_reserve_fraction: Fraction | None = None
