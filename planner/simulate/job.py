"""What the time model needs to know beside the order of actions."""

from __future__ import annotations

from planner.cluster import Cluster
from planner.graph.stage import Stage, Tie
from planner.record import Count, Fraction, record

__all__ = ["Job", "Tie"]


@record
class Job:
    """One training iteration of a pipeline: P ranks, D replicas, T tensor ranks a stage, M micro-batches a replica.

    ``cluster`` is resolved: memory_bytes, where given, is a number; links that are None are free. ``zero1``: each
    replica has 1/D of the optimizer's state and steps 1/D of the parameters; ``state_bytes_per_trainable_byte`` and
    ``step_s_per_trainable_byte`` are those of that share.
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
    zero1: bool = False
