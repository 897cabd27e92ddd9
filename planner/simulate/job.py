"""What the time model needs to know beside the order of actions."""

from __future__ import annotations

from planner.cluster import Cluster
from planner.graph.stage import Stage
from planner.record import Bytes, Count, Fraction, record


@record
class Tie:
    """A parameter that several stages use: its gradients are summed once a step, down ``stages`` (ascending here)."""

    name: str
    bytes: Bytes
    trainable: bool
    stages: tuple[int, ...]


@record
class Job:
    """One training iteration of a pipeline: P ranks, D replicas, T tensor ranks a stage, M micro-batches a replica.

    ``cluster`` is resolved: memory_bytes, where given, is a number; links that are None are free.
    """

    stages: tuple[Stage, ...]
    num_ranks: Count
    num_microbatches: Count
    data: Count = 1
    tensor: Count = 1
    cluster: Cluster
    gradient_bytes_per_trainable_byte: Fraction
    state_bytes_per_trainable_byte: Fraction
    step_s_per_trainable_byte: Fraction
    ties: tuple[Tie, ...] = ()
